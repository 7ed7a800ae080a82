"""Forked children take no part, whatever their parent does; and the rank that serves the store may be silent. What
becomes of children, and of a rank 0 that ends first, are rows of tests/faults/table/forks.py."""

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
import torch.distributed as dist
from torch import nn

from fullshard import PeerFailed, checkpoint, fully_shard
from fullshard.comm import group
from fullshard.comm.data_group import DataGroup
from fullshard.extras.pipeline import Pipeline
from tests.harness.fates import run_fates, watch_module
from tests.harness.hang import patience


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


def _asks() -> None:
    """A child that uses what it inherited is told nothing, and tells nobody."""
    assert watch_module().watch() is None


def _holding_locks(rank: int) -> None:
    """Whatever another thread holds in the moment of the fork, the child ends."""
    model = _model()
    _step(model)
    watch = watch_module().watch()
    locks = [watch._looking, watch.records._posting, watch.waiting._lock, watch.scope([0, 1]).groups.lock]
    locks += [watch.scopes.lock, watch_module()._making]
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
    assert _child(_ends) == 0 and time.monotonic() - begun < patience(2)
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
        assert _child(_asks) == 0 and time.monotonic() - begun < patience(2)
        release.set()
        future.result()


def test_a_child_waits_for_no_save_of_its_parent(tmp_path: Path) -> None:
    for one in run_fates(2, _saving, tmp_path / "c", timeout=25):
        assert one.code == 0 and not one.kinds, f"{one.text}\n{one.output}"


def _server_stops(rank: int) -> str:
    model = _model()
    _step(model)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(RuntimeError) as caught:
        _step(model)
    with pytest.raises(RuntimeError, match="rank 0"):
        _step(model)
    return str(caught.value)


def _server_stops_connecting(rank: int) -> str:
    model = _model()
    if rank == 0:
        DataGroup._connected = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[method-assign]
    with pytest.raises(PeerFailed) as caught:
        _step(model)
    return str(caught.value)


def _stop_on_rank_0(rank: int) -> None:
    """Stop rank 0 once all ranks are here."""
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)


def _server_stops_first(rank: int) -> str:
    """Before a rank asked the store anything."""
    _stop_on_rank_0(rank)
    with pytest.raises(PeerFailed) as caught:
        _step(_model())
    assert caught.value.rank == 0
    return str(caught.value)


def _server_stops_at_new_group(rank: int) -> str:
    """After the ranks have agreed to make a group, and before torch asks its own store for it."""
    made = group.new_group

    def stopped(*args: Any) -> Any:
        _stop_on_rank_0(rank)
        return made(*args)

    group.new_group = stopped  # type: ignore[assignment]
    with pytest.raises(PeerFailed) as caught:
        _model().set_separate_reduce_scatter_group()
    return str(caught.value)


def _server_stops_in_pipeline(rank: int) -> str:
    """A rank of a pipeline whose connections are closed asks the store why."""
    model = _model()
    _step(model)
    steps: Any = object.__new__(Pipeline)
    steps.group, steps._steps = dist.group.WORLD, 1
    _stop_on_rank_0(rank)
    return str(steps._reason())


@pytest.mark.parametrize(
    "stops",
    [
        pytest.param(_server_stops, marks=pytest.mark.slow, id="between steps"),
        *(
            pytest.param(stops, marks=pytest.mark.slow, id=stops.__name__)
            for stops in (_server_stops_connecting, _server_stops_first, _server_stops_at_new_group)
        ),
        _server_stops_in_pipeline,
    ],
)
def test_the_rank_that_serves_the_store_is_silent(stops: Callable[[int], str]) -> None:
    """Stopped, or its machine lost its power or its network: nothing closes the connections to the store, and a request
    would wait for ever."""
    told = run_fates(
        3, stops, timeout=40, stays=False, lost=(0,), environment={"FULLSHARD_SILENCE": f"{patience(3):g}"}
    )
    for one in told[1:]:
        assert one.value is not None, f"{one.text}\n{one.output}"
        assert "rank 0 gave no sign of life since the store through which ranks meet is gone or silent" in one.value


def _reads_of_a_stopped_server(rank: int, folder: Path) -> list[str]:
    from fullshard._torch import StoreConnection

    asked = [StoreConnection(patience(1)) for _ in range(4)]
    asked[0].set("there", "1")
    if rank == 0:
        (folder / "pid").write_text(str(os.getpid()))
        time.sleep(60)
    while not (folder / "pid").exists() or not asked[0].check(["there"]):
        time.sleep(0.01)
    stopped = int((folder / "pid").read_text())
    os.kill(stopped, signal.SIGSTOP)
    # A thread may answer once more until the signal has reached it.
    while any("State:\tT" not in one.read_text() for one in Path(f"/proc/{stopped}/task").glob("*/status")):
        time.sleep(0.01)
    raised = []
    for one, call in zip(asked, ("check", "multi_get", "get", "add"), strict=True):
        with pytest.raises(RuntimeError) as caught:
            getattr(one, call)(
                *{"check": (["there"],), "multi_get": (["there"],), "add": ("n", 1)}.get(call, ("there",))
            )
        raised.append(str(caught.value))
    return raised


def test_each_request_to_a_store_has_a_limit(tmp_path: Path) -> None:
    """torch polls for what `get` and `multi_get` read, with the time limit of the process group."""
    told = run_fates(2, _reads_of_a_stopped_server, tmp_path, limit=600, timeout=30, stays=False, lost=(0,))
    assert told[1].value is not None and len(told[1].value) == 4, f"{told[1].text}\n{told[1].output}"


def _opens(rank: int) -> int:
    from fullshard._torch import StoreConnection

    StoreConnection(20.0)
    before = len(os.listdir("/dev/fd"))
    for _ in range(3):
        StoreConnection(20.0)
    return len(os.listdir("/dev/fd")) - before


def test_a_connection_to_the_store_is_closed_with_its_last_reference() -> None:
    """And to look for it leaves no descriptor open. On rank 0, which serves, the other ends close at any moment."""
    assert run_fates(2, _opens)[1].value == 0
