"""Processes that end in the middle of a file operation, as a lost machine would: for tests of checkpoints.

    statuses = run_killed(2, fn, Kill(rank=0, before=7))  # fn(rank) on two forks; rank 0 ends before operation 7

Operations are seen at the operating system's door, by Python's audit hook (open, mkdir, rename, remove, rmdir, flock,
listdir), not by wrappers of the code under test; or a process ends by the kernel's hand when a file of its own grows
beyond a byte (RLIMIT_FSIZE). Neither runs any clean-up.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.harness import forked, hang

OPERATIONS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "fcntl.flock", "os.listdir"})
# Exit statuses of a rank.
DONE, RAISED, BROKE = 0, 3, 4


@dataclass(frozen=True)
class Kill:
    """Rank `rank` ends `before` its operation of that number (from 0), or when a file grows beyond byte `beyond`."""

    rank: int
    before: int | None = None
    beyond: int | None = None


def run_killed(
    world: int,
    fn: Callable[[int], None],
    kill: Kill | None,
    prepare: Callable[[], object] = int,
    timeout: float = 60.0,
) -> list[int]:
    """Run `prepare()`, which nothing kills, and `fn(rank)` on `world` forks joined over gloo.

    The exit status of each: `DONE`, `RAISED` for an ordinary exception, `BROKE` for another one, minus a signal's
    number, or 999 for one that did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="fullshard-killed-") as folder:
        rendezvous = os.path.join(folder, "rendezvous")
        forks = [forked.fork(_rank, rank, world, fn, kill, prepare, rendezvous) for rank in range(world)]
        for _, conn in forks:
            conn.close()
        return _wait([pid for pid, _ in forks], timeout)


def operations(world: int, fn: Callable[[int], None], prepare: Callable[[], object] = int) -> list[int]:
    """How many operations each rank does in `fn(rank)`."""
    with tempfile.TemporaryDirectory(prefix="fullshard-counted-") as folder:

        def counting(rank: int) -> None:
            counted = _watch(None)
            fn(rank)
            number = counted[0]
            Path(folder, str(rank)).write_text(str(number))

        assert run_killed(world, counting, None, prepare) == [DONE] * world
        return [int(Path(folder, str(rank)).read_text()) for rank in range(world)]


def _watch(fatal: int | None) -> list[int]:
    """Count operations from now on; end this process before that of number `fatal`."""
    counted = [0]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        # Not what looks at processes beside it, whenever that happens to.
        if event in OPERATIONS and not (arguments and str(arguments[0]).startswith("/proc")):
            if counted[0] == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            counted[0] += 1

    sys.addaudithook(hook)
    return counted


def _rank(
    _conn: object,
    rank: int,
    world: int,
    fn: Callable[[int], None],
    kill: Kill | None,
    prepare: Callable[[], object],
    rendezvous: str,
) -> None:
    """What a fork does, whose exit status says what came of it."""
    status = BROKE
    try:
        forked.prepare()
        if world > 1:
            forked.join(rank, world, rendezvous, 30.0)
        prepare()
        _wait_for_all(rank, world, rendezvous)
        status = _rank_main(rank, fn, kill)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _wait_for_all(rank: int, world: int, rendezvous: str) -> None:
    """Until every rank has prepared itself, by files: one that is killed leaves nobody in the middle of that."""
    Path(f"{rendezvous}-{rank}").touch()
    deadline = time.monotonic() + 60
    while not all(os.path.exists(f"{rendezvous}-{other}") for other in range(world)):
        if time.monotonic() > deadline:
            raise TimeoutError("expected all ranks to prepare themselves within 60 s")
        time.sleep(0.002)


def _rank_main(rank: int, fn: Callable[[int], None], kill: Kill | None) -> int:
    if kill is not None and kill.rank == rank:
        if kill.before is not None:
            _watch(kill.before)
        if kill.beyond is not None:
            # Python ignores this signal, which makes an error of it.
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (kill.beyond, kill.beyond))
            # A save looks for this limit before its first byte, and would refuse.
            resource.getrlimit = lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    try:
        fn(rank)
    except Exception:
        if kill is None:
            traceback.print_exc()
        return RAISED
    return DONE


def _wait(pids: list[int], timeout: float) -> list[int]:
    found: dict[int, int] = {}
    deadline = time.monotonic() + hang.patience(timeout)
    while len(found) < len(pids):
        for pid in pids:
            if pid not in found:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    found[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    found[pid] = 999
        time.sleep(0.003)
    return [found[pid] for pid in pids]
