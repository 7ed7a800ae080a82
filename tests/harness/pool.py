"""A persistent pool of gloo processes: real asynchrony, real files, real kills, at some 50 ms a job once warm.

    results = pool(2).run(fn, a, b, timeout=30)      # fn(rank, a, b) on two processes; results in rank order

`fn` must be importable (a function at the top of a test module). Processes come from a fork server that has torch
imported, so a new one costs a fraction of a second; all pools draw on the same processes, and those of a job that
hung or lost a rank are replaced. What a job may rely on and what it leaves behind is said in worker.py.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

from tests.harness import hang, worlds
from tests.harness.errors import RankReport, RanksFailed
from tests.harness.worker import STACKS_SIGNAL, Job
from tests.harness.worker import main as worker_main

# After one rank failed, the others get this long to fail by themselves (their connection to it is closed) and so say
# where they stood; then they are ended.
_RELEASE_SECONDS = 2.0
# A process that takes longer to start, or to put itself in order after a job, is replaced.
_START_SECONDS = 50.0
# What the fork server imports once for all processes; the last one only helps where it can be found on its path.
_PRELOAD = ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "tests.harness.worker"]
# The tail of a rank's output that an error quotes.
_OUTPUT_CHARACTERS = 4000


class _Worker:
    """One process of the pool, the parent's side."""

    def __init__(self, number: int, folder: str, backend: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.log = os.path.join(folder, f"worker{number}.log")
        self.stacks_file = os.path.join(folder, f"worker{number}.stacks")
        self.conn, theirs = context.Pipe()
        self.process = context.Process(
            target=worker_main, args=(number, folder, theirs, backend), name=f"pool worker {number}", daemon=True
        )
        self.process.start()
        theirs.close()
        self.ready = False
        self.log_start = 0

    def wait_ready(self, deadline: float) -> bool:
        """Wait until the process can take a job; False if it has ended, or does not come back from its last job."""
        left = max(deadline - time.monotonic(), 0.0)
        try:
            self.ready = self.ready or (self.conn.poll(left) and self.conn.recv_bytes() == b"ready")
        except (EOFError, OSError):
            self.ready = False
        return self.ready

    def send(self, job: bytes) -> None:
        self.log_start = os.path.getsize(self.log)
        self.conn.send_bytes(job)

    def release(self) -> None:
        """Let the process, which has answered, put itself back in order."""
        self.conn.send_bytes(b"all ranks have answered")
        self.ready = False

    def output(self) -> str:
        """What the process wrote during its last job (the tail of it)."""
        try:
            with open(self.log, errors="replace") as file:
                file.seek(self.log_start)
                return file.read()[-_OUTPUT_CHARACTERS:]
        except OSError:
            return ""

    def stacks(self) -> str:
        """Ask the process for the stacks of all its threads, now, wherever it is."""
        if not self.process.is_alive() or self.process.pid is None:
            return "(the process has ended)"
        before = os.path.getsize(self.stacks_file)
        try:
            os.kill(self.process.pid, STACKS_SIGNAL)
        except ProcessLookupError:  # the fork server, whose child it is, has yet to tell that it ended
            return "(the process has ended)"
        deadline = time.monotonic() + 2.0
        size = before
        while time.monotonic() < deadline:
            time.sleep(0.03)
            last, size = size, os.path.getsize(self.stacks_file)
            if size > before and size == last:
                break
        with open(self.stacks_file, errors="replace") as file:
            file.seek(before)
            return file.read() or "(the process did not answer; it is stopped or beyond signals)"

    def end(self) -> None:
        # The first signal is one that a measurement of coverage survives long enough to write down what it has, which
        # takes longer than two seconds on a busy machine.
        self.process.terminate()
        self.process.join(60.0 if "COVERAGE_PROCESS_CONFIG" in os.environ else 2.0)
        self.process.kill()
        self.process.join()
        self.process.close()
        self.conn.close()


class ProcessPool:
    """All processes of this test session. Workers 0 to world-1 are the ranks of a job."""

    def __init__(self, backend: str = "gloo") -> None:
        self.backend = backend
        self.folder = tempfile.mkdtemp(prefix="fullshard-pool-")
        self.workers: list[_Worker | None] = []
        self.busy: list[_Worker] = []
        self.jobs_run = 0

    def run(
        self, world: int, fn: Callable[..., Any], args: tuple[Any, ...], *, timeout: float, group: bool, seed: int
    ) -> list[Any]:
        if self.busy:
            raise RuntimeError("the pool runs one job at a time, and one is running")
        # The file stays until the processes are gone. The store of a rank writes to it once more when it is destroyed,
        # which may be in a garbage collection of a later job: of a file that was removed meanwhile torch makes a new
        # one, the next store reads that from the middle, and waits for ever with the file locked.
        rendezvous = os.path.join(self.folder, f"rendezvous-{uuid.uuid4().hex}") if group else None
        name = getattr(fn, "__qualname__", repr(fn))
        filters, timeout = list(warnings.filters), hang.patience(timeout)
        try:
            jobs = [
                # The group's own limit is behind the job's, so that a hang is reported by stacks and not by a gloo
                # timeout.
                pickle.dumps(Job(fn, args, rank, world, rendezvous, timeout + 60, seed, filters, self.backend))
                for rank in range(world)
            ]
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"pool.run expects a function at the top of an importable module and arguments that pickle; "
                f"{name} or its arguments do not: {error}. Move the function to module level and pass plain values."
            ) from error
        workers = self._ready_workers(world)
        self.jobs_run += 1
        if group:
            worlds.note("gloo", world)
        all_answered = False
        self.busy = workers
        try:
            for worker, job in zip(workers, jobs, strict=True):
                worker.send(job)
            results, reports = _collect(workers, timeout)
            # A rank that raised has put its process back in order, as one that returned has; any other is past trust.
            all_answered = all(report.kind == "raised" for report in reports)
            if all_answered:
                for worker in workers:
                    worker.release()
            if reports:
                raise RanksFailed(f"{name} failed", world, reports)
            return results
        finally:
            self.busy = []
            if not all_answered:  # also when the hang timer or Ctrl-C came in between
                for number in range(world):
                    self._discard(number)

    def stacks(self) -> str:
        """The stacks of all ranks of the job that is running, for the hang timer; empty when there is none."""
        return "\n".join(f"--- pool rank {rank} ---\n{worker.stacks()}" for rank, worker in enumerate(self.busy))

    def shutdown(self) -> None:
        for number in range(len(self.workers)):
            self._discard(number)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ready_workers(self, world: int) -> list[_Worker]:
        """Workers 0 to world-1, each of them waiting for a job; missing and dead ones are made anew."""
        self.workers += [None] * (world - len(self.workers))
        for attempt in range(2):
            for number in range(world):  # all are started before any is waited for
                worker = self.workers[number]
                if worker is None or not worker.process.is_alive():
                    self._discard(number)
                    self.workers[number] = _Worker(number, self.folder, self.backend)
            workers = [worker for worker in self.workers[:world] if worker is not None]
            # One deadline for all: both attempts must end before the hang timer of the test, which would leave the
            # stuck processes to the next test.
            seconds = hang.patience(_START_SECONDS)
            deadline = time.monotonic() + seconds
            lost = [number for number, worker in enumerate(workers) if not worker.wait_ready(deadline)]
            if not lost:
                return workers
            if attempt:
                raise RuntimeError(f"a pool process did not start; its output:\n{workers[lost[0]].output()}")
            for number in lost:
                if workers[number].process.is_alive():
                    print(
                        f"pool process {number} did not come back from its last job in {seconds:g} s and is "
                        f"replaced; it stands at\n{workers[number].stacks()}",
                        file=sys.stderr,
                    )
                self._discard(number)
        raise AssertionError("unreachable")

    def _discard(self, number: int) -> None:
        worker, self.workers[number] = self.workers[number], None
        if worker is not None:
            worker.end()


