"""Checkpoints that one version of torch saved load with another one: own format, DCP and `torch.save`, with optimizer.

Files that the oldest versions wrote are in tests/data. `make versions` names others: TESTS_CHECKPOINTS is a folder
where each version leaves what it saved, for other versions and later runs; TESTS_OTHER_PYTHON are interpreters with
other versions, which load what this one saves. What was loaded is a property of the test in pytest's report.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.data.exchange_checkpoints import FORMATS, name

ROOT = Path(__file__).parents[2]
WRITTEN = sorted(ROOT.glob("tests/data/checkpoints_torch-*"))
OTHERS = [found for found in os.environ.get("TESTS_OTHER_PYTHON", "").split(os.pathsep) if found]
KEPT = Path(os.environ["TESTS_CHECKPOINTS"]) if "TESTS_CHECKPOINTS" in os.environ else None
# Of one command, which is over in ten on idle cores.
SECONDS = 180.0

Record = Callable[[str, object], None]


def saved(kept: Path | None) -> list[Path]:
    """What other versions left in the folder."""
    return sorted(found for found in kept.iterdir() if found.name != name()) if kept and kept.is_dir() else []


def keep(folder: Path, kept: Path) -> None:
    """Leave what this version saved in `folder` for later runs, instead of what it left before."""
    kept.mkdir(parents=True, exist_ok=True)
    copied = Path(shutil.copytree(folder, kept.parent / f"{kept.name}-{name()}-{os.getpid()}"))
    shutil.rmtree(kept / name(), ignore_errors=True)
    copied.rename(kept / name())


def _run(interpreter: str, what: str, folders: Iterable[Path]) -> str:
    """The name of the interpreter."""
    environ = {**os.environ}
    if interpreter != sys.executable:
        environ.pop("PYTHONPATH", None)  # this interpreter's torch
    command = [interpreter, "-m", "tests.data.exchange_checkpoints", what, *map(str, folders)]
    ran = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=SECONDS)
    assert ran.returncode == 0, f"{interpreter} {what}: status {ran.returncode}\n{ran.stdout}\n{ran.stderr[-6000:]}"
    return ran.stdout.split()[-1]


def _load(interpreter: str, folders: Iterable[Path], scratch: Path) -> str:
    """The name of the interpreter. Loads copies: converted ones are written beside them."""
    copies = []
    for folder in folders:
        held = {path.name for path in folder.iterdir()}
        assert held == {*FORMATS, "expected.json"}, f"{folder}: written for other formats, {held}; remove it"
        copies.append(Path(shutil.copytree(folder, scratch / folder.name)))
    return _run(interpreter, "load", copies)


@pytest.mark.slow
@pytest.mark.hang_after(2 * SECONDS)
def test_what_other_versions_saved_loads(tmp_path: Path, record_property: Record) -> None:
    assert [path.name.rpartition("-")[2] for path in WRITTEN] == ["2.10.0", "2.11.0"]
    for folder in WRITTEN:
        said = json.loads((folder / "expected.json").read_text())
        assert said["torch"].split("+")[0] == folder.name.rpartition("-")[2] and len(said["state"]) > 20
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 1 << 18
    found = saved(KEPT)
    assert _load(sys.executable, [*WRITTEN, *found], tmp_path) == name()
    for folder in found:
        record_property("loads", folder.name)


@pytest.mark.slow
@pytest.mark.hang_after(2 * SECONDS)
def test_another_value_is_noticed(tmp_path: Path) -> None:
    written = Path(shutil.copytree(WRITTEN[0], tmp_path / "written"))
    path = written / "expected.json"
    path.write_text(path.read_text().replace('"/model/scale": "', '"/model/scale": "not '))
    with pytest.raises(AssertionError, match="/model/scale"):
        _load(sys.executable, [WRITTEN[1], written], tmp_path / "loaded")


# Without other versions it shows only that a process loads what another one saved.
@pytest.mark.hang_after((3 + len(OTHERS)) * SECONDS)
@pytest.mark.parametrize("kept", [KEPT] if KEPT else [pytest.param(None, marks=pytest.mark.slow)])
def test_what_this_version_saves_loads(kept: Path | None, tmp_path: Path, record_property: Record) -> None:
    here = tmp_path / "saved"
    assert _run(sys.executable, "save", [here]) == name()
    assert _load(sys.executable, [here], tmp_path / "here") == name()
    for number, other in enumerate(OTHERS):
        there = _load(other, [here], tmp_path / str(number))
        assert there != name()
        record_property("loaded_by", there)
    if kept is not None:
        keep(here, kept)


def test_what_a_version_saved_is_kept_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in ("first", "second"):
        (tmp_path / content).mkdir()
        (tmp_path / content / content).write_text(content)
        keep(tmp_path / content, tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").rglob("*")] == [name(), "second"]
    assert saved(tmp_path / "kept") == [] and saved(tmp_path / "none") == saved(None) == []
    own = name()
    monkeypatch.setattr(sys.modules[__name__], "name", lambda: "python3.11-torch2.99.0")
    assert [path.name for path in saved(tmp_path / "kept")] == [own]
