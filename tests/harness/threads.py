"""Ranks as threads of this process, over torch's threaded process group: numerics and parity in milliseconds.

The threaded process group is private to torch; this file is the one place that touches it. Its traps, and what is
done here:

* Group lookups of functional collectives are per process unless `_set_thread_isolation_mode(True)` is on: without it
  the ranks share one registry and find each other's groups.
* A rank that raises leaves the others waiting for ever: `ProcessLocalGroup.exception_handle` wakes those inside a
  collective.
* Those that wait inside the creation of a group wait on a store that nobody wakes: `_store_barrier` below looks up
  now and then.
* Tensors' random state is one per process: draw test data before the ranks start, or from a generator of the rank's
  own.
* Every `init_process_group` puts one more excepthook around the last one; ours is put back, and so is whether
  algorithms are deterministic.
* A rank that sits in C code cannot be ended. It is left behind when its run is over, fails the test that started it
  (tests/conftest.py), and finds nothing of later runs: `_start_coll` below refuses it their collectives, and it neither
  releases their ranks nor destroys their groups when it ends.
* It has no asynchronous works: what it returns is done. Overlap is a matter for the `procs` tier.
* Threads that used DTensors must have ended before the interpreter does: `_end_idle` below.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from tests.harness import collecting, cuda_builds, hang, mailbox, worlds
from tests.harness.errors import RankReport, RanksFailed, format_stacks
from tests.harness.installed import clear_redistribution_cache, clear_sharding_cache

# How long a rank may take to leave its collective after it was told to: it only has to wake up and unwind.
_RELEASE_SECONDS = 3.0
# "threads", or "gloo": ranks are forks of this process (`pytest --ranks=gloo`, see forked.py).
RANKS = "threads"
# How many ranks a test asks for that holds with any number. `pytest --world=4` sets it, before tests are imported, and
# then those that ask for another number are left out.
WORLD = 2


# Rank threads that still ran when their run was over, with their stacks: of the test that runs, and of those before it.
_LEFT: list[tuple[_Rank, str]] = []
_LEFT_BEFORE: list[_Rank] = []
# By rank: the thread of that rank in earlier runs.
_IDLE: dict[int, _Thread] = {}

# Of those that this process may use, another one for each worker (tests/workers.py).
_CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
_CORE = _CORES[int(os.environ.get("TESTS_WORKER", "0")) % len(_CORES)] if _CORES else None

cuda_builds.settle()

# 2.11's groups keep a list of communicators in each world but in the threaded one.
if hasattr(dist.distributed_c10d._World, "comms") and not hasattr(threaded.ThreadLocalWorld, "comms"):
    threaded.ThreadLocalWorld.comms = property(lambda _: [])  # type: ignore[attr-defined]

_start_coll_of_torch = threaded.ProcessLocalGroup._start_coll


def _start_coll(collective: Any, group: Any) -> Any:
    rank = getattr(threading.current_thread(), "rank", None)
    if rank is not None and rank.run.over.is_set():
        raise SystemExit("this rank was left behind when its test ended; groups are another test's now")
    return _start_coll_of_torch(collective, group)


threaded.ProcessLocalGroup._start_coll = _start_coll  # type: ignore[method-assign]


def left_behind() -> str:
    """Which rank threads the test that is about to end leaves behind, with their stacks; empty if none. Afterwards they
    are nobody's: asked to end, and not spoken of again.
    """
    alive = [(thread, stack) for thread, stack in _LEFT if thread.is_alive()]
    _LEFT_BEFORE[:] = [thread for thread in _LEFT_BEFORE if thread.is_alive()] + [thread for thread, _ in alive]
    _LEFT.clear()
    for thread in _LEFT_BEFORE:
        _raise_in_thread(thread, SystemExit)
    return "\n".join(f"{thread.name} could not be ended and is left behind, at:\n{stack}" for thread, stack in alive)


def running() -> list[_Rank]:
    """Rank threads that run, but for those that earlier tests left behind."""
    ranks = [rank for thread in threading.enumerate() if (rank := getattr(thread, "rank", None)) is not None]
    return [thread for thread in ranks if thread not in _LEFT_BEFORE]


def several() -> int:
    """As WORLD, for what holds with any number but one."""
    return max(2, WORLD)


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call `fn(rank, *args)` on `world` threads joined in one process group; return the results in rank order.

    Inside `fn`, `torch.distributed` is initialised (backend "threaded") with that rank and world. All ranks see the
    same `args` objects: do not write to them. If a rank raises or does not end within `timeout` seconds, the others
    are released and one `RanksFailed` tells of all of them. Whatever happens, the next call starts clean.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "run_ranks expects that this process has no process group, but one is initialised; "
            "leave fake_world() or call destroy_process_group() first"
        )
    if world != WORLD and WORLD != 2:
        pytest.skip(f"{worlds.OTHER_WORLD} {world} ranks, not {WORLD}")
    if RANKS == "gloo":
        from tests.harness.forked import run_forks

        worlds.note("gloo", world)
        return run_forks(world, fn, args, timeout)
    worlds.note("threads", world)
    run = _Run(world, fn, args)
    excepthook, deterministic = sys.excepthook, torch.are_deterministic_algorithms_enabled()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    mailbox.install()
    barrier, threaded._store_based_barrier = threaded._store_based_barrier, _store_barrier
    try:
        return run.join(timeout)
    finally:
        run.release()  # also when the hang timer or Ctrl-C interrupted the join
        run.leave()
        threaded.ProcessLocalGroup.reset()
        threaded._store_based_barrier = barrier
        threaded._uninstall_threaded_pg()
        if threaded._ctx_manager is not None:  # up to 2.12 it leaves backwards of this process without their threads
            threaded._ctx_manager.__exit__(None, None, None)
            threaded._ctx_manager = None
        sys.excepthook = excepthook
        torch.use_deterministic_algorithms(deterministic)  # of the process, and ranks switch them on
        torch._C._distributed_c10d._set_thread_isolation_mode(False)


def _wake_waiting() -> None:
    """Wake ranks that wait in a collective. torch's loop over collectives raises where another rank ends one, and is
    begun again then."""
    for _ in range(100):
        try:
            threaded.ProcessLocalGroup.exception_handle(None)
        except RuntimeError:
            continue
        return


class _Run:
    """The threads of one `run_ranks` call and what came of them."""

    def __init__(self, world: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.fn, self.args, self.world = fn, args, world
        self.store = dist.HashStore()
        self.results: list[Any] = [None] * world
        self.reports: dict[int, RankReport] = {}
        self.failed = threading.Event()
        self.over = threading.Event()
        self.threads = [_Rank(self, rank) for rank in range(world)]
        # Some rank made groups beside the default one.
        self.made_groups = False

    def join(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + hang.patience(timeout)
        for thread in self.threads:
            thread.start()
        while any(thread.is_alive() for thread in self.threads) and not self.failed.is_set():
            if time.monotonic() > deadline:
                self._report_hung()
                break
            for thread in self.threads:
                thread.join(timeout=0.02)
        if self.failed.is_set() or self.reports:
            self.release()
            self._report_abandoned()
            raise RanksFailed(
                f"{getattr(self.fn, '__qualname__', self.fn)} failed", self.world, list(self.reports.values())
            )
        return self.results

    def release(self) -> None:
        """Get every rank that still runs out of its collective, and out of its Python code if need be."""
        alive = [thread for thread in self.threads if thread.is_alive()]
        if not alive:
            return
        _wake_waiting()
        seconds = hang.patience(_RELEASE_SECONDS)
        deadline = time.monotonic() + seconds
        while any(thread.is_alive() for thread in alive) and time.monotonic() < deadline:
            # A rank can be between two collectives, or in a loop of its own: wake sleepers again and ask the thread
            # to end.
            _wake_waiting()
            if time.monotonic() > deadline - seconds / 2:
                for thread in alive:
                    _raise_in_thread(thread, SystemExit)
            for thread in alive:
                thread.join(timeout=0.02)

    def leave(self) -> None:
        """Have nothing more to do with ranks that still run."""
        self.over.set()
        for thread in self.threads:
            if thread.is_alive() and thread.ident is not None:
                _LEFT.append((thread, format_stacks({thread.ident})))
        # A thread that was interrupted is no other rank's. And DTensor's caches, one of each thread, hold the meshes of
        # what was computed first, whose groups have names that others have in another run.
        again = not self.reports and not self.made_groups and not any(rank.is_alive() for rank in self.threads)
        for rank in self.threads:
            rank.leave(again=again)
        if not again:
            # The next thread of that number may be another rank, which would take the shapes of this one.
            clear_redistribution_cache()

    def rank_main(self, rank: int) -> None:
        torch.set_num_threads(1)  # a setting of each thread: new ones start with one worker per core
        try:
            dist.init_process_group("threaded", rank=rank, world_size=self.world, store=self.store)
            with collecting.on_rank(rank, getattr(self.fn, "__qualname__", "")):
                self.results[rank] = self.fn(rank, *self.args)
        except SystemExit:
            where = traceback.format_exc()
            self.reports.setdefault(rank, RankReport(rank, "released", where, at=time.monotonic()))
        except BaseException as error:
            self.reports.setdefault(rank, RankReport(rank, "raised", traceback.format_exc(), error, time.monotonic()))
        finally:
            # A rank that was left behind would strike another test's.
            if not self.over.is_set():
                if rank in self.reports:
                    self.failed.set()
                    _wake_waiting()
                if dist.is_initialized():
                    if dist.distributed_c10d._world.group_count > 1:  # no `|=`, which another rank may undo
                        self.made_groups = True
                    dist.destroy_process_group()

    def _report_hung(self) -> None:
        for rank, thread in enumerate(self.threads):
            if thread.is_alive() and thread.ident is not None:
                self.reports.setdefault(
                    rank, RankReport(rank, "hung", format_stacks({thread.ident}), at=time.monotonic())
                )

    def _report_abandoned(self) -> None:
        for rank, thread in enumerate(self.threads):
            if thread.is_alive() and thread.ident is not None:
                stack = format_stacks({thread.ident})
                known = self.reports.get(rank)
                detail = (known.detail + "\n" if known else "") + f"could not be ended and is left behind, at:\n{stack}"
                self.reports[rank] = RankReport(rank, "hung", detail, at=time.monotonic())


class _Rank:
    """A rank of one run, on a thread that ranks of earlier runs may have had: a process lives long, too, and torch
    keeps what it finds out of DTensors once for each thread."""

    def __init__(self, run: _Run, rank: int) -> None:
        self.run, self._rank, self.name = run, rank, f"rank {rank}"
        self._thread: _Thread | None = None
        self._ended = threading.Event()

    @property
    def ident(self) -> int | None:
        return None if self._thread is None else self._thread.ident

    def start(self) -> None:
        self._thread = _IDLE.pop(self._rank, None) or _Thread()
        self._thread.ranks.put(self)

    def main(self) -> None:
        """In the thread."""
        try:
            self.run.rank_main(self._rank)
        finally:
            self._ended.set()

    def is_alive(self) -> bool:
        return self._thread is not None and not self._ended.is_set()

    def join(self, timeout: float) -> None:
        self._ended.wait(timeout)

    def leave(self, *, again: bool) -> None:
        """The run is over: the thread is for other ranks, or ends."""
        if self._thread is not None:
            if again:
                _IDLE[self._rank] = self._thread
            else:
                self._thread.ranks.put(None)


class _Thread(threading.Thread):
    """All of a process on one core: each operation of torch gives the interpreter lock away, and where another rank
    takes it on another core, the two spend their time on waking each other."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ranks: SimpleQueue[_Rank | None] = SimpleQueue()
        self.rank: _Rank | None = None
        self.start()

    def run(self) -> None:
        if _CORE is not None:
            os.sched_setaffinity(0, {_CORE})
        while (rank := self.ranks.get()) is not None:
            self.rank, self.name = rank, rank.name
            rank.main()
            self.rank = None
        # Torch 2.10 frees what a thread remembers of DTensors, meshes among it, under a lock of all threads, and gives
        # the interpreter lock away meanwhile: two threads that end at once would wait for each other for ever.
        clear_sharding_cache()


@atexit.register
def _end_idle() -> None:
    """End the threads that wait for another rank, before the interpreter does. Where one of them still exists then, its
    cache of DTensors is freed twice at a time, by the interpreter and by the thread that ends: a crash in C++."""
    threads = list(_IDLE.values())
    _IDLE.clear()
    for thread in threads:
        thread.ranks.put(None)
    for thread in threads:
        thread.join(5.0)


def _store_barrier(
    rank: int, store: dist.Store, group_name: str, rendezvous_count: int, timeout: timedelta, *_: Any
) -> None:
    """Wait until all ranks have made the group, or one of them has failed."""
    if store.add("arrived", 1) == rendezvous_count:
        store.set("complete", "1")
    deadline = time.monotonic() + timeout.total_seconds()
    while not store.check(["complete"]):
        if threaded.ProcessLocalGroup._terminate.is_set():
            raise SystemExit("another rank failed while this one waited for it in the creation of a group")
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank}: not all of {rendezvous_count} ranks made the group within {timeout}")
        time.sleep(0.0005)


def _raise_in_thread(thread: _Rank, error: type[BaseException]) -> None:
    """Raise `error` in `thread` at its next Python instruction; nothing happens while it sits in C code."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(error))
