"""Ranks as forks of this process, joined over gloo: the tests of the threads tier on real processes, closures and all.

`pytest --ranks=gloo tests/threads/...` sends every `run_ranks` here. It shows what threads cannot: works that are
asynchronous, tensors that no other rank can reach, sockets. A fork sees the objects that the test made, and the test
does not see what a fork does to them: a test that gathers facts in a list of its own has to return them from its ranks.
That is dearer than threads and than the pool, so it is for `make test-full` and for docs/compatibility.md.

`fork`, `join`, `as_a_program`, `store_of_rank_0` and `end` are what all forks of tests are made of (fates.py,
killed.py, tests/faults/ranks.py).
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.checkpoint import background
from fullshard.peers import watch
from tests.harness import collecting, hang
from tests.harness.errors import RankReport, RanksFailed
from tests.harness.installed import clear_sharding_cache

# How long the others may take to answer after one has failed: they run into the end of its connection.
_AFTER_FAILURE_SECONDS = 5.0


def run_forks(world: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
    """What `run_ranks` does, with forks. Results have to pickle; where they do not, None is returned for them.

    Skips the test where torch's build for CUDA has run a backward in this process before: its forks cannot run any."""
    if torch.version.cuda is not None and not _backward_works_in_forks():
        pytest.skip(
            "torch's build for CUDA runs no backward in forks of a process that has run one: run this file alone"
        )
    name = getattr(fn, "__qualname__", repr(fn))
    with tempfile.TemporaryDirectory(prefix="fullshard-forks-") as folder:
        rendezvous = os.path.join(folder, "rendezvous")
        timeout = hang.patience(timeout)
        forks = [fork(_rank_main, rank, world, fn, args, rendezvous, timeout) for rank in range(world)]
        try:
            results, reports = _collect(forks, timeout)
        finally:
            for _, conn in forks:
                with contextlib.suppress(OSError):  # it has ended
                    conn.send_bytes(b"all ranks have answered")
            for pid, conn in forks:
                conn.close()
                end(pid)
    if reports:
        raise RanksFailed(f"{name} failed", world, reports)
    return results


def _backward_works_in_forks() -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            torch.ones(1, requires_grad=True).sum().backward()
        except RuntimeError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def fork(main: Callable[..., None], *args: Any) -> tuple[int, Connection]:
    """A child that runs `main(conn, *args)`: its number, and the other end of `conn`. `main` ends the process; where it
    raises instead, the exit status is 70, and pytest's own end is not run there."""
    ours, theirs = Pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads; ours wait
        pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    ours.close()
    try:
        main(theirs, *args)
    finally:
        os._exit(70)


def join(rank: int, world: int, rendezvous: str, seconds: float) -> None:
    """In a child: make the process group over gloo with the others, which meet in the file `rendezvous`."""
    prepare()
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
    )


def prepare() -> None:
    """In a child: what has to be before a process group is made."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    # DTensor remembers the mesh of an operation's result. A fork inherits what this process saw as rank 0 of a fake
    # world, whose mesh is equal to the fork's, and other ranks would get results that say they are rank 0's.
    clear_sharding_cache()


def as_a_program(output: Path) -> None:
    """In a child: as if the process began here. What runs at its end is the library's alone (that of the parent would
    end the pool's processes), signals do what they do by default, it writes into `output`, and SIGUSR1 writes all
    stacks there."""
    atexit._clear()
    atexit.register(sys.modules[watch.__module__]._end)  # type: ignore[attr-defined]
    atexit.register(background._at_exit)
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True, chain=False)


def store_of_rank_0(rank: int, folder: Path) -> dist.Store:
    """A store that rank 0 serves, as without a launcher that has one; the others find its port in `folder`."""
    port = folder / "port"
    if rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "port.new").write_text(str(served.port))
        (folder / "port.new").rename(port)
        return served
    while not port.exists():
        time.sleep(0.005)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False, wait_for_workers=False)


def stacks(pid: int) -> None:
    """Let a child that called `as_a_program`, and may be stopped, write its stacks."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGUSR1)


def end(pid: int, seconds: float = 2.0) -> int:
    """Wait a little for this child, then end it. Returns its exit code, minus a signal's number; 999 if it had to be
    ended. It may be stopped, or ended and collected long ago (0)."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return 999
    return 0


def _rank_main(
    conn: Connection,
    rank: int,
    world: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rendezvous: str,
    timeout: float,
) -> None:
    try:
        join(rank, world, rendezvous, timeout + 60)
        with collecting.on_rank(rank, getattr(fn, "__qualname__", "")):
            result = fn(rank, *args)
        answer = _pickled((True, result), (True, None))
    except BaseException as error:
        when, text = time.monotonic(), traceback.format_exc()
        answer = _pickled((False, (text, error, when)), (False, (text, None, when)))
    conn.send_bytes(answer)
    conn.poll(
        timeout
    )  # for the word to go: the group lives until all have answered: a peer may still read what this rank sent
    os._exit(0)


def _pickled(value: Any, otherwise: Any) -> bytes:
    try:
        message = pickle.dumps(value)
        pickle.loads(message)  # some exceptions pickle well and fail when they are read
        return message
    except Exception:
        return pickle.dumps(otherwise)


def _collect(forks: list[tuple[int, Connection]], timeout: float) -> tuple[list[Any], list[RankReport]]:
    results: list[Any] = [None] * len(forks)
    reports: list[RankReport] = []
    waiting = {conn: rank for rank, (_, conn) in enumerate(forks)}
    deadline = time.monotonic() + timeout
    while waiting and (left := deadline - time.monotonic()) > 0:
        for conn in wait(list(waiting), timeout=left):
            assert isinstance(conn, Connection)
            rank = waiting.pop(conn)
            try:
                good, payload = pickle.loads(conn.recv_bytes())
            except EOFError:
                text = f"the process ended without an answer: {_exit_text(forks[rank][0])}"
                reports.append(RankReport(rank, "died", text, at=time.monotonic()))
                good, payload = True, None
            if good:
                results[rank] = payload
            else:
                text, error, when = payload
                reports.append(RankReport(rank, "raised", text, error, when))
            if reports:
                deadline = min(deadline, time.monotonic() + hang.patience(_AFTER_FAILURE_SECONDS))
    kind = "released" if reports else "hung"
    for rank in waiting.values():
        reports.append(RankReport(rank, kind, "did not answer in time", at=time.monotonic()))  # type: ignore[arg-type]
    return results, reports


def _exit_text(pid: int) -> str:
    """How the process ended, which is left for `end`."""
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is not None:
            by_signal = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            return signal.Signals(ended.si_status).name if by_signal else f"exit code {ended.si_status}"
        time.sleep(0.002)
    return "it closed its connection and continues"
