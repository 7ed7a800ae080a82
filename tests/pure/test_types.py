"""What a type checker says of a user's program: nothing of a right one, and the line of a wrong one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fullshard
from tests.harness.source import SRC

ROOT = SRC.parent

RIGHT = """
from torch import nn
import fullshard
from fullshard import FSDPModule, fully_shard, replicate

model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
sharded = fully_shard(model)
sharded.set_requires_gradient_sync(False)
for parameter in sharded.parameters():
    parameter.requires_grad_(False)
fully_shard([model[0], model[1]])[0].unshard()
first: FSDPModule = sharded
module: nn.Module = replicate(nn.Linear(4, 4))
with fullshard.observe.record(model):
    pass
"""
WRONG = ("fullshard.no_such_name", "fullshard.observe.no_such_name", "sharded.set_requires_gradient_sync(not_a_name=1)")


def _checked(folder: Path, text: str) -> list[str]:
    program = folder / "program.py"
    program.write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), str(program)]
    run = subprocess.run([*command, "--cache-dir", str(ROOT / ".mypy_cache")], capture_output=True, text=True, cwd=ROOT)
    return [line for line in run.stdout.splitlines() if "error:" in line]


@pytest.mark.slow
def test_programs_are_checked_as_with_torch(tmp_path: Path) -> None:
    names = "\n".join(f"print(fullshard.{name})" for name in fullshard.__all__)
    assert _checked(tmp_path, f"{RIGHT}\n{names}\n") == []
    errors = _checked(tmp_path, "\n".join((RIGHT, *WRONG)))
    first = RIGHT.count("\n") + 2
    assert [int(line.split(":")[1]) for line in errors] == [first, first + 1, first + 2], errors


def test_dir_shows_the_public_names_alone() -> None:
    public = {name for name in dir(fullshard) if not name.startswith("__")}
    assert public == {*fullshard.__all__, "checkpoint", "extras", "observe"} - {"__version__"}
