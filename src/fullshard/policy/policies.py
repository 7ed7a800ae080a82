"""Policies in the arguments of `fully_shard`: dtypes of a unit, which inputs are cast, and the device of its shards."""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .._torch import TorchCPUOffloadPolicy, TorchMixedPrecisionPolicy, TorchOffloadPolicy, grad_dtype_of
from .arguments import expect_known_fields
from .options import REDUCE_DEFAULTS

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
