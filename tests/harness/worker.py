"""The process side of the pool: one rank, which runs one job after another until its pipe is closed.

Each job gets a process group of its own (gloo over loopback, met through a file: no port to be taken, none to be
waited for; on the device "simulated" through a store that rank 0 serves) and leaves nothing: the job's groups, its
random state, environment, default dtype and thread counts are put back afterwards.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.harness import collecting, cuda_builds

# The worker dumps the stacks of all its threads to its file of stacks on this signal, also while it sits in C code.
STACKS_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True)
class Job:
    """What one rank is asked to do. `rendezvous` is a file name that no other job uses; None: no process group."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world: int
    rendezvous: str | None
    group_timeout: float
    seed: int
    warning_filters: list[Any]
    # "gloo"; "nccl" or another name of NCCL, beside gloo for the host, or "simulated:nccl", without: then this process
    # has the device "simulated" from now on (tests/harness/nccl.py).
    backend: str = "gloo"


def main(number: int, folder: str, conn: Connection, backend: str) -> None:
    """Run the jobs that arrive on `conn`, until the parent closes it.

    For each job: this process says that it is ready, receives the job, answers with (ok, payload), waits for the word
    that all ranks have answered, and puts itself back in order. A rank that has finished must not take its groups
    down while another is still inside them; one that failed must, or the others wait for it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it ends its workers itself
    _write_output_to(os.path.join(folder, f"worker{number}.log"))
    stacks = open(os.path.join(folder, f"worker{number}.stacks"), "w")  # open as long as the process lives
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)
    faulthandler.enable(file=sys.__stderr__)  # a crash in C code says where it was, in the log that the error quotes
    _end_with_parent()
    # The host name may resolve to an address that nothing routes; ranks of one machine meet on loopback.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    cuda_builds.count_devices()
    if _is_on_device(backend):
        from tests.harness import nccl

        # Before a module of tests is imported: autograd counts the devices at the first backward, which may be there.
        nccl.library()
    gc.freeze()  # torch's own objects never become garbage; without this a collection takes 150 ms
    try:
        while True:
            conn.send_bytes(b"ready")
            before = _ProcessState()
            conn.send_bytes(_answer(conn.recv_bytes(), before))
            conn.recv_bytes()  # all ranks have answered
            before.restore()
            if not _groups_are_gone():
                return  # the parent finds the pipe closed and puts a new process in the place of this one
    except (EOFError, OSError):
        return


class _ProcessState:
    """What a job may change in its process; taken before it and put back after it."""

    def __init__(self) -> None:
        self.environment, self.folder = dict(os.environ), os.getcwd()
        self.dtype, self.excepthook = torch.get_default_dtype(), sys.excepthook

    def restore(self) -> None:
        """End all groups, with what is still pending in them, and put the rest back. Twice is as once."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if "tests.harness.nccl" in sys.modules:
            sys.modules["tests.harness.nccl"].end()
        sys.excepthook = self.excepthook  # init_process_group puts one more around the last
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        torch.set_default_dtype(self.dtype)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)


def _groups_are_gone() -> bool:
    """Whether torch has forgotten all groups. An `init_process_group` that failed, because a peer had gone, has counted
    one all the same: the next would have another name here than on the peers, and they would wait for each other."""
    return not dist.is_initialized() and dist.distributed_c10d._world.group_count == 0


def _answer(message: bytes, before: _ProcessState) -> bytes:
    """Run one job; the answer is pickled (True, result) or (False, (traceback text, exception or None, when))."""
    try:
        job: Job = pickle.loads(message)
        return pickle.dumps((True, _run(job)))
    except BaseException as error:
        # Noted before the groups go: that makes the peers fail too, and their reports must come after this one.
        text, when = traceback.format_exc(), time.monotonic()
        error.__traceback__ = None  # it holds the frames of the job, and with them models and groups
        before.restore()
        try:
            # Not every exception survives: some pickle well and fail when they are read.
            carried = pickle.dumps((False, (text, error, when)))
            pickle.loads(carried)
        except Exception:
            carried = pickle.dumps((False, (text, None, when)))
        del error
        gc.collect()  # what failed in the middle leaves cycles behind; a good job does not pay for this
        return carried


def _is_on_device(backend: str) -> bool:
    """Whether ranks with it have the device "simulated"."""
    return "nccl" in backend


def _run(job: Job) -> Any:
    torch.manual_seed(job.seed)
    with warnings.catch_warnings():
        warnings.filters[:] = job.warning_filters  # the same strictness as in the test that asked
        backend, on_device = job.backend, _is_on_device(job.backend)
        if on_device:
            from tests.harness import nccl

            nccl.register(job.seed)
            backend = backend if ":" in backend else nccl.backends_of(backend)
            # The device of these programs, on each rank.
            os.environ["LOCAL_RANK"] = "0"
        if job.rendezvous is not None:
            # Ranks ask each other through the store, and one in a file is read every ten milliseconds.
            met: dict[str, Any] = {"init_method": f"file://{job.rendezvous}"}
            if on_device:
                met = {"store": _store(job)}
            limit = timedelta(seconds=job.group_timeout)
            dist.init_process_group(backend, rank=job.rank, world_size=job.world, timeout=limit, **met)
        with collecting.on_rank(job.rank, getattr(job.fn, "__qualname__", "")):
            return job.fn(job.rank, *job.args)


# The store that this process serves as rank 0, for all of its jobs.
_served: list[dist.TCPStore] = []


def _store(job: Job) -> dist.Store:
    """Served by rank 0, whose file at `job.rendezvous` has the port."""
    assert job.rendezvous is not None
    port, name = Path(job.rendezvous), os.path.basename(job.rendezvous)
    if job.rank == 0:
        if not _served:
            _served.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        port.with_suffix(".new").write_text(str(_served[0].port))
        port.with_suffix(".new").rename(port)
    deadline = time.monotonic() + job.group_timeout
    while not port.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 did not say within {job.group_timeout:g} s where its store is")
        time.sleep(0.002)
    limit = timedelta(seconds=job.group_timeout)
    found = dist.TCPStore("127.0.0.1", int(port.read_text()), timeout=limit, wait_for_workers=False)
    return dist.PrefixStore(name, found)


def _write_output_to(path: str) -> None:
    """Send both output streams, C++'s included, to a file: the terminal belongs to pytest."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr


def _end_with_parent() -> None:
    """End this process when its parent is gone: a killed pytest must not leave ranks behind that wait for ever."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
