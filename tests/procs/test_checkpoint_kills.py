"""Ranks that are killed in the middle of a save: the previous checkpoint loads, or the new one, whole; never a mixture.

Each point is a world of forks, one of which ends before one of its file operations, or at a byte of a file. Then the
checkpoint is loaded here, by one process, and a later save has to succeed and leave nothing behind.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fullshard import checkpoint
from fullshard.checkpoint.upgrade import upgrade
from fullshard.cli import main
from fullshard.comm import messenger
from tests.harness.behaviours import behaviour
from tests.harness.killed import DONE, RAISED, Kill, operations, run_killed

# In schema 1, by two ranks.
OLD = Path(__file__).parents[1] / "data" / "checkpoints_0.2.0" / "2-ranks" / "checkpoint"
SHAPE = (5, 3)  # uneven on 2 ranks, one rank without rows on 4

# Points that each test has at least, which `tests/pure/test_checkpoint_counts.py` adds up; how many there are is
# decided by the operations of a save.
BYTES = (0, 1, 8, 100, 300, 600, 1000)
BYTES_IN_FULL = (0, 1, 7, 8, 64, 200, 400, 700)
POINTS = {"overwriting": 20, "first": 16, "of two, sync": 14, "of two, async": 14, "bytes": len(BYTES)}
# By world, of each of four cases: a first save or not, sync or async.
POINTS_IN_FULL = {1: 26, 2: 50, 4: 28}


def state(version: int) -> dict[str, Any]:
    """What a rank saves; a mixture of two versions is seen in any of it."""
    full = torch.full(SHAPE, float(version))
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        sharded: torch.Tensor = distribute_tensor(full, mesh, [Shard(0)])
    else:
        sharded = full
    return {"model": {"w": sharded, "b": torch.full((7,), version)}, "step": version}


def saving(folder: Path, version: int, how: str) -> Any:
    def save(rank: int) -> None:
        if how == "async":
            checkpoint.async_save(state(version), checkpoint_id=folder).result()
        else:
            checkpoint.save(state(version), checkpoint_id=folder)

    return save


def meet() -> None:
    """Make the connections over which ranks agree: they are no part of what is counted."""
    together = messenger(None)
    together.share(b"" if together.rank == 0 else None)


def version_of(folder: Path) -> int | None:
    """Which version loads; None when there is no checkpoint. Anything but one whole version fails the test."""
    found: dict[str, Any] = {"model": {"w": torch.zeros(SHAPE), "b": torch.zeros(7, dtype=torch.int64)}, "step": 0}
    try:
        checkpoint.load(found, checkpoint_id=folder)
    except checkpoint.CheckpointNotFound:
        return None
    step = found["step"]
    assert (found["model"]["w"] == step).all() and (found["model"]["b"] == step).all(), f"a mixture: {found}"
    checkpoint.verify(folder)
    return int(step)


def check(tmp_path: Path, world: int, how: str, kill: Kill, before: Path | None) -> int | None:
    """One point. `before`: a whole checkpoint of version 1 that is overwritten with 2, or None for a first save."""
    folder = tmp_path / "c"
    shutil.rmtree(folder, ignore_errors=True)
    if before is not None:
        shutil.copytree(before, folder)
    statuses = run_killed(world, saving(folder, 2, how), kill, meet)
    assert statuses[kill.rank] in (-signal.SIGKILL, -signal.SIGXFSZ, DONE), statuses
    others = [status for rank, status in enumerate(statuses) if rank != kill.rank]
    assert set(others) <= {DONE, RAISED}, f"{kill}: {statuses}"
    found = version_of(folder)
    if before is not None:
        assert found in (1, 2), f"{kill}: the previous checkpoint is lost"
    assert found == 2 or statuses[kill.rank] != DONE
    # The next save finds its way, and clears what was left.
    checkpoint.save(state(3), checkpoint_id=folder)
    assert version_of(folder) == 3
    names = sorted(os.listdir(folder))
    assert names[0] == "CURRENT" and names[1] == "LOCK" and len(names) == 3, names
    return found


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    checkpoint.save(state(1), checkpoint_id=tmp_path / "whole")
    return tmp_path / "whole"


def counted(tmp_path: Path, world: int, how: str, before: Path | None) -> list[int]:
    """Operations of each rank in a save that nobody disturbs."""
    folder = tmp_path / "counted"
    if before is not None:
        shutil.copytree(before, folder)
    found = operations(world, saving(folder, 2, how), meet)
    assert version_of(folder) == 2
    shutil.rmtree(folder)
    return found


@behaviour(
    "a process killed before any file operation of a save leaves the checkpoint before or the new one, whole",
    area="checkpoints",
    torch="none",
    reason="DCP, killed while overwriting at 15 points, lost the checkpoint at 9 and mixed two at 2",
)
def test_one_process_killed_before_every_operation(tmp_path: Path, whole: Path) -> None:
    (count,) = counted(tmp_path, 1, "sync", whole)
    assert count >= POINTS["overwriting"]
    found = [check(tmp_path, 1, "sync", Kill(0, before=n), whole) for n in range(count)]
    assert found == sorted(found) and set(found) == {1, 2}, "old until the pointer moves, new from then on"


def test_a_first_save_is_whole_or_absent(tmp_path: Path) -> None:
    (count,) = counted(tmp_path, 1, "sync", None)
    assert count >= POINTS["first"]
    found = [check(tmp_path, 1, "sync", Kill(0, before=n), None) for n in range(count)]
    assert found[0] is None and found[-1] == 2 and 1 not in found


@pytest.mark.slow
@behaviour(
    "a rank of two killed in a save ({how}): the others raise, and the checkpoint before loads",
    area="checkpoints",
    torch="none",
    reason="the same",
)
@pytest.mark.parametrize("how", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_a_rank_of_two_killed_before_some_operations(how: str, tmp_path: Path, whole: Path) -> None:
    counts = counted(tmp_path, 2, how, whole)
    assert counts[1] >= 3, "the rank that does not commit opens and writes its own file"
    committing = range(1, counts[0], 4)
    assert len(committing) + counts[1] >= POINTS[f"of two, {how}"]
    for number in committing:
        check(tmp_path, 2, how, Kill(0, before=number), whole)
    for number in range(counts[1]):
        assert check(tmp_path, 2, how, Kill(1, before=number), whole) == 1


def test_killed_at_bytes_of_a_file(tmp_path: Path, whole: Path) -> None:
    """0: at once. Up to some hundred: in a data file; then in the manifest, which is the largest of these files."""
    found = [check(tmp_path, 1, "sync", Kill(0, beyond=n), whole) for n in BYTES]
    assert found[:6] == [1] * 6


@pytest.mark.slow
@pytest.mark.sample(full=3)
@pytest.mark.hang_after(1500)
@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("first", [False, True])
def test_every_rank_killed_before_every_operation(
    world: int, how: str, first: bool, tmp_path: Path, whole: Path
) -> None:
    before = None if first else whole
    counts = counted(tmp_path, world, how, before)
    points = [Kill(rank, before=n) for rank, count in enumerate(counts) for n in range(count)]
    points += [Kill(rank, beyond=n) for rank in range(world) for n in BYTES_IN_FULL]
    # Ranks that do not commit are alike: of four, a part of the points.
    points = points if world < 4 else points[::3]
    assert len(points) >= POINTS_IN_FULL[world]
    for kill in points:
        check(tmp_path, world, how, kill, before)


def _retain(folder: Path) -> Any:
    def fn(rank: int) -> None:
        checkpoint.retain(folder, keep_last=1)

    return fn


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_removal_killed_before_an_operation(every: int, tmp_path: Path) -> None:
    """What is listed is whole, and the next call leaves only what it keeps."""
    before, folder = tmp_path / "before", tmp_path / "c"
    for step in (1, 2):
        checkpoint.save(state(step), checkpoint_id=before / f"step-{step}")
    shutil.copytree(before, folder)
    (count,) = operations(1, _retain(folder))
    assert count > 12 and os.listdir(folder) == ["step-2"]
    for number in range(0, count, every):
        shutil.rmtree(folder)
        shutil.copytree(before, folder)
        assert run_killed(1, _retain(folder), Kill(0, before=number)) == [-signal.SIGKILL]
        for one in checkpoint.list_checkpoints(folder):
            assert one.whole and version_of(one.path) == one.step
        checkpoint.retain(folder, keep_last=1)
        assert os.listdir(folder) == ["step-2"] and version_of(folder / "step-2") == 2


def _frozen(version: int) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False), torch.nn.Linear(7, 1, bias=False))
    model[0].requires_grad_(False)
    with torch.no_grad():
        model[0].weight.fill_(1)
        model[1].weight.fill_(version)
    return {"model": model, "step": version}


def _linking(folder: Path) -> Any:
    def fn(rank: int) -> None:
        checkpoint.save(_frozen(2), checkpoint_id=folder / "2", base=folder / "1")

    return fn


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_save_that_links_killed_before_an_operation(every: int, tmp_path: Path) -> None:
    """The base stays whole, and the new one is whole or absent; also when the base goes afterwards."""
    before, folder = tmp_path / "before", tmp_path / "c"
    checkpoint.save(_frozen(1), checkpoint_id=before / "1")
    shutil.copytree(before, folder)
    (count,) = operations(1, _linking(folder))
    assert count > 16
    found = []
    for number in range(0, count, every):
        shutil.rmtree(folder)
        shutil.copytree(before, folder)
        assert run_killed(1, _linking(folder), Kill(0, before=number)) == [-signal.SIGKILL]
        checkpoint.verify(folder / "1")
        found.append(checkpoint.is_complete(folder / "2"))
        checkpoint.save(_frozen(3), checkpoint_id=folder / "2", base=folder / "1")
        shutil.rmtree(folder / "1")
        checkpoint.verify(folder / "2")
        state = _frozen(0)
        checkpoint.load(state, checkpoint_id=folder / "2")
        assert state["model"][1].weight.eq(3).all() and state["model"][0].weight.eq(1).all()
    assert not found[0] and found == sorted(found)


def _upgrading(*paths: Path) -> Any:
    def fn(rank: int) -> None:
        assert main(["checkpoint", "upgrade", *map(str, paths), "--json"]) == 0

    return fn


def _loads(folder: Path, expected: dict[str, torch.Tensor]) -> int:
    """Every byte is checked, and every tensor is the saved one. Returns the schema."""
    schema = checkpoint.verify(folder).schema
    with checkpoint.open_checkpoint(folder) as opened:
        assert opened.manifest.tensors.keys() == expected.keys()
        assert all(torch.equal(opened.tensor(key), value) for key, value in expected.items())
    return schema


@pytest.mark.slow
@behaviour(
    "an upgrade of a checkpoint killed before any file operation: the old one is whole or the new one is",
    area="checkpoints",
    torch="none",
    reason="DCP converts nothing in place",
)
@pytest.mark.hang_after(600)
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_an_upgrade_killed_before_an_operation(elsewhere: bool, every: int, tmp_path: Path) -> None:
    """By the command; and the command again ends it, in place or elsewhere."""
    before, folder, other = tmp_path / "before", tmp_path / "c", tmp_path / "other"
    shutil.copytree(OLD, before)
    paths = (folder, other) if elsewhere else (folder,)
    with checkpoint.open_checkpoint(before) as opened:
        expected = {key: opened.tensor(key) for key in opened.manifest.tensors}
    shutil.copytree(before, folder)
    assert main(["checkpoint", "upgrade", str(folder)]) == 0  # the first one imports: no later fork opens these files
    shutil.rmtree(folder)
    shutil.copytree(before, folder)
    (count,) = operations(1, _upgrading(*paths))
    assert count > 20
    found = []
    # From the last one back: the commit, of some operations, is met in each of its steps.
    for number in sorted({*range(0, count, every), *range(count - 12, count)}):
        shutil.rmtree(folder)
        shutil.rmtree(other, ignore_errors=True)
        shutil.copytree(before, folder)
        assert run_killed(1, _upgrading(*paths), Kill(0, before=number)) == [-signal.SIGKILL]
        old = _loads(folder, expected)
        ended = checkpoint.is_complete(other) if elsewhere else old == 2
        assert old == 1 or not elsewhere
        found.append(ended)
        if elsewhere and ended:
            with pytest.raises(checkpoint.CheckpointMismatch, match="a place that is free"):
                upgrade(folder, other)  # it is there
        else:
            assert main(["checkpoint", "upgrade", *map(str, paths)]) == 0
        assert _loads(paths[-1], expected) == 2
        names = sorted(os.listdir(paths[-1]))
        assert names[:2] == ["CURRENT", "LOCK"] and len(names) == 3, names
    assert not found[0] and found[-1] and found == sorted(found)
