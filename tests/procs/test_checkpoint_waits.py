"""Saves and loads wait in the one way to wait: who does not come to them is named, within the bounds."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fullshard import checkpoint, fully_shard
from tests.harness.fates import run_fates
from tests.harness.hang import patience

SECONDS = 5.0


def state(value: float = 1.0) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(torch.full((6, 2), value), mesh, [Shard(0)], src_data_rank=None), "n": value}


def wait_here(seconds: float) -> None:
    time.sleep(seconds)


def _kill(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(_: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(_: int) -> None:
    raise ValueError("a bad token")


# What rank 1 does instead, and what the others say. More of them, and loads: tests/faults/table/checkpoints.py.
DEEDS: dict[str, tuple[Callable[[int], None], str]] = {
    "killed": (_kill, "rank 1 gave no sign of life since its process has ended"),
    "stopped": (_stop, "rank 1 gave no sign of life for 2 s: it is stopped"),
    "raised": (_raise, "rank 1 ended: its process ended with ValueError: a bad token"),
    "absent": (wait_here, "in wait_here"),
}


def _saving(rank: int, folder: Path, deed: str, before: bool, in_background: bool) -> None:
    if before:
        checkpoint.save(state(), checkpoint_id=folder / "first")
    else:
        # Whoever trains has a record; one that never began is named without a place.
        fully_shard(nn.Linear(2, 2))
    if rank == 1:
        DEEDS[deed][0](30)
    elif in_background:
        checkpoint.async_save(state(), checkpoint_id=folder / "second").result()
    else:
        checkpoint.save(state(), checkpoint_id=folder / "second")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("deed", "before", "in_background"),
    [
        ("killed", True, False),
        ("killed", True, True),
        ("raised", False, False),
        ("stopped", True, False),
        ("absent", False, False),
    ],
)
def test_a_save_names_who_does_not_come(deed: str, before: bool, in_background: bool, tmp_path: Path) -> None:
    limit = 3.0 if deed == "absent" else 30.0
    environment = {"FULLSHARD_SILENCE": "2"} if deed == "stopped" else {}
    told = run_fates(
        3 if in_background else 2,
        _saving,
        tmp_path,
        deed,
        before,
        in_background,
        limit=limit,
        environment=environment,
        timeout=12,
        lost=(1,),
    )
    for one in (told[0], *told[2:]):
        assert one.kinds[0] == "CheckpointError", (one.text, one.output)
        assert DEEDS[deed][1] in one.text and "PeerFailed" in one.text, one.text
        assert one.seconds < patience(9.0 if deed in ("absent", "stopped") else SECONDS + 2 * in_background), (
            one.seconds
        )


def _build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _apart(rank: int, folder: Path, alone: bool) -> None:
    """Rank 0 alone saves, or each saves another step; and they train on."""
    model, optimizer = _build()
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    if rank == 0 or not alone:
        checkpoint.save({"n": 1}, checkpoint_id=folder / f"step-{rank + 3}")
    model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize(
    ("alone", "words"),
    [
        (True, ["rank 0 waiting in saving", "about to gather the parameters of"]),
        (False, ["rank 0 saving step-3", "rank 1 saving step-4"]),
    ],
)
def test_ranks_at_other_calls_are_named(alone: bool, words: list[str], tmp_path: Path) -> None:
    told = run_fates(2, _apart, tmp_path, alone, timeout=15)
    for one in told:
        assert one.kinds[0] in ("CheckpointError", "RanksDisagree"), (one.text, one.output)
        assert all(word in one.text for word in words), one.text
        assert one.seconds < patience(SECONDS + 2)
    assert "CheckpointError" in {one.kinds[0] for one in told}


def _interrupted(rank: int, folder: Path) -> list[float]:
    """Ctrl-C in the middle of one rank's save; then all save again, and train."""
    model, _ = _build()
    model(torch.ones(2, 4)).sum().backward()
    checkpoint.save(state(), checkpoint_id=folder / "c")
    begun = time.monotonic()
    if rank == 0:
        for _ in range(2):
            with pytest.raises(checkpoint.CheckpointError, match="rank 1 raised in saving .*: KeyboardInterrupt"):
                checkpoint.save(state(2.0), checkpoint_id=folder / "c")
    else:

        class Interrupts:
            def state_dict(self) -> dict[str, Any]:
                raise KeyboardInterrupt

            def load_state_dict(self, state: dict[str, Any]) -> None: ...

        bad: Any = {"n": 2, "held": Interrupts()}
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(bad, checkpoint_id=folder / "c")
        # The same in the middle of what is sent.
        with pytest.MonkeyPatch.context() as patch:
            from fullshard.comm import messages

            def interrupt(*_: Any) -> None:
                raise KeyboardInterrupt

            patch.setattr(messages.Messenger, "share", interrupt)
            with pytest.raises(KeyboardInterrupt):
                checkpoint.save(state(2.0), checkpoint_id=folder / "c")
    seconds = [time.monotonic() - begun]
    checkpoint.save(state(3.0), checkpoint_id=folder / "c")
    found = state(0.0)
    checkpoint.load(found, checkpoint_id=folder / "c")
    assert found["n"] == 3.0
    model(torch.ones(2, 4)).sum().backward()
    return seconds


def test_a_save_that_one_rank_left_is_over_for_all_and_the_next_one_is_whole(tmp_path: Path) -> None:
    told = run_fates(2, _interrupted, tmp_path, timeout=20)
    for one in told:
        assert not one.kinds, (one.text, one.output)
        assert max(one.value) < SECONDS


def _caught_in_training(rank: int, folder: Path) -> None:
    """A step that one rank fails and all try again, while a save is under way: they have nothing to do with it."""
    from fullshard import PeerFailed

    model, optimizer = _build()
    model(torch.ones(2, 4)).sum().backward()
    written, release = os.write, threading.Event()

    def slow(fd: int, data: Any) -> int:
        if threading.current_thread().name == "fullshard-save":
            release.wait()
        return written(fd, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", slow)
        future = checkpoint.async_save(state(5.0), checkpoint_id=folder / "c")
        if rank == 1:
            hook = model.register_forward_pre_hook(lambda *_: wait_here(1 / 0))
            with pytest.raises(ZeroDivisionError):
                model(torch.ones(2, 4))
            hook.remove()
        else:
            with pytest.raises(PeerFailed):
                model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert not future.done()
        release.set()
        future.result()
    found = state(0.0)
    checkpoint.load(found, checkpoint_id=folder / "c")
    assert found["n"] == 5.0


def test_a_failed_step_does_not_end_a_save_in_the_background(tmp_path: Path) -> None:
    for one in run_fates(2, _caught_in_training, tmp_path, timeout=20):
        assert not one.kinds, (one.text, one.output)
