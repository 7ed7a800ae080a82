"""Misuse that only an optimizer's step can show: each is an error with names. Another one is in state_dict.py: an
optimizer holds parameters that were replaced.

full parameters    an optimizer holds those that stand on modules for a while, and would step on them
open windows       a step would leave out what an accumulation window holds
named refusals     DTensor's complaint about an operation gets the parameter's name
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from ..param import ShardedParam
from .optimizer_steps import refuses_steps


class NamedUnit(Protocol):
    """A unit, as far as errors name its parameters: `module` is its own, `model` that of its root once that formed."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def model(self) -> nn.Module: ...
    @property
    def params(self) -> Sequence[ShardedParam]: ...


class _Trained(Protocol):
    """A root: its units, and the thread that runs it."""

    thread: int

    @property
    def units(self) -> Sequence[NamedUnit]: ...


# ---- names -----------------------------------------------------------------------------------------------------------
# Dotted names of modules and parameters, as the user's own code spells them.

_SHOWN = 4
# Names that wrappers insert into dotted names.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def clean_name(name: str) -> str:
    """`name` without what recomputation and compile wrappers insert into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "").removesuffix("." + wrapper.rstrip("."))
    return name


def dotted_name(unit: NamedUnit, name: str) -> str:
    """The parameter that is `name` below `unit`, as the user's model spells it once its root is known."""
    for param, dotted in parameter_names(unit.model, [unit]).items():
        if param.name == name:
            return dotted
    return name


