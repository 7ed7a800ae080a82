"""Programs of FSDP1, DDP and FSDP2, before and after `fullshard migrate`: on two ranks they come to the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import migrations
from tests.harness.pool import pool

QUICK = ("seed_000_removed", "seed_001", "helper_module", "trainer_class", "ddp_optimizer_first", "optimizer_state")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in migrations.names()]
)
def test_a_migrated_program_trains_the_same(name: str, tmp_path: Path) -> None:
    found, new = migrations.migrated(name, tmp_path / name)
    assert found.texts
    assert pool(2).run(migrations.compare, str(migrations.entry(name)), str(new), timeout=60) == [[], []]


def test_there_are_as_many_programs_as_promised() -> None:
    assert len(migrations.names()) >= 30


@pytest.mark.slow
@pytest.mark.hang_after(240)
def test_the_guide_works_as_typed(tmp_path: Path) -> None:
    """The program and the commands of docs/migration.md, one after the other."""
    page = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
    guide = page.split("## From FSDP1 in ten minutes")[1].split("\n## ")[0]
    blocks = dict(re.findall(r"^```(python|sh)[^\n]*\n(.*?)^```$", guide, flags=re.M | re.S))
    (tmp_path / "train.py").write_text(blocks["python"])
    bin_folder = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    said = ""
    for command in blocks["sh"].splitlines():
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        said += done.stdout
    assert "train.py:21: exact: FullyShardedDataParallel -> fully_shard(model)" in said
    loss = re.search(r"^loss (\d\.\d\d)$", said, flags=re.M)
    assert loss is not None and float(loss[1]) < 1.5, said  # it begins near 2