def _collect(workers: list[_Worker], timeout: float) -> tuple[list[Any], list[RankReport]]:
    """Wait for all ranks. On time-out, and some time after the first failure, say where those that still run stand."""
    results: list[Any] = [None] * len(workers)
    reports: list[RankReport] = []
    waiting = dict(enumerate(workers))
    deadline = time.monotonic() + timeout
    while waiting:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            kind = "released" if reports else "hung"
            for rank, worker in waiting.items():
                reports.append(RankReport(rank, kind, _with_output(worker.stacks(), worker), at=time.monotonic()))
            break
        connection.wait(
            [w.conn for w in waiting.values()] + [w.process.sentinel for w in waiting.values()], timeout=remaining
        )
        for rank, worker in list(waiting.items()):
            report, done = None, False
            try:
                if worker.conn.poll():
                    ok, payload = pickle.loads(worker.conn.recv_bytes())
                    done = True
                    if ok:
                        results[rank] = payload
                    else:
                        text, error, when = payload
                        report = RankReport(rank, "raised", _with_output(text, worker), error, when)
            except (EOFError, OSError):
                worker.process.join(timeout=5)
                # No time is known, so it is put first: what the others report is most likely its consequence.
                report = RankReport(rank, "died", _with_output(_exit_text(worker.process.exitcode), worker))
            if report is not None:
                if not reports:
                    deadline = min(deadline, time.monotonic() + hang.patience(_RELEASE_SECONDS))
                reports.append(report)
            if report is not None or done:
                del waiting[rank]
    return results, reports


def _with_output(text: str, worker: _Worker) -> str:
    output = worker.output().strip()
    return f"{text.rstrip()}\n(output of this rank:)\n{output}" if output else text


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"


class _Pool:
    """`pool(world)`: the session's processes, seen as a world of `world` ranks."""

    def __init__(self, world: int, backend: str) -> None:
        self.world, self.backend = world, backend

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, group: bool = True, seed: int = 0
    ) -> list[Any]:
        """Call `fn(rank, *args)` on every rank; return the results in rank order, or raise one `RanksFailed`.

        `timeout`: seconds until the stacks of the ranks that still run are reported and their processes ended.
        `group=False`: no process group is made (for tests that make their own, or none). `seed` is each rank's
        `torch.manual_seed`.
        """
        return _the_pool(self.backend).run(self.world, fn, args, timeout=timeout, group=group, seed=seed)


def pool(world: int, *, backend: str = "gloo") -> _Pool:
    """`world` processes of the session's pool; nothing is started before the first job. Backend "nccl", beside gloo for
    the host, or "simulated:nccl", without: processes of their own with the device "simulated" (harness/nccl.py)."""
    if world < 1:
        raise ValueError(f"pool expects a world of at least one rank, got {world}")
    return _Pool(world, backend)


_pools: dict[str, ProcessPool] = {}  # by backend: made at the first job


def _the_pool(backend: str) -> ProcessPool:
    if backend not in _pools:
        _pools[backend] = ProcessPool(backend)
        hang.add_source(_pools[backend].stacks)
    return _pools[backend]


@atexit.register
def shutdown() -> None:
    """End all processes of the pools; the next job starts new ones."""
    while _pools:
        _, the_pool = _pools.popitem()
        hang.remove_source(the_pool.stacks)
        the_pool.shutdown()
