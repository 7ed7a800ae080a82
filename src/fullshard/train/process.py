"""One process of a run: how it joins the others, how it stops, and how it ends on failure.

A process finds its rank in the environment, set by `fullshard train` (`launch`) or by torchrun.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, Partial

from fullshard.migrate.axes import Axes
from fullshard.migrate.meshes import build_meshes
from fullshard.migrate.sequences import ContextParallel, sequences_of
from fullshard.train.config import Config, invalid

# Set by the launcher: the file through which its processes meet, its process id, and the run folder, already created.
STORE_PATH, LAUNCHER_PID, RUN_DIR = "FULLSHARD_STORE_PATH", "FULLSHARD_LAUNCHER_PID", "FULLSHARD_RUN_DIR"

STOPPED = "stopped"  # the status of a run that SIGTERM stopped, with a checkpoint

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_SECONDS = 4.0


def device_kind(config: Config) -> str:
    """ "cpu" or "cuda", according to training.device. Raises `ConfigError` for a device that does not exist."""
    wanted = config.training.device
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise invalid("training.device", "cuda", "PyTorch finds no CUDA device here", '"cpu"')
    return "cuda" if available and wanted != "cpu" else "cpu"


def threads_per_process(config: Config, local_processes: int) -> int:
    """training.threads, or the cores that this process may use divided by the processes on this machine."""
    if config.training.threads:
        return config.training.threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // local_processes, 1)


class World(NamedTuple):
    """The processes of a run, as seen by one of them. `axes`: None where each process has data of its own. `sequences`:
    cuts batches over `cp`; None without that axis."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh  # all processes: (shard), or (replicate, shard)
    store: Any  # a torch store: small strings that the processes share before training
    axes: Axes | None = None
    whole: DeviceMesh | None = None  # with all axes; None for `mesh`
    flat: DeviceMesh | None = None  # beside `whole`: all processes as one axis, for one message where that has several
    sequences: ContextParallel | None = None

    @property
    def share(self) -> int:
        """The number of this process's share of a batch."""
        return self.rank if self.axes is None else self.axes.share(self.rank)[0]

    @property
    def shares(self) -> int:
        return self.size if self.axes is None else self.axes.shares

    @property
    def averaged(self) -> int:
        """The number of processes over which gradients are averaged."""
        return self.size if self.axes is None else self.axes.averaged

    def counted(self, values: list[float]) -> list[float]:
        """`values` of a share of a batch, or of parts of its sequences, on one of the processes that have these; zeros
        on the others."""
        first = self.axes is None or self.axes.group(self.rank, "pp", "tp")[0] == self.rank
        return values if first else [0.0] * len(values)

    def total(self, values: list[float]) -> list[float]:
        """The sum of each value over all processes, in float64. Collective."""
        return self._combine(values, "sum")

    def largest(self, values: list[float]) -> list[float]:
        """The maximum of each value over all processes, in float64. Collective."""
        return self._combine(values, "max")

    def _combine(self, values: list[float], operation: str) -> list[float]:
        local = torch.tensor(values, dtype=torch.float64, device=self.device)
        mesh = self.mesh if self.whole is None else self.flat
        assert mesh is not None
        combined = DTensor.from_local(local, mesh, [Partial(operation)] * mesh.ndim).full_tensor()
        return [float(value) for value in combined.tolist()]

    def agree(self, what: str, value: str) -> None:
        """Raise `RuntimeError` on every process whose `value` differs from rank 0's."""
        if self.rank == 0:
            self.store.set(what, value)
            return
        expected = self.store.get(what).decode()
        if expected != value:
            raise RuntimeError(f"{what}: rank 0 has {expected}, rank {self.rank} has {value}; they must be equal")


