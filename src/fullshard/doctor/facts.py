"""Describes what the checks look at, as data. Checks read nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fullshard.observe import Report


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


class Failure(NamedTuple):
    """The error that a sharded step raised. `stage`: "forward", "backward" or "optimizer step"."""

    stage: str
    text: str
    fix: str


@dataclass(frozen=True)
class Steps:
    """The facts that steps showed, empty if none was taken. Names of parameters and buffers as in the plain model."""

    plain_failure: str = ""  # the first line of what a step of the plain model raised
    changed_buffers: tuple[str, ...] = ()  # in no state dict, and changed by a step
    drifting_buffers: tuple[str, ...] = ()  # in state dicts; another batch gives other values
    unsteady_batch: tuple[str, ...] = ()  # parts of batch 0 that differ when it is asked for again
    computes_half: bool = False  # the plain step keeps float16 tensors for its backward
    partial_reads: tuple[str, ...] = ()  # what was read as a number, and where
    open_in_forward: tuple[str, ...] = ()  # units that are full at once, when most bytes are
    open_in_backward: tuple[str, ...] = ()
    sharded_failure: Failure | None = None
    fails_alone: bool = True  # also in a world of one, where values are those of training


@dataclass(frozen=True)
class Axes:
    """The facts about axes beside data parallelism. `broken`: rules that the declaration breaks, by their keys;
    `nearest`: the nearest legal plan. `narrowed`: what adds over a part of the features alone. `failure`: of a step of
    the divided model. `apart`: parts of the model that a rank has some of alone, which are not taken apart here."""

    broken: tuple[str, ...] = ()
    nearest: str = ""
    narrowed: tuple[str, ...] = ()
    failure: Failure | None = None
    apart: tuple[str, ...] = ()


@dataclass(frozen=True)
class Model:
    """Names of parameters and buffers as in the plain model. `refusal`: the first line of what `fully_shard` raised, ""
    if nothing. `report`: None after a refusal."""

    meta: tuple[str, ...] = ()
    uninitialised: tuple[str, ...] = ()
    meta_buffers: tuple[str, ...] = ()  # in no state dict
    unseeded: tuple[str, ...] = ()  # other values in a second call of `model`, after the same seeds
    seeded_by_rank: tuple[str, ...] = ()  # other values on another rank, by whose number the program seeds
    half: tuple[str, ...] = ()  # trainable, and stored in float16
    buffers: tuple[tuple[str, int], ...] = ()  # and tensors in attributes, with their bytes, the largest first
    ties_across: tuple[str, ...] = ()  # "a (unit x) = b (root)"
    refusal: str = ""
    report: Report | None = None
    ignored: frozenset[str] = frozenset()  # what `fully_shard` was called to ignore
    strays: int = 0  # tensors of the optimizer that are no parameters of the sharded model
    not_optimized: tuple[str, ...] = ()
    gathers: tuple[int, ...] = ()  # all-gathers of each unit in a step
    steps: Steps = Steps()
    axes: Axes = Axes()


@dataclass(frozen=True)
class Folder:
    """Where checkpoints go. `problem`: why nothing can be written, "" if it can. `needed`: bytes of all checkpoints
    that are there at once, the one being written included. `free`: None in an object store."""

    path: str
    problem: str
    free: int | None
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
    """The figures that the probe measured. Seconds; None: not measured. `skipped`: what was not, and why."""

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
