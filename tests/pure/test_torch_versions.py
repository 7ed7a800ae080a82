"""docs/torch-versions.md: each row names a test that is there; and the script that found the rows finds a change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import torch_surface

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "torch-versions.md").read_text()
ROWS = [line for line in PAGE.splitlines() if re.match(r"\| 2\.1\d", line)]
LINK = re.compile(r"\[(test_\w+)\]\(\.\./(tests/[\w/]+\.py)\)")


def test_each_row_names_a_test_that_is_there() -> None:
    rows = [row for row in ROWS if row.count(" | ") == 3]
    assert len(rows) > 25 and len(ROWS) - len(rows) == 5, "a change without a test, or no deprecation"
    for row in rows:
        links = LINK.findall(row)
        assert len(links) == 1, row
        name, path = links[0]
        assert re.search(rf"^ *def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {name}: {row}"


def test_each_version_and_each_new_method_has_a_row() -> None:
    assert {row.split()[1].rstrip(";,") for row in ROWS} >= {f"2.{minor}" for minor in range(11, 16)}
    for name in ("finalize_backward", "set_keep_unsharded_storage", "param_dtype_override_fn", "reset_iter_state"):
        assert any(f"`{name}`" in row or f".{name}`" in row for row in ROWS), name


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("", "def reduce(a, b=1): ...", "+ distributed_c10d.py::reduce (a, b=1)"),
        ("def reduce(a): ...", "def _reduce(a): ...", "- distributed_c10d.py::reduce"),
        ("def f(a=1): ...", "def f(a=2): ...", "~ distributed_c10d.py::f\n    (a=1)\n    (a=2)"),
        ("def f(a: int): ...", "def f(a: str): ...", ""),
        ("def f(): ...", "@deprecated('x')\ndef f(): ...", "~ distributed_c10d.py::f\n    ()\n    () @deprecated('x')"),
        ("class A: ...", "class A:\n    x: int = 0", "+ distributed_c10d.py::A.x = 0"),
        ("__all__ = ['a']", "__all__ = []", "~ distributed_c10d.py::__all__\n    ['a']\n    []"),
    ],
)
def test_the_script_finds_a_change(old: str, new: str, line: str, tmp_path: Path) -> None:
    found = []
    for name, text in (("old", old), ("new", new)):
        folder = tmp_path / name / "torch" / "distributed"
        folder.mkdir(parents=True)
        (folder / "distributed_c10d.py").write_text(text)
        found.append(torch_surface.surface(tmp_path / name))
    assert "\n".join(torch_surface.differences(*found)) == line


def test_a_folder_without_torch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected one that holds torch/distributed"):
        torch_surface.surface(tmp_path)
