"""What was looked at, as data. Checks read nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from fullshard import Report


@dataclass(frozen=True)
class Machine:
    """This machine and its installation. `installed`: the version of the installed package fullshard, "" if there is
    none. `devices`: of CUDA. `loopback`, `interface`: what is wrong, "" for nothing. `port`: of the rendezvous, 0 if
    none is needed. `shared_memory`: free bytes of /dev/shm, None without one."""

    torch: str
    fullshard: str
    installed: str
    backends: frozenset[str]
    devices: int
    cores: int
    loopback: str
    interface: str
    port: int
    port_is_free: bool
    shared_memory: int | None
    open_files: int


@dataclass(frozen=True)
class Model:
    """Names of parameters and buffers as in the plain model. `step_failure`, `refusal`: the first line of what the
    plain step and `fully_shard` raised, "" if nothing. `report`: None after a refusal."""

    meta: tuple[str, ...] = ()
    uninitialised: tuple[str, ...] = ()
    meta_buffers: tuple[str, ...] = ()  # in no state dict
    changed_buffers: tuple[str, ...] = ()  # in no state dict, and changed by a step
    ties_across: tuple[str, ...] = ()  # "a (unit x) = b (root)"
    step_failure: str = ""
    refusal: str = ""
    report: Report | None = None
    ignored: frozenset[str] = frozenset()  # what `fully_shard` was called to ignore
    strays: int = 0  # tensors of the optimizer that are no parameters of the sharded model
    not_optimized: tuple[str, ...] = ()
    gathers: tuple[int, ...] = ()  # all-gathers of each unit in a step


@dataclass(frozen=True)
class Folder:
    """Where checkpoints go. `problem`: why nothing can be written, "" if it can. `needed`: bytes of all checkpoints
    that are there at once, the one being written included."""

    path: str
    problem: str
    free: int
    file_system: str
    needed: int


@dataclass(frozen=True)
class Axis:
    """Bytes per second that one rank received in messages of the size of the model's own."""

    name: str
    ranks: int
    all_gather: float
    reduce_scatter: float


@dataclass(frozen=True)
class Measured:
    """What the probe measured. Seconds; None: not measured. `skipped`: what was not, and why."""

    step: float | None = None  # forward and backward of the plain model, on this machine's CPU
    host: float | None = None  # what one unit adds to that, without communication
    axes: tuple[Axis, ...] = ()
    failure: str = ""  # of messages between processes
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """Everything that checks read. `world`: the ranks asked for, in `replicas` groups."""

    world: int
    replicas: int
    machine: Machine
    model: Model
    folder: Folder | None
    measured: Measured
