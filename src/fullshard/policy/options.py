"""Options of the engine, and policies in the arguments of `fully_shard` (below).

Options that are not arguments of `fully_shard` are read once, when a root first runs:

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

import fnmatch
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .._torch import TorchCPUOffloadPolicy, TorchMixedPrecisionPolicy, TorchOffloadPolicy, grad_dtype_of
from .arguments import expect_known_fields

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
        for changes in tuple(_open):  # another thread may leave its own
            found = replace(found, **changes)
        return found


# Shared by all threads, outermost first: the ranks of a test may be threads.
_open: list[dict[str, Any]] = []
_LEAVING = threading.Lock()


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
        # By identity: another thread may have opened an equal one. And at once, though another one leaves its own.
        with _LEAVING:
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


# ---- policies --------------------------------------------------------------------------------------------------------

# ---- precision -------------------------------------------------------------------------------------------------------
# Dtypes of parameters that travel together: what the policy and the parameters ask for, and the resulting dtypes.
#
# storage   the dtype of the original parameter; sharded parameters and optimizer state have it
# compute   the dtype of the gathered full parameters and of the gradients autograd makes
# reduce    the dtype in which gradients are held between micro-batches
# wire      the communication dtype of gradients: the narrower of compute and reduce, because widening before the
#           message adds bytes and no information; reduce, once gradients were accumulated, and if the parameter's own
#           `grad_dtype` is wider than compute, because then autograd's gradients may be
# sum       the dtype in which messages are added: reduce, but at least float32, so that a sum rounds once
# gradient  the dtype of the reduced gradient shards: storage, or the parameter's own `grad_dtype`


# Which inputs of a forward are cast.
CastInputs = bool | Sequence[str] | Callable[[str, Tensor], bool]


@dataclass(frozen=True)
class MixedPrecisionPolicy(TorchMixedPrecisionPolicy):
    """Dtypes of one `fully_shard` call; names and meaning are those of torch 2.15's class, on every torch.

    param_dtype: dtype of the full parameters in forward and backward; None keeps the original one.
    reduce_dtype: dtype in which gradients are reduced, and held while they are not. None follows the parameter's
        `grad_dtype`, set before the first forward: that of the parameter unless it was set (float32 for float32
        parameters under bfloat16 compute), and that of the gradients if it was set to None. Several in a unit: the
        promoted dtype. Up to torch 2.14 None followed `param_dtype`, and so it does with
        `FULLSHARD_REDUCE_DTYPE=param_dtype`.
    output_dtype: floating-point outputs of the unit's forward are cast to it; None leaves them.
    cast_forward_inputs: which floating-point inputs of the unit's forward are cast to `param_dtype`: all (True), none
        (False), those of arguments with these names, or those for which a function of (name of the argument, tensor)
        returns True. In names * stands for anything; if all begin with "!", everything but these is cast. What is
        inside of a container has the name of the argument; `*args` are "args". A function must return the same on
        every rank.
    param_dtype_override_fn: called once with each parameter, a tied one once, when the unit is made. Returns that
        parameter's own `param_dtype`: its original dtype, or `param_dtype` or None for the policy's; anything else is a
        `ValueError`. Must return the same on every rank. Inputs are cast to the policy's `param_dtype` nevertheless.

    >>> policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    >>> keeps_norms = MixedPrecisionPolicy(
    ...     param_dtype=torch.bfloat16, param_dtype_override_fn=lambda p: torch.float32 if p.ndim == 1 else None
    ... )
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: CastInputs = True  # type: ignore[assignment]
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)


class MixedPrecisionLike(Protocol):
    """A policy of fullshard or torch, so that programs with mixed imports work. Those of torch up to 2.14 have no
    `param_dtype_override_fn`."""

    @property
    def param_dtype(self) -> torch.dtype | None: ...
    @property
    def reduce_dtype(self) -> torch.dtype | None: ...
    @property
    def output_dtype(self) -> torch.dtype | None: ...
    @property
    def cast_forward_inputs(self) -> CastInputs: ...


# The `grad_dtype` of a parameter: a dtype, or one of "unset" (that of the parameter) and "any" (set to None).
GradDtype = torch.dtype | Literal["unset", "any"]


class Wanted(NamedTuple):
    """The dtypes that the policy and the parameters themselves ask for, whatever the storage dtype becomes. Parameters
    that ask for the same form a group."""

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    grad_dtype: GradDtype = "unset"
    # The dtype that `reduce` None follows: one of `REDUCE_DEFAULTS`.
    follows: str = REDUCE_DEFAULTS[0]
    # The `grad_dtype` of the other parameters of the unit, which are reduced in one dtype.
    beside: tuple[GradDtype, ...] = ()


