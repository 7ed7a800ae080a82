"""Code blocks of documents keep the convention of docs/code-blocks.md; tests/procs/test_pages.py runs them."""

from __future__ import annotations

import pytest

from tests.harness.pages import DOCS, ROOT, Block, blocks, documents, name, problems, run_by, steps, unlike

REASONS = ROOT / "tests" / "norun.txt"


def test_blocks_keep_the_convention() -> None:
    assert {name(path): found for path in documents() if (found := problems(path.read_text()))} == {}


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
        ('```text output="something like it"\nx\n```', "expected output on a text block"),
        ('```sh output="numbers vary"\nx\n```', "expected output on a text block"),
    ],
)
def test_what_is_against_the_convention_is_found(block: str, what: str) -> None:
    (found,) = problems(f"\n{block}\n")
    assert what in found and found.startswith("line 3")


SHOWN = """
```sh
date
```

```text
of the command
```

```text
a tree
```

```python
x = 1
```

```text
after Python that prints nothing
```

```python
print(x)
```

<!-- run: sh
true
-->

```text
of Python, past what is invisible
```

```console
$ fullshard --version
fullshard 0.2.0
```

```sh norun="needs Slurm"
srun date
```

```text
of what does not run
```

```sh
date
```

```text output="of another run"
other words
```
"""


def test_shown_output_belongs_to_what_prints_it() -> None:
    assert [block.shown and block.shown.code.strip() for block in steps(SHOWN)] == [
        "of the command",
        None,
        "of Python, past what is invisible",
        None,
        "fullshard 0.2.0",
        None,
    ]


PRINTED = "a warning\nstep 10  loss 2.4357\nsaved 3 tensors in 0.2 s\na   b\n-------\n1   2.50\nwhole: 3,411 values\n"


@pytest.mark.parametrize(
    "shown",
    ["step 10  loss 2.4401\nsaved 3 tensors in 11.9 ms\n", "step 10  loss 2.4357\n...\na b\n---------\n1 2.5\n", "\n"],
)
def test_output_that_was_printed(shown: str) -> None:
    assert unlike(Block("text", shown, 1), PRINTED) is None


@pytest.mark.parametrize(
    ("shown", "line"),
    [
        ("step 10  loss 2.5357\n", "step 10  loss 2.5357"),  # another value
        ("step 11  loss 2.4357\n", "step 11  loss 2.4357"),  # another count
        ("saved 3 tensors\n", "saved 3 tensors"),  # a part of a line
        ("saved 3 tensors in 1 s\nstep 10  loss 2.4357\n", "step 10  loss 2.4357"),  # another order
        ("a b\na b\n", "a b"),  # printed once
        ("whole: 3,412 values\n", "whole: 3,412 values"),
    ],
)
def test_output_that_was_not_printed(shown: str, line: str) -> None:
    assert unlike(Block("text", shown, 1), PRINTED) == line


def test_numbers_that_vary_are_not_compared_and_words_are() -> None:
    vary = (("output", "numbers vary"),)
    assert unlike(Block("text", "step 11  loss 9.9\n", 1, vary), PRINTED) is None
    assert unlike(Block("text", "stage 11  loss 9.9\n", 1, vary), PRINTED) == "stage 11  loss 9.9"


def test_most_of_the_output_that_pages_show_is_compared() -> None:
    blocks_of = {path: blocks(path.read_text()) for path in documents()}
    compared = sum(block.shown is not None for path in blocks_of for block in steps(path.read_text()))
    others = [
        f"{name(path)}, line {block.line}"
        for path, found in blocks_of.items()
        for block in found
        if block.get("output") == "of another run"
    ]
    assert compared >= 25 and len(others) <= 5, others
