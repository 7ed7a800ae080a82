"""Code blocks of documents keep the convention of docs/code-blocks.md; tests/procs/test_pages.py runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.pages import DOCS, ROOT, blocks, documents, name, problems, run_by

REASONS = ROOT / "tests" / "norun.txt"


@pytest.mark.parametrize("path", documents(), ids=name)
def test_blocks_keep_the_convention(path: Path) -> None:
    assert problems(path.read_text()) == []


def test_each_reason_not_to_run_is_listed_and_used() -> None:
    """None is silent: a new reason is a line in the list, and one that nobody uses any more goes."""
    listed = {line for line in REASONS.read_text().splitlines() if line and not line.startswith("#")}
    used: dict[str, str] = {}
    for path in documents():
        for block in blocks(path.read_text()):
            why = block.get("norun")
            if why is not None:
                used.setdefault(why, f"{name(path)}, line {block.line}")
    assert {why: where for why, where in used.items() if why not in listed} == {}
    assert listed - used.keys() == set()


def test_tests_that_run_a_page_name_it() -> None:
    pages = {path: by for path in documents() if (by := run_by(path.read_text()))}
    assert DOCS / "troubleshooting.md" in pages
    for path, by in pages.items():
        assert path.stem in (ROOT / by).read_text(), f"{by} is to run {name(path)} and does not name it"


PAGE = """
Words.

```python title="train.py"
print("file")
```

```sh
python train.py
```

<!-- run: setup
model = None
-->

1. In a list:

    ```python
    model = 1
    ```

```console
$ fullshard --version
fullshard 0.2.0
```

```sh norun="needs Slurm"
srun python train.py
```

<!-- run: sh
ls
-->

```text
output
```
"""


def test_blocks_are_found_with_how_they_run() -> None:
    found = [(block.step, block.commands) for block in blocks(PAGE)]
    assert found == [
        ("file", 'print("file")\n'),
        ("shell", "python train.py\n"),
        ("python", "model = None\n"),
        ("python", "model = 1\n"),
        ("shell", "fullshard --version"),
        (None, "srun python train.py\n"),
        ("shell", "ls\n"),
        (None, "output\n"),
    ]
    assert PAGE.splitlines()[blocks(PAGE)[3].line - 1].strip() == "model = 1"
    assert problems(PAGE) == []


@pytest.mark.parametrize(
    ("block", "what"),
    [
        ("```\nx\n```", "expected a language"),
        ("```sh if=1\nx\n```", "expected attributes"),
        ('```sh why="x"\nx\n```', "expected attributes"),
        ("```python\nx =\n```", "not Python"),
        ("```toml\nx =\n```", "not toml"),
        ("```yaml\nx: [\n```", "not yaml"),
        ("```console\noutput\n```", "expected commands after"),
    ],
)
def test_what_is_against_the_convention_is_found(block: str, what: str) -> None:
    (found,) = problems(f"\n{block}\n")
    assert what in found and found.startswith("line 3")