class Precision(NamedTuple):
    """The dtypes that a policy gives parameters of one storage dtype."""

    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    wire: torch.dtype
    sum: torch.dtype
    gradient: torch.dtype
    wanted: Wanted = Wanted()

    @property
    def accepts(self) -> torch.dtype | None:
        """The dtype to which autograd casts the gradients of full parameters; None: it leaves them."""
        if self.wanted.grad_dtype == "any" and self.wanted.reduce is None:
            return None
        return self.wire if self.wanted.grad_dtype != "unset" else self.compute

    def stored_in(self, storage: torch.dtype) -> Precision:
        """The dtypes after the parameters changed theirs to `storage`."""
        return resolve_precision(self.wanted, storage)


def wanted_of(policy: MixedPrecisionLike, parameter: nn.Parameter, name: str, follows: str) -> Wanted:
    """Returns the dtypes that `policy` asks for `parameter`. Calls its `param_dtype_override_fn`; `ValueError` for a
    result that torch refuses too."""
    compute = policy.param_dtype
    override = getattr(policy, "param_dtype_override_fn", None)
    if override is not None:
        answer = override(parameter)
        if answer is not None and not (isinstance(answer, torch.dtype) and answer in (compute, parameter.dtype)):
            raise ValueError(
                f"{name}: expected param_dtype_override_fn to return None, param_dtype ({compute}) or the parameter's "
                f"own dtype ({parameter.dtype}), found {answer!r}; return one of them"
            )
        # Without `param_dtype` both answers mean the parameter's own dtype: one group.
        compute = compute if answer is None or compute is None else answer
    return Wanted(compute, policy.reduce_dtype, grad_dtype_of(parameter), follows)


def resolve_precision(wanted: Wanted, storage: torch.dtype) -> Precision:
    """The dtypes of parameters stored in `storage` that ask for `wanted`.

    >>> resolve_precision(Wanted(torch.bfloat16), torch.float32).reduce
    torch.float32
    >>> resolve_precision(Wanted(torch.bfloat16), torch.float32).wire
    torch.bfloat16
    """
    if not storage.is_floating_point:
        # Integers and booleans have no gradient, and rounding them to a float dtype would change them.
        return Precision(storage, storage, storage, storage, storage, storage, wanted)
    compute = wanted.compute or storage
    unset = compute if wanted.follows == "param_dtype" else storage
    held = {"unset": unset, "any": compute}
    reduce = wanted.reduce
    if reduce is None:
        each = [one if isinstance(one, torch.dtype) else held[one] for one in (wanted.grad_dtype, *wanted.beside)]
        reduce = functools.reduce(torch.promote_types, each)
    wire = compute if compute.itemsize < reduce.itemsize else reduce
    gradient = storage
    if wanted.grad_dtype == "any":
        gradient = reduce
    elif isinstance(wanted.grad_dtype, torch.dtype):
        gradient = wanted.grad_dtype
    accumulated = wanted.reduce or gradient
    if wanted.grad_dtype != "unset" and accumulated.itemsize > compute.itemsize:
        wire = reduce
    return Precision(storage, compute, reduce, wire, sum_dtype(reduce), gradient, wanted)


def sum_dtype(reduce: torch.dtype) -> torch.dtype:
    """The dtype in which messages are summed for a reduction in `reduce`."""
    return torch.float32 if reduce.itemsize < 4 else reduce


# ---- offload ---------------------------------------------------------------------------------------------------------
# The device of shards between uses: that of the mesh, or the host.


