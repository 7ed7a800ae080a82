"""Forked children take no part, whatever becomes of them; and the rank that serves the store may end first."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fullshard
from fullshard import PeerFailed, checkpoint, fully_shard
from tests.harness.fates import run_fates, watch_module

SECONDS = 5.0


def _model() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    return fully_shard(model)


def _step(model: Any) -> float:
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    model.zero_grad()
    return float(loss.detach())


def _child(then: Callable[[], None]) -> int:
    """What a program's own fork does: it ends as a process of Python's does, with what is to be done at the end."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 0
    try:
        then()
    except SystemExit:
        pass
    except BaseException as error:
        sys.last_value = error
        code = 1
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    os._exit(code)


def _ends() -> None:
    sys.exit()


def _raises() -> None:
    raise ValueError("in the child")


def _asks() -> None:
    """A child that uses what it inherited is told nothing, and tells nobody."""
    assert watch_module().watch() is None and not fullshard.guard.__doc__ == ""


class _Dozen(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def _loads() -> None:
    assert sum(len(batch) for batch in DataLoader(_Dozen(), batch_size=3, num_workers=2)) == 12


def _with_children(rank: int, then: Callable[[], None], code: int) -> tuple[list[float], int]:
    model = _model()
    losses = [_step(model)]
    if rank == 1:
        assert _child(then) == code
    losses.append(_step(model))
    _loads()
    # Longer than what a false alarm takes.
    time.sleep(1.2)
    losses.append(_step(model))
    scope = watch_module().watch().scope([0, 1])
    return losses, len(scope.faults)


@pytest.mark.sample(1)
@pytest.mark.parametrize("then", [_ends, pytest.param(_raises, marks=pytest.mark.slow), _asks])
def test_a_child_that_ends_is_no_rank_that_ends(then: Callable[[], None]) -> None:
    told = run_fates(2, _with_children, then, int(then is _raises), timeout=25)
    for one in told:
        assert one.value is not None and one.code == 0, f"{one.text}\n{one.output}"
        assert one.value[1] == 0 and one.value[0] == told[0].value[0]


def _holding_locks(rank: int) -> None:
    """Whatever another thread holds in the moment of the fork, the child ends."""
    model = _model()
    _step(model)
    watch = watch_module().watch()
    locks = [watch._looking, watch.records._posting, watch.waiting._lock, watch.scope([0, 1]).groups.lock]
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            held.set()
            over.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    begun = time.monotonic()
    assert _child(_ends) == 0 and time.monotonic() - begun < 2
    over.set()
    thread.join()
    _step(model)


def test_a_lock_that_is_held_at_the_fork_does_not_hold_up_the_child() -> None:
    for one in run_fates(2, _holding_locks, timeout=25):
        assert one.code == 0 and not one.kinds, f"{one.text}\n{one.output}"


def _saving(rank: int, folder: Path) -> None:
    """A child of a process that saves in the background waits for no save: its parent does."""
    model = _model()
    written, release = os.write, threading.Event()

    def slow(fd: int, data: Any) -> int:
        if threading.current_thread().name == "fullshard-save":
            release.wait(20)
        return written(fd, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", slow)
        future = checkpoint.async_save({"model": model.state_dict()}, checkpoint_id=folder)
        begun = time.monotonic()
        assert _child(_ends) == 0 and time.monotonic() - begun < 2
        release.set()
        future.result()


def test_a_child_waits_for_no_save_of_its_parent(tmp_path: Path) -> None:
    for one in run_fates(2, _saving, tmp_path / "c", timeout=25):
        assert one.code == 0 and not one.kinds, f"{one.text}\n{one.output}"


def _killed_with_a_child(rank: int) -> tuple[str, float]:
    """A child that lives on holds its parent's connections open, and is not the rank."""
    model = _model()
    _step(model)
    if rank == 1:
        if not os.fork():
            time.sleep(6)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(PeerFailed) as caught:
        _step(model)
    return str(caught.value), time.monotonic() - begun


def test_a_killed_rank_is_named_though_a_child_of_it_lives() -> None:
    told = run_fates(2, _killed_with_a_child, timeout=15, lost=(1,))
    assert told[0].value is not None, f"{told[0].text}\n{told[0].output}"
    said, seconds = told[0].value
    assert "rank 1 gave no sign of life since its process has ended" in said and seconds < SECONDS


# ---- the rank that serves the store --------------------------------------------------------------------------


def _server_ends(rank: int, how: str) -> tuple[str, float] | None:
    model = _model()
    _step(model)
    if rank == 0:
        if how == "raised":
            raise ValueError("a bad token")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        return None
    if how == "later":
        time.sleep(3)
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        _step(model)
    said = f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - begun
    with pytest.raises(RuntimeError, match="rank 0"):
        _step(model)
    return said


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["raised", "ended", pytest.param("later", marks=pytest.mark.slow), "killed"])
def test_the_rank_that_serves_the_store_ends_first(how: str) -> None:
    told = run_fates(3, _server_ends, how, timeout=25, stays=False, lost=(0,))
    for one in told[1:]:
        assert one.value is not None, f"{one.text}\n{one.output}"
        said, seconds = one.value
        assert said.startswith("PeerFailed") and "rank 0" in said and "reset by peer" not in said, said
        if how == "raised":
            assert "ended: its process ended with ValueError: a bad token" in said.replace(" at step 0", ""), said
        elif how != "killed":
            assert "its process ended" in said, said
        assert seconds < SECONDS


@pytest.mark.slow
def test_the_rank_that_serves_the_store_is_silent() -> None:
    """Stopped, or its machine lost its power or its network: nothing closes the connections to the store, and a request
    would wait for ever."""
    told = run_fates(
        3, _server_ends, "stopped", timeout=40, stays=False, lost=(0,), environment={"FULLSHARD_SILENCE": "2"}
    )
    for one in told[1:]:
        assert one.value is not None, f"{one.text}\n{one.output}"
        assert "rank 0 gave no sign of life since the store through which ranks meet is gone or silent" in one.value[0]


def _opens(rank: int) -> int:
    from fullshard._torch import StoreConnection

    StoreConnection(2.0)
    before = len(os.listdir("/dev/fd"))
    for _ in range(3):
        StoreConnection(2.0)
    return len(os.listdir("/dev/fd")) - before


def test_a_connection_to_the_store_is_closed_with_its_last_reference() -> None:
    """And to look for it leaves no descriptor open. On rank 0, which serves, the other ends close at any moment."""
    assert run_fates(2, _opens)[1].value == 0
