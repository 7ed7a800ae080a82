"""Saves in the background: what was there when the call returned is what is saved, and no failure goes unseen."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fullshard import checkpoint
from tests.harness.behaviours import behaviour
from tests.harness.pool import pool


def state(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(torch.full((5, 2), value), mesh, [Shard(0)])
    return {"w": sharded, "b": torch.full((3,), value), "n": value}


def version(folder: str) -> float:
    found: dict[str, Any] = {"w": torch.zeros(5, 2), "b": torch.zeros(3), "n": 0.0}
    checkpoint.load(found, checkpoint_id=folder, no_dist=True)
    assert (found["w"] == found["n"]).all() and (found["b"] == found["n"]).all()
    return float(found["n"])


class Held:
    """Lets no file be written until it is released; or fails the write, on the ranks that say so, or the first one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail: bool = False, once: bool = False) -> None:
        self.go = threading.Event()
        original, failures = os.write, [0]

        def write(fd: int, data: Any) -> int:
            if threading.current_thread().name != "fullshard-save":
                return original(fd, data)
            self.go.wait(20)
            if fail and not (once and failures[0]):
                failures[0] += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(fd, data)

        monkeypatch.setattr(os, "write", write)


def _changed_meanwhile(rank: int, folder: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        held = Held(monkeypatch)
        saved = state(1.0)
        future = checkpoint.async_save(saved, checkpoint_id=folder)
        assert not future.done(), "the call returned before a byte was written"
        saved["w"].to_local().fill_(2.0)
        saved["b"].fill_(2.0)
        saved["n"] = 2.0
        # Training goes on meanwhile, with messages of its own.
        total = torch.ones(1)
        dist.all_reduce(total)
        held.go.set()
        assert future.result().startswith(f"{folder}/g000001-")
    assert version(folder) == 1.0
    # A second one: the memory of the first copy serves again, and a load waits for it.
    checkpoint.async_save(saved, checkpoint_id=folder)
    found = state(0.0)
    checkpoint.load(found, checkpoint_id=folder)
    assert found["n"] == 2.0 and (found["w"].to_local() == 2.0).all()
    # So does a save.
    checkpoint.async_save(state(3.0), checkpoint_id=folder)
    checkpoint.save(state(4.0), checkpoint_id=folder)
    assert version(folder) == 4.0
    checkpoint.close()


def test_what_was_there_at_the_call_is_saved(tmp_path: Path) -> None:
    pool(2).run(_changed_meanwhile, str(tmp_path / "c"))


def _failing(rank: int, folder: str) -> None:
    checkpoint.save(state(1.0), checkpoint_id=folder)

    def fail() -> Any:
        with pytest.MonkeyPatch.context() as monkeypatch:
            Held(monkeypatch, fail=rank == 1).go.set()
            future = checkpoint.async_save(state(2.0), checkpoint_id=folder)
            threading.Event().wait(0.0)
            while not future.done():
                threading.Event().wait(0.005)
            return future

    # Raised by the next save, in both ways, on all ranks; and only once.
    for save in (checkpoint.save, checkpoint.async_save):
        fail()
        with pytest.raises(checkpoint.CheckpointIOError, match="No space left") as caught:
            save(state(3.0), checkpoint_id=folder)
        assert caught.value.errno == errno.ENOSPC and "rank 1" in str(caught.value)
        assert version(folder) == 1.0
    # By close, once.
    fail()
    with pytest.raises(OSError, match="No space left"):
        checkpoint.close()
    checkpoint.close()
    # Who asked the future knows; the next save goes on. Also when only one rank asked.
    future = fail()
    assert isinstance(future.exception(), checkpoint.CheckpointIOError)
    checkpoint.save(state(5.0), checkpoint_id=folder)
    assert version(folder) == 5.0
    future = fail()
    if rank == 0:
        assert future.exception() is not None
    with pytest.raises(checkpoint.CheckpointError, match="No space left"):
        checkpoint.save(state(6.0), checkpoint_id=folder)
    # State that cannot be saved is told by the future as well, on all ranks.
    odd = checkpoint.async_save({"odd": object() if rank else 1}, checkpoint_id=folder)
    with pytest.raises(checkpoint.CheckpointMismatch, match="found object"):
        odd.result()
    assert version(folder) == 5.0


@behaviour(
    "the failure of an async save is raised by the next save or by close, on all ranks",
    area="checkpoints",
    torch="none",
    reason="DCP's is seen by who asks the future, and by nobody else",
)
def test_a_failure_is_raised_by_whatever_comes_next(tmp_path: Path) -> None:
    pool(2).run(_failing, str(tmp_path / "c"))


def _queued(rank: int, folder: str) -> None:
    one, two, three = (f"{folder}/{number}" for number in (1, 2, 3))
    with pytest.MonkeyPatch.context() as monkeypatch:
        held = Held(monkeypatch)
        saved = state(1.0)
        futures = []
        for number, path in enumerate((one, two), 1):
            futures.append(checkpoint.async_save(saved, checkpoint_id=path, queue=True))
            saved["w"].to_local().fill_(number + 1.0)
            saved["b"].fill_(number + 1.0)
            saved["n"] = number + 1.0
        assert not any(future.done() for future in futures), "both calls are back, and no byte is written"
        held.go.set()
        # The third call waits for the first save; a load waits for all.
        third = checkpoint.async_save(saved, checkpoint_id=three, queue=True)
        assert futures[0].done()
        found = state(0.0)
        checkpoint.load(found, checkpoint_id=three)
        assert third.done() and found["n"] == 3.0
    assert [version(path) for path in (one, two, three)] == [1.0, 2.0, 3.0]
    # A failure is raised by the next call: of the first while the second waits, and of one that ended before.
    with pytest.MonkeyPatch.context() as monkeypatch:
        held = Held(monkeypatch, fail=rank == 1, once=True)
        for path in (one, two):
            checkpoint.async_save(state(4.0), checkpoint_id=path, queue=True)
        held.go.set()
        with pytest.raises(checkpoint.CheckpointIOError, match="rank 1.*No space left"):
            checkpoint.async_save(state(5.0), checkpoint_id=three, queue=True)
        checkpoint.wait()
        assert [version(path) for path in (one, two, three)] == [1.0, 4.0, 3.0]
    for call in (checkpoint.wait, lambda: checkpoint.async_save(state(6.0), checkpoint_id=two, queue=True)):
        with pytest.MonkeyPatch.context() as monkeypatch:
            Held(monkeypatch, fail=rank == 1).go.set()
            future = checkpoint.async_save(state(6.0), checkpoint_id=one, queue=True)
            while not future.done():
                threading.Event().wait(0.005)
        with pytest.raises(checkpoint.CheckpointIOError, match="rank 1.*No space left"):
            call()
        checkpoint.wait()
    assert [version(path) for path in (one, two, three)] == [1.0, 4.0, 3.0]
    checkpoint.close()


def test_one_save_may_wait_for_the_one_that_runs(tmp_path: Path) -> None:
    pool(2).run(_queued, str(tmp_path))


def _group_goes_first(rank: int, folder: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        held = Held(monkeypatch)
        future = checkpoint.async_save(state(1.0), checkpoint_id=folder)
        dist.destroy_process_group()
        held.go.set()
        future.result()
    assert version(folder) == 1.0


def test_the_process_group_may_go_before_the_save_ends(tmp_path: Path) -> None:
    pool(2).run(_group_goes_first, str(tmp_path / "c"))


PROGRAM = """
import errno, os, sys, torch
from fullshard import checkpoint
if sys.argv[2] == "fail":
    def write(fd, data):
        raise OSError(errno.EIO, "injected")
    os.write = write
checkpoint.async_save({"w": torch.ones(3)}, checkpoint_id=sys.argv[1])
print("the end of the program")
"""


@pytest.mark.slow
@behaviour(
    "a process whose last async save ends {end} waits for it, and its exit status says how it ended",
    area="checkpoints",
    torch="none",
    reason="with DCP the job ends as if the checkpoint were there",
)
@pytest.mark.parametrize("end", ["well", "fail"])
def test_the_end_of_the_process_waits_and_tells(end: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "c"), end], capture_output=True, text=True, timeout=100
    )
    assert "the end of the program" in run.stdout
    assert checkpoint.is_complete(tmp_path / "c") == (end == "well")
    assert run.returncode == (0 if end == "well" else 1), run.stderr
    assert ("a checkpoint was not saved" in run.stderr and "injected" in run.stderr) == (end == "fail")