@dataclass
class OffloadPolicy(TorchOffloadPolicy):
    """No offload: shards, gradients and optimizer state stay on the device of the mesh."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy, TorchCPUOffloadPolicy):
    """Shards, gradients and optimizer state on the host; full parameters on the device of the mesh while they are used.

    Each unit takes one copy to the device before its all-gather, and one copy back for its reduced gradients. Has no
    effect on a CPU mesh. `pin_memory`: page-locked host memory, required for asynchronous copies; other processes
    cannot use that memory.
    """

    pin_memory: bool = True


class Offload(NamedTuple):
    """The effect of an offload policy on one device type."""

    to_host: bool = False
    pin: bool = False


def resolve_offload(policy: Any, device_type: str) -> Offload:
    """Resolve `policy`, of fullshard or torch, for compute on `device_type`.

    >>> resolve_offload(CPUOffloadPolicy(), "cuda"), resolve_offload(CPUOffloadPolicy(), "cpu").to_host
    (Offload(to_host=True, pin=True), False)

    Raises `TypeError` for anything but an offload policy, for a kind of it that is not known, and for a field that is
    not known, unless it has its default.
    """
    names = {kind.__name__ for kind in type(policy).__mro__}
    if "OffloadPolicy" not in names:
        raise TypeError(f"offload_policy: expected an OffloadPolicy, found {policy!r}; leave it out for none")
    to_host = "CPUOffloadPolicy" in names
    if not to_host and type(policy).__name__ != "OffloadPolicy":
        raise TypeError(
            f"offload_policy: expected an OffloadPolicy or a CPUOffloadPolicy, found {policy!r}, another kind of "
            f"offload, which would be ignored; use one of the two"
        )
    expect_known_fields("offload_policy", policy, ("pin_memory",) if to_host else ())
    if not to_host or device_type == "cpu":
        return Offload()
    return Offload(to_host=True, pin=bool(policy.pin_memory))


# ---- casts of inputs -------------------------------------------------------------------------------------------------
# Which inputs of a forward are cast: by the names of its arguments, or by a function.

# Of (name of the argument, tensor); None: all are cast.
Chosen = Callable[[str, Tensor], bool]


@functools.cache
def by_names(names: tuple[str, ...]) -> Chosen:
    """A function that accepts arguments with these names.

    >>> accepts, excepts = by_names(("x", "pos_*")), by_names(("!freqs",))
    >>> [accepts(name, None) for name in ("x", "y", "pos_ids")], [excepts(name, None) for name in ("x", "freqs")]
    ([True, False, True], [True, False])
    """
    excepted = all(name.startswith("!") for name in names)
    return lambda name, tensor: any(matches_name(pattern, name) for pattern in names) is not excepted


def matches_name(pattern: str, name: str) -> bool:
    """Whether `pattern`, with or without "!", is about the argument `name`; "**" for a name: any may come."""
    return name == "**" or fnmatch.fnmatchcase(name, pattern.removeprefix("!"))


def keyword_names(call: Callable[..., Any]) -> list[str]:
    """The names of all arguments of `call`; "**" where any name may come."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return ["**"]
    return ["**" if parameter.kind is parameter.VAR_KEYWORD else parameter.name for parameter in parameters]


def check_known_names(argument: str, units: Iterable[tuple[Any, Sequence[nn.Module]]]) -> None:
    """Raise `ValueError` for a name that no unit with it has. `units`: of each the option, and its modules. A name is
    that of an argument of `forward`, or of another method of the module's own class, which may be registered later."""
    holders: dict[str, list[nn.Module]] = {}
    for option, modules in units:
        for name in () if isinstance(option, bool) or callable(option) else option:
            holders.setdefault(name, []).extend(modules)
    for name, modules in holders.items():
        known = {known for module in modules for known in keyword_names(module.forward)}
        if any(matches_name(name, one) for one in known):
            continue
        own = {known for module in modules for method in _own_methods(module) for known in keyword_names(method)}
        if not any(matches_name(name, one) for one in own - {"**"}):
            raise ValueError(
                f"{argument}: expected names of arguments of forwards of units, found {name!r}, which none has; they "
                f"have {', '.join(sorted(known)[:12])}"
            )


def _own_methods(module: nn.Module) -> list[Callable[..., Any]]:
    classes = [cls for cls in type(module).__mro__ if not issubclass(nn.Module, cls)]
    return [found for cls in classes for found in vars(cls).values() if inspect.isfunction(found)]


def chosen(option: Any) -> Chosen | None:
    """Returns what `cast_forward_inputs` chooses, if it is not False; None for True."""
    if callable(option):
        accepts: Chosen = option
        return accepts
    return None if option is True else by_names(tuple(option))


def check_cast_inputs(argument: str, option: Any) -> None:
    """Raise `TypeError` for what is none of the forms, `ValueError` for names that mean nothing."""
    if isinstance(option, bool) or callable(option):
        return
    if isinstance(option, str) or not isinstance(option, Sequence) or not all(isinstance(n, str) for n in option):
        raise TypeError(
            f"{argument}: expected True, False, names of arguments, or a function of (name, tensor), found "
            f"{option!r:.200}; pass ['hidden_states'], for example"
        )
    excepted = {name.startswith("!") for name in option}
    if len(excepted) != 1 or not all(name.removeprefix("!") for name in option):
        raise ValueError(
            f"{argument}: expected names, all of them with ! or none, found {list(option)!r:.200}; False casts nothing"
        )


def shown_cast_inputs(option: Any) -> str:
    """`option` in words that are the same on all ranks."""
    if isinstance(option, bool):
        return str(option)
    if callable(option):
        return f"function {getattr(option, '__module__', '?')}.{getattr(option, '__qualname__', type(option).__name__)}"
    return ", ".join(option)


def argument_names(call: Callable[..., Any], count: int) -> list[str]:
    """The names of the first `count` positional arguments of `call`; of `*args` the name `args`, and so on."""
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        return [str(position) for position in range(count)]
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            return (names + [parameter.name] * count)[:count]
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return (names + [str(position) for position in range(len(names), count)])[:count]