@contextmanager
def joined_world(config: Config) -> Iterator[World]:
    """Join the process group that the environment describes; leave it at the end, also after an exception."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    kind = device_kind(config)
    torch.set_num_threads(threads_per_process(config, local_size))
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    # Parameters in host memory are gathered whole there, for model.safetensors.
    on_device = "cpu:gloo,cuda:nccl" if config.sharding.sharding.cpu_offload else "nccl"
    timeout = timedelta(seconds=config.training.timeout_seconds)
    store = _store(size)
    store.set_timeout(timeout)
    dist.init_process_group(
        on_device if kind == "cuda" else "gloo",
        store=PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if kind == "cuda" else None,
    )
    try:
        yield world_of(config, rank, size, device, PrefixStore("train", store))
    finally:
        dist.destroy_process_group()


def world_of(config: Config, rank: int, size: int, device: torch.device, store: Any) -> World:
    """The processes with their meshes, after the process group was made. Collective."""
    if not config.sharding.parallelism.beyond_data:
        return World(rank, size, device, data_parallel_mesh(config, device.type, size), store)
    axes = config.axes(size)
    whole, mesh = build_meshes(axes, device.type)
    sequences = None
    if axes.cp > 1:
        sequences = sequences_of(axes, whole, mesh, config.sharding.parallelism.context_parallel_variant)
    return World(rank, size, device, mesh, store, axes, whole, init_device_mesh(device.type, (size,)), sequences)


def data_parallel_mesh(config: Config, kind: str, size: int) -> DeviceMesh:
    """The mesh for `fully_shard`: one axis, or two if there are replicas; neighbours shard together."""
    copies, shard = config.sharding.degrees(size)
    if copies == 1:
        return init_device_mesh(kind, (shard,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (copies, shard), mesh_dim_names=("replicate", "shard"))


def _store(size: int) -> Any:
    if STORE_PATH in os.environ:
        return FileStore(os.environ[STORE_PATH], size)
    return next(iter(rendezvous("env://")))[0]


# ---- stopping --------------------------------------------------------------------------------------------------


class Stopped(BaseException):
    """The run stopped after a step, with a checkpoint, because of a signal. Not an `Exception`, like `Interrupted`."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name} after step {step}, with a checkpoint")
        self.signum, self.step = signum, step


class Interrupted(BaseException):
    """A signal ends this process. Not an `Exception`, so that nothing between the signal and `main` swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


@dataclass(slots=True)
class _Stop:
    """The reaction to SIGTERM. During steps it is noted, and the step completes; otherwise it ends the process."""

    noting: bool = False
    signum: int = 0  # the noted signal
    grace_seconds: float = 60.0


_stop = _Stop()


@contextmanager
def noting_stops(grace_seconds: float) -> Iterator[None]:
    """Notes SIGTERM inside, and does no more: `stop_requested` returns it. A process that has not ended `grace_seconds`
    later is ended anyway."""
    _stop.signum, _stop.grace_seconds, _stop.noting = 0, grace_seconds, True
    try:
        yield
    finally:
        # A later run in this process is not stopped by a signal to this one.
        _stop.signum, _stop.noting = 0, False


def stop_requested() -> int:
    """The signal that stops this process at the end of the step, 0 for none."""
    return _stop.signum


def stop_on_signals() -> None:
    """Makes SIGINT, SIGTERM and SIGHUP raise `Interrupted` in the main thread, and are sure to end the process.

    A Python handler runs only between two bytecodes, so a main thread that waits for a peer inside a collective does
    not run it. But the interpreter writes every signal to a pipe at once. A thread reads that pipe and ends the process
    if the main thread does not within a few seconds. The thread also watches the launcher: if that disappears
    (SIGKILL), this process ends too.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for signum in STOP_SIGNALS:
        signal.signal(signum, _raise_interrupted)
    launcher = int(os.environ.get(LAUNCHER_PID, 0))
    threading.Thread(target=_watch, args=(read_end, launcher), daemon=True, name="fullshard-signals").start()


def _raise_interrupted(signum: int, frame: FrameType | None) -> None:
    if _stop.noting and signum == signal.SIGTERM:
        _stop.signum = signum
        return
    for other in STOP_SIGNALS:  # once only: a second signal must not interrupt the clean-up of the first
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(signum)


def _watch(read_end: int, launcher: int) -> None:
    deadline, code = math.inf, 0
    while (left := deadline - time.monotonic()) > 0:
        if select.select([read_end], [], [], min(1.0, left))[0]:
            for received in os.read(read_end, 64):
                if received in STOP_SIGNALS:
                    noted = _stop.noting and received == signal.SIGTERM
                    until = time.monotonic() + (_stop.grace_seconds if noted else _GRACE_SECONDS)
                    deadline, code = min((deadline, code), (until, 128 + received))
        elif launcher and deadline == math.inf and os.getppid() != launcher:
            os.kill(os.getpid(), signal.SIGTERM)
    os._exit(code)


def leave(code: int) -> NoReturn:
    """End this process now. Skips the interpreter's shutdown, which may wait for peers that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
