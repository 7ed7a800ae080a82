"""Engine options that are not arguments of `fully_shard`: read once, when a root first runs.

FULLSHARD_COMMUNICATION  "auto" (default): the fastest strategy measured for the backend: on gloo gradients are
                         exchanged within a node, and between nodes with equally many ranks in one level or in
                         two, by measured rates; on NCCL, and otherwise between nodes, the backend reduces them;
                         "torch": one all-gather and one reduce-scatter per unit, as FSDP2;
                         "all-to-all": "auto", and gradients exchanged within a node on every backend;
                         "one-level", "two-levels": "auto", and between such nodes in this way
FULLSHARD_WATCH          "auto" (default): saved weights are watched in a unit's first forwards, and as long as its
                         backward reads weights that no gradient of an output announced; "always", to find faults
FULLSHARD_REDUCE_DTYPE   what a policy without reduce_dtype follows: "grad_dtype" (default): the dtype of gradients,
                         that of the parameter unless it was set, as torch from 2.15 on; "param_dtype": the
                         dtype of compute, as torch up to 2.14. Read by `fully_shard`
FULLSHARD_CHECK          1: check every command against the lifecycle's invariants (slower)

Methods of `FSDPModule` set all other options; `use_options` is for tests and measurements.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

# ---- options ---------------------------------------------------------------------------------------------------------

COMMUNICATION = ("auto", "torch", "all-to-all", "one-level", "two-levels")
WATCH = ("auto", "always")
REDUCE_DEFAULTS = ("grad_dtype", "param_dtype")
# The variables that fullshard reads: the four above, the guard's two, and those by which processes of the trainer meet.
VARIABLES = ("COMMUNICATION", "WATCH", "REDUCE_DTYPE", "CHECK", "GUARD", "SILENCE")
LAUNCHED = ("STORE_PATH", "LAUNCHER_PID", "RUN_DIR")


@dataclass(frozen=True)
class Options:
    """The resolved options of one root. Raises `ValueError` for an invalid field."""

    # The number of units that a forward prefetches along the recorded order, unless a byte limit is set.
    prefetch_depth: int = 1
    # The number of reductions that may be in flight before the oldest is waited for.
    reductions_in_flight: int = 2
    communication: str = "auto"
    watch: str = "auto"
    reduce_default: str = "grad_dtype"
    check: bool = False

    def __post_init__(self) -> None:
        _expect_count("prefetch_depth", self.prefetch_depth, 0)
        _expect_count("reductions_in_flight", self.reductions_in_flight, 1)
        _expect_choice("communication", self.communication, COMMUNICATION)
        _expect_choice("watch", self.watch, WATCH)
        _expect_choice("reduce_default", self.reduce_default, REDUCE_DEFAULTS)
        if not isinstance(self.check, bool):
            raise ValueError(f"check: expected True or False, found {self.check!r}")

    def send_buffers_on(self, device: str) -> int | None:
        """The limit on send buffers on a device of this type; None: only `reductions_in_flight` limits.

        One on a device, as in FSDP2: streams wait, and memory is scarce. On a CPU a wait blocks the host, so the next
        message is sent before the wait for the oldest.
        """
        return None if device == "cpu" else 1

    @classmethod
    def current(cls, environ: Mapping[str, str] | None = None) -> Options:
        """The options from the environment variables above, overridden by open `use_options`.

        Raises `ValueError` that names the variable, its value and the allowed values; also for a variable that begins
        with FULLSHARD_ and is none of fullshard's.
        """
        source = os.environ if environ is None else environ
        _expect_known(source)
        found = cls(
            communication=_choice(source, "FULLSHARD_COMMUNICATION", COMMUNICATION),
            watch=_choice(source, "FULLSHARD_WATCH", WATCH),
            reduce_default=_choice(source, "FULLSHARD_REDUCE_DTYPE", REDUCE_DEFAULTS),
            check=_flag(source, "FULLSHARD_CHECK"),
        )
        for changes in _open:
            found = replace(found, **changes)
        return found


# Shared by all threads, outermost first: the ranks of a test may be threads.
_open: list[dict[str, Any]] = []


@contextmanager
def use_options(**changes: Any) -> Iterator[None]:
    """Models that are sharded and first run inside get these fields of `Options`, overriding the environment.

    Applies to all threads of the process; the innermost wins. Raises `TypeError` for an unknown field and `ValueError`
    for a wrong value.
    """
    replace(Options(), **changes)
    _open.append(changes)
    try:
        yield
    finally:
        # By identity: another thread may have opened an equal one.
        del _open[next(i for i, each in enumerate(_open) if each is changes)]


def _choice(source: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = source.get(name) or choices[0]
    _expect_choice(name, value, choices)
    return value


def _expect_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, found {value!r}")


def _expect_known(source: Mapping[str, str]) -> None:
    """A misspelt variable would be without effect and without a word."""
    known = {f"FULLSHARD_{name}" for name in (*VARIABLES, *LAUNCHED)}
    for name, value in source.items():
        if name.startswith("FULLSHARD_") and value and name not in known:
            listed = ", ".join(f"FULLSHARD_{one}" for one in VARIABLES)
            raise ValueError(
                f"{name}: expected one of fullshard's variables, {listed}, found this one, which is none of them; "
                f"correct its name, or unset it"
            )


def _expect_count(name: str, value: object, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name}: expected a whole number >= {at_least}, found {value!r}")


def _flag(source: Mapping[str, str], name: str) -> bool:
    text = source.get(name, "").strip() or "0"
    if not text.isdecimal():
        raise ValueError(f"{name}: expected a whole number >= 0, found {text!r}")
    return int(text) > 0


# ---- reduction -------------------------------------------------------------------------------------------------------
# The user's settings for the reduction of a unit's gradients (methods of `FSDPModule`), as one frozen value.


class CustomComm(Protocol):
    """A user-defined all-gather or reduce-scatter, with the interface of torch's `AllGather` and `ReduceScatter`.

    `__call__(output_tensor=, input_tensor=, group=, async_op=)`, for a reduce-scatter also `op=`, returns a work, or
    None if finished. `allocate(size, dtype=, device=)` allocates the buffers of both.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class Controls:
    """The reduction settings of one unit."""

    # The strategy, one of `COMMUNICATION`; None: the root's option.
    communication: str | None = None
    # The divisor of gradient sums; None: the number of contributing ranks.
    divide_factor: float | None = None
    # Whether to ask backends only for sums, never for averages.
    sum_only: bool = False
    # Is called with the reduced flat gradient shards before the last division; in `hook_stream` if set.
    hook: Callable[[Tensor], object] | None = None
    hook_stream: Any = None
    gather: CustomComm | None = None
    reduce_scatter: CustomComm | None = None
    # Whether to reduce zeros for parameters without a gradient.
    zero_unused: bool = False
    # The limit on send buffers including this unit's; None: the root's option.
    send_buffers: int | None = None

    @property
    def text(self) -> str:
        """The settings that must be equal on all ranks, as text."""
        set_ = ["none" if each is None else type(each).__name__ for each in (self.gather, self.reduce_scatter)]
        return (
            f"communication={self.communication}, divide factor={self.divide_factor}, sums alone={self.sum_only}, "
            f"all-reduce hook={'none' if self.hook is None else 'set'}, custom all-gather={set_[0]}, "
            f"custom reduce-scatter={set_[1]}, unused parameters reduced={self.zero_unused}"
        )

    def strategy(self, default: str) -> str:
        """The communication strategy; a custom reduce-scatter requires "torch"."""
        return "torch" if self.reduce_scatter is not None else self.communication or default


