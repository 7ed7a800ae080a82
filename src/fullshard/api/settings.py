"""Methods of `FSDPModule` that set how a unit reduces gradients, and memory limits."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from ..comm import GroupMemory, ShardGroup
from ..engine import Unit, unit_of
from ..engine.names import clean_name
from ..engine.root import formed
from ..engine.unit import module_units
from ..layout import Candidate, choose_resident
from ..policy import CustomComm
from ..policy.arguments import expect_callable, expect_flag, expect_number, expect_text
from ..policy.options import COMMUNICATION

# ---- reductions ------------------------------------------------------------------------------------------------------
# How gradients are reduced. `module.py` makes each function a method of `FSDPModule`.
#
# They take effect in the next backward; call them between steps. Those without `recurse` act on this module only, as in
# torch.


def set_requires_all_reduce(self: object, requires_all_reduce: bool, *, recurse: bool = True) -> None:
    """False: the following backwards reduce-scatter gradients, but do not all-reduce them over the replicas (HSDP).

    Each rank keeps the partial sum of its shards in the reduce dtype (the bytes of its shards in that dtype). The first
    backward with True adds its own and all-reduces once. Until then `.grad` is a marker: `zero_grad()` clears it, any
    other use raises. Has no effect without a replicate axis.
    """
    expect_flag("requires_all_reduce", requires_all_reduce)
    for unit in _units(self, recurse):
        unit.settings.all_reduces = bool(requires_all_reduce)


def set_gradient_divide_factor(self: object, factor: float) -> None:
    """Divide sums of gradients by `factor` instead of the number of ranks. On any backend.

    Raises `ValueError` for anything but a finite number above 0; None restores the default.
    """
    if factor is not None:
        expect_number("factor", factor, lambda f: 0 < f < math.inf, "a finite number above 0 (1.0 leaves the sum)")
    _set(self, divide_factor=factor)


def set_reduce_scatter_divide_factor(self: object, factor: float) -> None:
    """The former name of `set_gradient_divide_factor`."""
    warnings.warn("Use `set_gradient_divide_factor` instead", DeprecationWarning, stacklevel=2)
    set_gradient_divide_factor(self, factor)


def set_force_sum_reduction_for_comms(self: object, enable: bool) -> None:
    """True: let backends only sum, and divide after the last sum and after the hook.

    With `communication="auto"` backends only sum anyway; then it moves the division after the hook.
    """
    expect_flag("enable", enable)
    _set(self, sum_only=bool(enable))


def set_all_reduce_hook(self: object, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
    """Call `hook(gradients)` with this rank's reduced gradients, which it may change in place, in every backward.

    gradients: all shards of the unit's trainable parameters in one flat tensor, each padded to the same number of rows
    on every rank and aligned to 16 bytes; reduce dtype. They are summed over all ranks of the mesh, replicas included,
    and divided, except where `float16` or `set_force_sum_reduction_for_comms` divides at the end. The hook may use this
    view during the call only. Partial sums (`set_requires_all_reduce`) do not call it. None removes it.

    stream: the device stream that runs the hook; only without a replicate axis.
    Raises `ValueError` for a unit of several groups, and for a stream with a replicate axis or on a CPU.
    """
    expect_callable("hook", hook, "a function of a tensor", or_none=True)
    unit = _one_group(self, "set_all_reduce_hook")
    if stream is not None and unit.is_replicated:
        raise ValueError(
            "stream: expected None on a mesh that replicates, found a stream; the hook runs after the all-reduce"
        )
    if stream is not None and unit.device.type == "cpu":
        raise ValueError("stream: expected None on a CPU, which has no streams, found a stream; leave it out")
    _set(self, hook=hook, hook_stream=stream)


def set_custom_all_gather(self: object, comm: CustomComm) -> None:
    """All-gather this module's parameters by `comm(output_tensor, input_tensor, group, async_op)`, in one message.

    Both tensors are views of one buffer, which `comm.allocate` makes for each all-gather. `group` is the process group
    of the mesh, as torch knows it: if a rank fails, what was sent over it ends with the time limit of that group. None
    removes it.
    Raises `ValueError` for a unit of several groups, `TypeError` for an object that is not callable or lacks
    `allocate`.
    """
    _one_group(self, "set_custom_all_gather")
    _set(self, gather=_checked(comm))


def set_custom_reduce_scatter(self: object, comm: CustomComm) -> None:
    """Reduce-scatter this module's gradients by `comm`, in one message, in the reduce dtype.

    `comm(output_tensor, input_tensor, group, op, async_op)`; `comm.allocate` makes both tensors for each reduction. The
    output becomes the gradients if the reduce dtype is that of the parameters. None removes it.
    Raises as `set_custom_all_gather`.
    """
    _one_group(self, "set_custom_reduce_scatter")
    _set(self, reduce_scatter=_checked(comm))


def set_allocate_memory_from_process_group_for_comm(self: object, enable: bool) -> None:
    """True: allocate this module's message buffers by the backend of its process group.

    NCCL registers that memory and avoids internal copies (SHARP, user buffers); for a backend that cannot allocate,
    such as gloo, torch allocates, as in torch. Parameters then use one all-gather with copy-out, and gradients one
    reduce-scatter, as with `set_communication("torch")`. False reverts it.
    Raises `AssertionError` (torch's type) with a custom all-gather or reduce-scatter, which allocates its own memory.
    """
    expect_flag("enable", enable)
    unit = _unit(self)
    custom = [c for c in (unit.settings.controls.gather, unit.settings.controls.reduce_scatter) if c is not None]
    others = [type(comm).__name__ for comm in custom if not isinstance(comm, GroupMemory)]
    if others:
        raise AssertionError(
            f"set_allocate_memory_from_process_group_for_comm: expected no custom messages, found {others[0]}, which "
            f"allocates its own; take it back with None first"
        )
    if not enable:
        _set(self, gather=None, reduce_scatter=None)
        return
    groups = [group for links in unit.links for group in (links.shard, links.replicate) if group is not None]
    group = next((group for group in groups if group.world > 1), None)
    if group is not None:
        memory = GroupMemory(group)
        _set(self, gather=memory, reduce_scatter=memory)


def set_communication(self: object, strategy: str, *, recurse: bool = True) -> None:
    """Select the communication strategy; not in torch.

    `"auto"`: the fastest measured for the backend. On gloo within one node, gradients use an all-to-all and are summed
    on arrival; over nodes with equally many ranks, messages travel in one level or in two, whichever is faster at the
    rates that are measured when the root forms, with the same bits; on NCCL, and otherwise across nodes, the backend
    reduces them. `"torch"`: one all-gather and one reduce-scatter per unit and parameter dtype, and one all-reduce over
    replicas, in the reduce dtype: for programs that count collectives. `"all-to-all"`: `"auto"`, with the all-to-all
    within a node on every backend; collective.
    `"one-level"`, `"two-levels"`: `"auto"`, in this way, without measuring.
    The default is set by the environment (`FULLSHARD_COMMUNICATION`). Raises `ValueError` for another strategy, and for
    `"all-to-all"` between nodes: here, or in the first forward if none has run.
    """
    expect_text("strategy", strategy, f"one of {', '.join(COMMUNICATION)}")
    if strategy not in COMMUNICATION:
        raise ValueError(f"strategy: expected one of {', '.join(COMMUNICATION)}, found {strategy!r}")
    for unit in _units(self, recurse):
        unit.control(dataclasses.replace(unit.settings.controls, communication=strategy))


def set_reduce_scatter_unused_params(self: object, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
    """True: parameters without a gradient on any rank get a zero gradient, and each backward reduces every unit.

    The parameters of a unit that have gradients may differ between ranks in either case. Only with True may a rank have
    no gradient in a unit where others have some; the unit must then be the last of its backward.
    """
    expect_flag("reduce_scatter_unused_params", reduce_scatter_unused_params)
    for unit in _units(self, recurse):
        unit.control(dataclasses.replace(unit.settings.controls, zero_unused=bool(reduce_scatter_unused_params)))


def set_reduce_scatter_max_input_buffers(self: object, max_input_buffers: int, *, recurse: bool = True) -> None:
    """Limit the send buffers of reductions that exist at once; a new one first waits for the oldest.

    Default: two in flight (one on a device) beside the one being filled. Raises `TypeError` for anything but an int and
    `ValueError` below 1.
    """
    if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
        raise TypeError(f"max_input_buffers: expected an int, found {max_input_buffers!r}; 1 keeps a single buffer")
    if max_input_buffers < 1:
        raise ValueError(f"max_input_buffers: expected at least 1, found {max_input_buffers}; 1 keeps a single buffer")
    for unit in _units(self, recurse):
        unit.control(dataclasses.replace(unit.settings.controls, send_buffers=max_input_buffers))


def set_separate_reduce_scatter_group(self: object, enable: bool = True, *, recurse: bool = True) -> None:
    """True: reduce over a separate communicator, so that all-gathers and reductions need not wait for each other.

    Collective over the shard ranks. One communicator per set of such ranks. False: use the mesh's again.
    """
    expect_flag("enable", enable)
    units = _units(self, recurse)
    made: dict[tuple[int, ...], ShardGroup] = {}
    for unit in units:
        for links in unit.links:
            if links.reduce is not None:
                made.setdefault(links.shard.ranks, links.reduce)
    for unit in units:
        apart = []
        for links in unit.links:
            reduce = None
            if enable and links.shard.world > 1:
                ranks = links.shard.ranks
                if ranks not in made:
                    made[ranks] = links.shard.apart()
                reduce = made[ranks]
            apart.append(links._replace(reduce=reduce))
        unit.link(apart)


def set_keep_unsharded_storage(self: object, keep: bool, *, recurse: bool = True) -> None:
    """True: keep the bytes of full parameters between uses, so that each stays at one address (CUDA graphs).

    From the next gather on they take the bytes of the unsharded unit in the compute dtype, until False. Values are
    gathered as before: between uses the bytes hold old ones. A conversion of the module (`to`, `to_empty`) makes other
    storages. Set it alike on all ranks.
    """
    keep = expect_flag("keep", keep)
    for unit in _units(self, recurse):
        unit.keep_storage(keep)


# ---- shared by the methods ------------------------------------------------------------------------------------


def _units(module: object, recurse: bool) -> list[Unit]:
    return module_units(cast(nn.Module, module)) if expect_flag("recurse", recurse) else [_unit(module)]


def _unit(module: object) -> Unit:
    unit = unit_of(cast(nn.Module, module))
    assert unit is not None  # only sharded modules have these methods
    return unit


def _set(module: object, **settings: Any) -> None:
    unit = _unit(module)
    unit.control(dataclasses.replace(unit.settings.controls, **settings))


def _one_group(module: object, what: str) -> Unit:
    unit = _unit(module)
    if len(unit.groups) > 1:
        raise ValueError(
            f"{what}: expected parameters of one mesh and one dtype, found {len(unit.groups)} groups in "
            f"{unit.record.name}, each with messages of its own; shard them in modules of their own"
        )
    return unit


def _checked(comm: Any) -> CustomComm | None:
    if comm is not None and not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise TypeError(
            f"comm: expected a callable with a method allocate(size, dtype=, device=), found {type(comm).__name__}"
        )
    return cast("CustomComm | None", comm)


# ---- memory ----------------------------------------------------------------------------------------------------------
# Memory limits. `module.py` makes each function a method of `FSDPModule`.
#
# None of them is in torch. They change when messages are sent and what stays in memory, never a result.


class MemoryBudget(NamedTuple):
    """The limits in force after `set_memory_budget`: bytes, None for the default, and the names of resident units."""

    prefetch: int | None
    gradients: int | None
    resident: tuple[str, ...]


def set_memory_budget(
    self: object,
    *,
    prefetch: int | None | EllipsisType = ...,
    gradients: int | None | EllipsisType = ...,
    resident: int | None | EllipsisType = ...,
) -> MemoryBudget:
    """Limit the bytes of prefetched parameters and unreduced gradients, and grant bytes for units that stay full.

    Each argument is a number of bytes, or None for the default; an omitted one keeps its value. The budgets are
    separate, and none changes a result. Call it alike on every rank, between steps. `prefetch` and `gradients` are set
    on the root and hold for all units below; `resident` is set per module.

    prefetch: prefetch units that fit, in the recorded order in forward and in reverse in backward. Counts arriving full
        parameters, in the compute dtype and padded, and their messages. A unit that does not fit is all-gathered when
        needed, and none after it goes first. 0: no prefetch. None: one unit. The lists given to
        `set_modules_to_forward_prefetch` and `set_modules_to_backward_prefetch` are followed whatever their bytes.
    gradients: limit on unreduced gradients and both buffers of their messages, kept by waiting for the oldest messages:
        per large gradient where these are sent separately (NCCL), else per unit. The gradients of the computing unit,
        and then their messages, always exist; 0 waits for every message at once. None: no limit in bytes. The number
        of reductions in flight is limited in any case. Gradients accumulated by `set_requires_gradient_sync(False)` and
        messages between replicas do not count.
    resident: keep as many units full between forward and backward as fit (compute dtype, padded), beside those that
        are never resharded after forward. A unit without trainable parameters stays full across steps until it is
        written. 0 or None: none; frees resident units. The choice is made in this call, frozen units first, then the
        last ones: call it again after freezing others. Units with an all-gather extension are never kept.

    A write is an in-place change of a parameter or its local tensor, an optimizer step, or a load. As in torch, writes
    through `.data` and torch's list operations on parameters are not detected; call `reshard()` after these.

    Returns the limits in force; names are relative to this module. Raises `ValueError` for anything but a number of
    bytes, and `RuntimeError` for `prefetch` or `gradients` below a root; then nothing has changed.
    """
    unit = _sharded_unit(self)
    given = {"prefetch": prefetch, "gradients": gradients, "resident": resident}
    for name, value in given.items():
        if value is not ... and value is not None:
            _check(name, value, _BUDGETS[name])
    limits = [name for name in ("prefetch", "gradients") if given[name] is not ...]
    if limits:
        _expect_root(unit, limits)
    if not isinstance(prefetch, EllipsisType):
        unit.settings.prefetch_nbytes = prefetch
    if not isinstance(gradients, EllipsisType):
        unit.settings.gradient_nbytes = gradients
    root = formed(unit)
    if limits and root is not None:
        root.limit_bytes()
    names = _unit_names(cast(nn.Module, self))
    if not isinstance(resident, EllipsisType):
        _keep(names, unit, resident or 0)
    outer = unit if unit.root is None else unit.root.units[0]
    kept = tuple(name for each, name in names.items() if each.record.plan.resident)
    return MemoryBudget(outer.settings.prefetch_nbytes, outer.settings.gradient_nbytes, kept)


# What 0 and None mean, for errors.
_BUDGETS = {
    "prefetch": "0 gathers each unit when it is needed, None is the default",
    "gradients": "0 waits for every message at once, None is the default",
    "resident": "0 or None keeps no unit",
}


def _keep(names: dict[Unit, str], outer: Unit, nbytes: int) -> None:
    """Choose the units that stay full within `nbytes`, and reshard those no longer chosen."""
    units = [unit for unit in names if _is_freed(unit, outer)]
    candidates = [Candidate(names[unit], unit.full_nbytes or 0, _is_frozen(unit)) for unit in units]
    chosen = set(choose_resident(candidates, nbytes))
    for i, unit in enumerate(units):
        was, unit.record.plan.resident = unit.record.plan.resident, i in chosen
        if was and i not in chosen and unit.root is not None:
            unit.root.reshard(unit)


def _unit_names(module: nn.Module) -> dict[Unit, str]:
    """The units of `module` in definition order, with their names; a unit of several modules joins them by "+"."""
    names: dict[Unit, str] = {}
    for name, child in module.named_modules():
        unit = unit_of(child)
        if unit is not None:
            name = clean_name(name)
            names[unit] = f"{names[unit]}+{name}" if unit in names else name
    return names


def _is_freed(unit: Unit, outer: Unit) -> bool:
    """Whether the unit is resharded after forward unless it is kept; `outer` may still turn out to be the root."""
    if (
        unit is outer
        and unit.settings.reshard_after_forward is None
        and (unit.root is None or unit.root.units[0] is unit)
    ):
        return False
    return unit.record.plan.reshard_after_forward


def _is_frozen(unit: Unit) -> bool:
    return not any(param.sharded.requires_grad for param in unit.params)


def _expect_root(unit: Unit, budgets: Sequence[str]) -> None:
    """Raise if `unit` is known not to be a root's unit; before the first forward this may be unknown."""
    root = unit.root
    if root is not None and not root.provisional and root.units[0] is not unit:
        raise RuntimeError(
            f"set_memory_budget({', '.join(budgets)}): expected the root module, found {unit.record.name} below it; "
            f"call it on the root"
        )


def _sharded_unit(module: object) -> Unit:
    unit = unit_of(cast(nn.Module, module))
    if unit is None:
        raise RuntimeError(
            f"expected a module that fully_shard was applied to, found an unsharded {type(module).__name__}; "
            f"apply fully_shard to it"
        )
    return unit


def _check(field: str, value: object, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{field}: expected a whole number of bytes >= 0, found {value!r}; {remedy}")