def first_few(names: Sequence[str]) -> str:
    """The first of many names, for an error."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def parameter_names(model: nn.Module, units: Sequence[NamedUnit]) -> dict[ShardedParam, str]:
    """The dotted names below `model` of the parameters of `units`; relative to their unit for those outside of it."""
    prefixes = {module: f"{clean_name(name)}." if name else "" for name, module in model.named_modules()}
    names = {}
    for unit in units:
        for param in unit.params:
            slot = next((slot for slot in param.slots if slot.module in prefixes), None)
            names[param] = param.name if slot is None else prefixes[slot.module] + slot.name
    return names


# ---- full in optimizers ----------------------------------------------------------------------------------------------
# Optimizers that hold full parameters: those that stand on the modules while they compute, or inside `full_params`.
#
# An optimizer built from `model.parameters()` at such a moment (after `unshard()`, between forward and backward, inside
# `full_params`) holds tensors that are filled, emptied or thrown away. Gradients go to the sharded parameters, so its
# steps would train nothing and say nothing: the first one is refused.
#
# Somebody may train the parameters of `full_params` on purpose, with gradients of their own on them: that is left
# alone.


class _Full(NamedTuple):
    parameter: weakref.ref[Tensor]
    unit: weakref.ref[NamedUnit]
    # Below the unit, as `ShardedParam` has it.
    name: str
    # When it stands, or stood, on the modules.
    when: str


_full: dict[int, _Full] = {}  # by identity; an entry goes with its parameter
# Optimizers without such parameters, by the lengths of their groups: they are looked at once, and when they get more.
_looked_at: weakref.WeakKeyDictionary[Optimizer, list[int]] = weakref.WeakKeyDictionary()


def note_full(unit: NamedUnit) -> None:
    """Remember what stands on the modules of `unit` while it computes, and between forward and backward."""
    for param in unit.params:
        for full in (param.full, param.kept):
            if full is not None:
                _note(unit, full, param, "they compute (after unshard(), or between forward and backward)")


def note_lent(unit: NamedUnit, params: Iterable[ShardedParam], lent: Iterable[nn.Parameter]) -> None:
    """`lent`, one for each of `params`, stood there for `full_params`, which is over."""
    for param, full in zip(params, lent, strict=True):
        _note(unit, full, param, "full_params is open")


def _note(unit: NamedUnit, full: Tensor, param: ShardedParam, when: str) -> None:
    key = id(full)
    if key in _full:
        return

    def forget(_: weakref.ref[Tensor]) -> None:
        _full.pop(key, None)

    _full[key] = _Full(weakref.ref(full, forget), weakref.ref(unit), param.name, when)


@refuses_steps
def _refuse_full(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    lengths = [len(group["params"]) for group in optimizer.param_groups]
    if _looked_at.get(optimizer) == lengths:
        return
    entries = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = _full.get(id(parameter))
            if entry is None or not parameter.requires_grad:
                continue
            if parameter.grad is not None:
                return  # somebody trains full parameters
            entries.append(entry)
    units = [(entry.unit(), entry) for entry in entries]
    names = [dotted_name(unit, entry.name) for unit, entry in units if unit is not None]
    if names:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step: expected the sharded parameters of the model, found full ones, which "
            f"stand on its modules while {entries[0].when}: {first_few(names)}; no gradient reaches them, so the step "
            f"would train nothing. Build the optimizer from model.parameters() before the first forward, or behind "
            f"model.reshard(), outside of full_params"
        )
    if not entries:
        _looked_at[optimizer] = lengths


# ---- open windows ----------------------------------------------------------------------------------------------------
# Steps with a part of the gradients: a window of accumulation is open, and what it holds is not in `.grad`.
#
# A backward without synchronisation, or without all-reduce, keeps what it brought on each rank. Where `.grad` was empty
# a `PendingGrad` stands there, which refuses to be used; where an earlier backward was reduced, `.grad` has that part,
# and a step would take it for the whole. So would an optimizer that steps parameter by parameter go half its way before
# it meets a `PendingGrad`. The step is refused before it begins, if the optimizer has such parameters. With a closure
# the backward that closes the window may still come.

_open: dict[int, weakref.ref[NamedUnit]] = {}  # by identity


def note_window(unit: NamedUnit, *, is_open: bool) -> None:
    """A backward ended; `unit` holds gradients, or partial sums, now: or not any more."""
    if is_open:
        key = id(unit)
        _open[key] = weakref.ref(unit, lambda _: _open.pop(key, None))
    else:
        _open.pop(id(unit), None)


@refuses_steps
def _refuse_a_part(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not _open or any(callable(closure) for closure in (*args[1:2], kwargs.get("closure"))):
        return
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    waiting = []
    for reference in list(_open.values()):
        unit = reference()
        if unit is None:
            continue
        for param in unit.params:
            if id(param.sharded) in own and (param.live_held() is not None or param.live_partial() is not None):
                waiting.append(dotted_name(unit, param.name))
    if waiting:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step: expected gradients that are reduced, found some that were only "
            f"accumulated on each rank, of {first_few(waiting)}: the last backward ran with "
            f"set_requires_gradient_sync(False) or set_requires_all_reduce(False), and the step would leave out what "
            f"it brought. Run the last micro-batch of the step with both True, or clear the gradients (zero_grad) to "
            f"give the window up"
        )


# ---- no backward -----------------------------------------------------------------------------------------------------
# `backward(inputs=parameters)` asks for gradients of shards, the graph was made of full parameters, and autograd trains
# nothing and is silent. Nothing of ours hears of such a backward, so the step says it: a forward recorded a graph, no
# backward of any model brought a gradient since, and no parameter of the optimizer has one.

# By the thread that runs the model.
_untrained: dict[int, weakref.WeakSet[_Trained]] = {}


def expect_backward(root: _Trained) -> None:
    """A forward of `root` begins that records a graph."""
    _untrained.setdefault(root.thread, weakref.WeakSet()).add(root)


def note_backward(root: _Trained) -> None:
    """A backward brought gradients of `root`. What others ran forward may be left out of it on purpose."""
    _untrained.pop(root.thread, None)


@refuses_steps
def _refuse_untrained(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    roots = _untrained.get(threading.get_ident())
    if not roots or any(callable(closure) for closure in (*args[1:2], kwargs.get("closure"))):
        return
    own = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]
    if any(parameter.grad is not None for parameter in own):
        return
    ids = {id(parameter) for parameter in own}
    for root in tuple(roots):
        names = [dotted_name(unit, p.name) for unit in root.units for p in unit.params if id(p.sharded) in ids]
        if names:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: expected gradients, found none after a forward, of "
                f"{first_few(names)}: no backward brought any. One for parameters alone (backward(inputs=...)) "
                f"does not, because the graph is made of the full parameters. Call loss.backward() without inputs, and "
                f"requires_grad_(False) before the forward on what is to get no gradient; where no backward is wanted, "
                f"leave out the step"
            )