class Scale(NamedTuple):
    """Where a sum of gradients is divided. The product of both numbers is the divide factor."""

    # The divisor within the shard axis: of every contribution, or of the partial sum.
    before: float
    # The divisor of the complete sum, after the hook.
    after: float
    # Whether backends that support it average over their ranks instead of dividing by `before`.
    averages: bool
    # The sum could overflow, so divide every contribution in a reduction by the backend.
    overflows: bool


# torch leaves the division to the backend in these dtypes; in others it divides in two steps, to avoid overflow.
_WIDE = (torch.float32, torch.bfloat16)


def resolve_scale(reduce_dtype: torch.dtype, ranks: int, factor: float | None, *, sum_only: bool) -> Scale:
    """The scale of a reduction in `reduce_dtype` over `ranks` ranks in total. Hooks see the same values as in FSDP2.

    >>> resolve_scale(torch.float32, 8, None, sum_only=False)
    Scale(before=8.0, after=1.0, averages=True, overflows=False)
    >>> resolve_scale(torch.float16, 8, None, sum_only=False)
    Scale(before=4.0, after=2.0, averages=False, overflows=True)
    """
    divisor = float(ranks) if factor is None else float(factor)
    if reduce_dtype not in _WIDE:
        # Divide by about its square root first, a power of two, which costs no precision; by the rest afterwards.
        before = 1.0
        while divisor % before == 0 and divisor / before > before:
            before *= 2
        return Scale(before, divisor / before, averages=False, overflows=True)
    if sum_only:
        return Scale(1.0, divisor, averages=False, overflows=False)
    return Scale(divisor, 1.0, averages=factor is None, overflows=False)


# ---- mesh dims -------------------------------------------------------------------------------------------------------
# The data-parallel axes of a mesh that has other axes too.


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Names of the data-parallel axes of a full mesh; names and meaning are those of torch's class.

    shard: axes over which parameters are sharded; several axes are flattened to one, in their order.
    replicate: axes over which shards are replicated; several axes are flattened to one, in their order.

    Raises `ValueError` when neither is given.

    >>> DataParallelMeshDims(shard=("dp", "cp")).shard_names
    ('dp', 'cp')
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError(
                "DataParallelMeshDims: expected the name of at least one data-parallel axis, found neither shard nor "
                "replicate; name the axes of the mesh to shard over, as in DataParallelMeshDims(shard='dp')"
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The names in `shard`, none, one or several."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The names in `replicate`, none, one or several."""
        return _names(self.replicate)


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
