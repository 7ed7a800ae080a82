"""A run whose newest checkpoints are damaged: they are set aside by name, and training goes on from the one before.

What `fullshard.checkpoint` notices of damage is in tests/threads/test_checkpoint_faults.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fullshard import checkpoint
from fullshard.train.config import Config
from fullshard.train.folder import CHECKPOINTS
from tests.harness.pool import pool
from tests.procs.test_train_cli import BOUND, command, environment
from tests.procs.test_train_resume import config_of, ran, undisturbed
from tests.procs.test_train_world import checkpoints_of, full, trainer_of

STOPPED_AFTER = 13  # step 12 is before it, and step 6


def _generation(path: Path) -> Path:
    (found,) = path.glob("g0*")
    return found


def _data(path: Path) -> Path:
    return max(_generation(path).glob("data-*"), key=lambda file: file.stat().st_size)


def flip(file: Path, at: float = 0.9) -> None:
    """One bit, near the end: in the values, not in the names before them."""
    data = bytearray(file.read_bytes())
    data[int(len(data) * at)] ^= 4
    file.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "pointer emptied": lambda path: (path / "CURRENT").write_bytes(b""),
    "pointer cut": lambda path: (path / "CURRENT").write_bytes((path / "CURRENT").read_bytes()[:40]),
    "bit of the pointer": lambda path: flip(path / "CURRENT", 0.5),
    "bit of the data": lambda path: flip(_data(path)),
    "bit of the manifest": lambda path: flip(_generation(path) / "manifest.json", 0.5),
    "data cut": lambda path: _data(path).write_bytes(_data(path).read_bytes()[:-1]),
    "data gone": lambda path: _data(path).unlink(),
    "manifest gone": lambda path: (_generation(path) / "manifest.json").unlink(),
    "generation gone": lambda path: shutil.rmtree(_generation(path)),
}
# Those that pointer, manifest and sizes do not show are found by all ranks, in the load.
TRAINED = [
    "pointer emptied",
    "bit of the data",
    *(pytest.param(one, marks=pytest.mark.slow) for one in DAMAGE if one not in ("pointer emptied", "bit of the data")),
]


@pytest.mark.slow
@pytest.mark.parametrize("damage", TRAINED)
def test_training_goes_on_from_the_one_before(damage: str, tmp_path: Path) -> None:
    """And saves the same step again, and goes on from there."""
    config = config_of(f"checkpoint.every={STOPPED_AFTER}")
    pool(2).run(ran, config_of(), str(tmp_path), STOPPED_AFTER, 0, timeout=60)
    folder = tmp_path / CHECKPOINTS
    DAMAGE[damage](folder / f"step-{STOPPED_AFTER}")
    again = pool(2).run(ran, config, str(tmp_path), 15, 1, timeout=60)
    assert [one.stopped_after for one in again] == [15, 15]
    assert sorted(path.name for path in folder.iterdir()) == ["step-13", "step-13.damaged", "step-15"]
    assert all(checkpoint.is_complete(folder / name) for name in ("step-13", "step-15"))
    last = pool(2).run(ran, config_of(), str(tmp_path), timeout=60)[0]
    expected = undisturbed(2)
    assert again[0].figures + last.figures == expected.figures[12:]
    for name, tensor in expected.tensors.items():
        assert torch.equal(last.tensors[name], tensor), name
    assert (folder / "step-13.damaged").is_dir(), "nothing of it is deleted"


def _resumed(rank: int, config: Config, folders: list[str]) -> list[tuple[int, list[tuple[str, str]], bool]]:
    """For each folder: the step, what was set aside and why, and whether model and optimizer are those of the step."""
    found = []
    for folder in folders:
        trainer = trainer_of(rank, config)
        before = {name: full(p).clone() for name, p in trainer.model.named_parameters()}
        checkpoints = checkpoints_of(trainer, folder)
        step, path = checkpoints.resume()
        now = {name: full(p) for name, p in trainer.model.named_parameters()}
        assert (path is None) is (step == 0)
        untouched = all(torch.equal(now[name], value) for name, value in before.items())
        assert untouched is (step == 0) and bool(trainer.optimizer.state) is (step > 0)
        found.append((step, [(path.name, problem) for path, problem in checkpoints.aside], untouched))
    return found


@pytest.mark.slow
def test_whatever_is_damaged_all_ranks_agree_on_what_is_not(tmp_path: Path) -> None:
    """Each damage to the newest one, to the two newest, and to all."""
    pool(2).run(ran, config_of("checkpoint.keep_last=3"), str(tmp_path / "run"), STOPPED_AFTER, 0, timeout=60)
    cases, folders = [], []
    for name, damage in DAMAGE.items():
        for steps in ((13,), (13, 12), (13, 12, 6)) if name.startswith("bit of the") else ((13,),):
            copy = tmp_path / str(len(folders))
            shutil.copytree(tmp_path / "run", copy)
            for step in steps:
                damage(copy / CHECKPOINTS / f"step-{step}")
            cases.append((name, steps))
            folders.append(str(copy))
    first, second = pool(2).run(_resumed, config_of(), folders, timeout=90)
    for (name, steps), folder, (step, aside, _), (other, none, _) in zip(cases, folders, first, second, strict=True):
        assert step == other == {1: 12, 2: 6, 3: 0}[len(steps)], (name, steps)
        assert [one for one, _ in aside] == [f"step-{one}.damaged" for one in steps] and not none
        assert all(problem for _, problem in aside), name
        kept = {path.name for path in (Path(folder) / CHECKPOINTS).iterdir()}
        assert kept == {f"step-{one}" for one in {13, 12, 6} - set(steps)} | {one for one, _ in aside}
    assert "checksum" in first[cases.index(("bit of the data", (13,)))][1][0][1]


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    """Twice the same step, and a directory that is no checkpoint; `latest` and `retain` leave what was set aside."""
    names = []
    for _ in range(3):
        checkpoint.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "step-4", no_dist=True)
        names.append(checkpoint.set_aside(f"{tmp_path}/step-4/").name)
    assert names == ["step-4.damaged", "step-4.2.damaged", "step-4.3.damaged"]
    assert checkpoint.latest(tmp_path) is None and checkpoint.retain(tmp_path, keep_last=1) == []
    assert checkpoint.is_complete(tmp_path / "step-4.damaged"), "it was not touched"
    with pytest.raises(checkpoint.CheckpointNotFound, match="step-4"):
        checkpoint.set_aside(tmp_path / "step-4")
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / "CURRENT").write_bytes(b"")
    with pytest.raises(checkpoint.CheckpointDamaged, match=r"rename this one \(fullshard.checkpoint.set_aside\)"):
        checkpoint.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "step-5", no_dist=True)


def _trained(run: Path, steps: int) -> str:
    """What the command prints."""
    settings = ("--set", f"training.steps={steps}", "--set", "checkpoint.every=4")
    arguments = [sys.executable, "-m", "fullshard", *command(run, *settings)]
    ended = subprocess.run(arguments, capture_output=True, text=True, env=environment(), timeout=BOUND)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.hang_after(2 * BOUND + 40)
def test_the_command_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _trained(run, 8)
    flip(_data(run / CHECKPOINTS / "step-8"))
    said = _trained(run, 10)
    assert f"damaged, set aside as {run / CHECKPOINTS / 'step-8.damaged'}: " in said
    assert f"continuing after step 4, from {run / CHECKPOINTS / 'step-4'}" in said
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "completed" and manifest["set_aside"] == ["step-8.damaged"]
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [*range(1, 11)]
