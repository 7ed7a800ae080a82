"""Every code block of the documents runs, in the order of its page, and prints what is shown (docs/code-blocks.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import pages
from tests.harness.errors import RanksFailed


def _cases() -> list[object]:
    cases = []
    for path in pages.documents():
        steps = pages.steps(path.read_text())
        if not steps:
            continue
        # Commands start processes, and packages are imported: all of these pages are half an hour of a core.
        long = any(block.step == "shell" or "on_pages_packages" in block.code for block in steps)
        long_marks = [pytest.mark.slow, pytest.mark.hang_after(1800)]
        marks = long_marks if long else [pytest.mark.hang_after(300)]
        cases.append(pytest.param(path, id=pages.name(path), marks=marks))
    return cases


@pytest.mark.sample(2, full=31)
@pytest.mark.parametrize("path", _cases())
def test_the_blocks_of_a_page_run(path: Path, tmp_path: Path) -> None:
    pages.run(path, tmp_path)


def _page(folder: Path, text: str) -> Path:
    """A document of the repository cannot be written by a test: its name alone is made to fit."""
    path = folder / "page.md"
    path.write_text(text)
    return path


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    return lambda text: _page(tmp_path, text)


def test_blocks_share_a_namespace_a_folder_and_the_ranks(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    page = write(
        '```toml title="sub/a.toml"\nx = 1\n```\n'
        "<!-- run: setup\nimport torch, tomllib\nimport torch.distributed as dist\n-->\n"
        '```python\nx = torch.tensor(float(tomllib.load(open("sub/a.toml", "rb"))["x"]))\ndist.all_reduce(x)\n```\n'
        "```sh\necho 2 > two\n```\n"
        '```python\nassert x == float(open("two").read())\n```\n'
        '```sh exit="3"\nexit 3\n```\n'
        '```sh norun="why"\nexit 4\n```\n'
        "```python\nprint(int(x), dist.get_rank())\n```\n```text\n2 0\n```\n"
        "```console\n$ cat two\n2\n```\n"
    )
    folder = tmp_path / "scratch"
    folder.mkdir()
    pages.run(page, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["sub", "two"]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("\n```sh\necho spoken; false\n```\n", AssertionError, ("page.md, line 3", "spoken", "found 1")),
        ("\n```python\nx = 1\nassert x == 2\n```\n", RanksFailed, ("page.md", "line 4", "AssertionError")),
        ("```python\nx = 1\n```\n```sh\nfalse\n```\n", RanksFailed, ("page.md, line 5",)),
        ("```sh\necho 1\n```\n```text\n2\n```\n", AssertionError, ("page.md, line 5", "2", "it printed ---\n1")),
        ("```python\nprint(1)\n```\n```text\n2\n```\n", RanksFailed, ("page.md, line 5", "it printed ---\n1")),
        ("```console\n$ echo 1\n2\n```\n", AssertionError, ("page.md, line 2", "it printed ---\n1")),
    ],
)
def test_a_block_that_fails_is_named_with_its_line(  # type: ignore[no-untyped-def]
    write, tmp_path: Path, text: str, error: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(error) as raised:
        pages.run(write(text), tmp_path)
    for word in words:
        assert word in str(raised.value)
