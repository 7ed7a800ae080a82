"""The sections of docs/how-to/data.md and docs/how-to/tracking.md, each by itself: some need a package that is not
installed here, and are skipped with its name."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import pages

# In torch, in this package, or in Python.
HERE = {"torch", "fullshard", "pathlib"}


def _sections() -> Iterator[object]:
    for page in ("data", "tracking"):
        head, *rest = re.split(r"^## (.*)$", (pages.DOCS / "how-to" / f"{page}.md").read_text(), flags=re.M)
        shared = [block.code for block in pages.blocks(head) if block.step == "python"]
        for title, text in zip(rest[::2], rest[1::2], strict=True):
            code = [*shared, *(block.code for block in pages.blocks(text) if block.step == "python")]
            marks = [pytest.mark.slow] if _packages(code) or "tensorboard" in code[-1] else []
            yield pytest.param(code, id=f"{page}: {title}", marks=marks)


def _packages(code: list[str]) -> set[str]:
    """What the code imports that is not here."""
    return set(re.findall(r"^(?:from|import) (\w+)", "\n".join(code), flags=re.M)) - HERE


@pytest.mark.hang_after(300)
@pytest.mark.parametrize("code", list(_sections()))
def test_a_section_runs_on_two_ranks(code: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in sorted(_packages(code)):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    page = tmp_path / "page.md"
    page.write_text("".join(f"```python\n{block}```\n\n" for block in code))
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    pages.run(page, tmp_path)


def test_the_packages_that_pages_name_are_known() -> None:
    """A section that imports nothing new is no reason for a skip."""
    found = {str(case.id): _packages(case.values[0]) for case in _sections()}  # type: ignore[attr-defined]
    assert {name for names in found.values() for name in names} == {"datasets", "torchdata", "wandb", "mlflow"}
    assert sum(not names for names in found.values()) >= 3
