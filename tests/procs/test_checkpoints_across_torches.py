"""Checkpoints that one version of torch saved load with another one: own format, DCP and `torch.save`, with optimizer.

Files that torch 2.11 wrote are in tests/data. FULLSHARD_OTHER_PYTHON names interpreters with other versions, as
`make versions` does: each of them saves for this one, and loads what this one saves.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.data.exchange_checkpoints import FORMATS

ROOT = Path(__file__).parents[2]
WRITTEN = ROOT / "tests" / "data" / "checkpoints_torch-2.11.0"
OTHERS = [name for name in os.environ.get("FULLSHARD_OTHER_PYTHON", "").split(os.pathsep) if name]
SECONDS = 100.0


def _run(interpreter: str, what: str, folder: Path) -> str:
    """The version of torch of the interpreter."""
    environ = {**os.environ}
    if interpreter != sys.executable:
        environ.pop("PYTHONPATH", None)  # this interpreter's torch
    command = [interpreter, "-m", "tests.data.exchange_checkpoints", what, str(folder)]
    ran = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=SECONDS)
    assert ran.returncode == 0, f"{interpreter} {what}: status {ran.returncode}\n{ran.stdout}\n{ran.stderr[-6000:]}"
    return ran.stdout.split()[-1]


def test_what_torch_2_11_wrote_loads(tmp_path: Path) -> None:
    said = json.loads((WRITTEN / "expected.json").read_text())
    assert said["torch"].startswith("2.11.0") and len(said["state"]) > 20
    assert {path.name for path in WRITTEN.iterdir()} == {*FORMATS, "expected.json"}
    assert sum(path.stat().st_size for path in WRITTEN.rglob("*") if path.is_file()) < 1 << 18
    shutil.copytree(WRITTEN, tmp_path / "written")
    assert _run(sys.executable, "load", tmp_path / "written") == torch.__version__


@pytest.mark.slow
def test_another_value_is_noticed(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN, tmp_path / "written")
    path = tmp_path / "written" / "expected.json"
    path.write_text(path.read_text().replace('"/model/scale": "', '"/model/scale": "not '))
    with pytest.raises(AssertionError, match="/model/scale"):
        _run(sys.executable, "load", tmp_path / "written")


@pytest.mark.hang_after(4 * SECONDS)
@pytest.mark.parametrize("other", OTHERS or [pytest.param("", marks=pytest.mark.slow)])
def test_this_torch_and_another_read_each_other(other: str, tmp_path: Path) -> None:
    """Without another one: with itself, by another process."""
    other = other or sys.executable
    here = _run(sys.executable, "save", tmp_path / "here")
    there = _run(other, "load", tmp_path / "here")
    assert here == torch.__version__ and (there != here) == (other != sys.executable)
    assert _run(other, "save", tmp_path / "there") == there
    assert _run(sys.executable, "load", tmp_path / "there") == here
