"""Optimizers that hold full parameters: those that stand on the modules while they compute, or inside `full_params`.

An optimizer built from `model.parameters()` at such a moment (after `unshard()`, between forward and backward, inside
`full_params`) holds tensors that are filled, emptied or thrown away. Gradients go to the sharded parameters, so its
steps would train nothing and say nothing: the first one is refused.

Somebody may train the parameters of `full_params` on purpose, with gradients of their own on them: that is left alone.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..param import ShardedParam
from .names import dotted_name, first_few
from .outside import outside_graphs

if TYPE_CHECKING:
    from .unit import Unit


class _Full(NamedTuple):
    parameter: weakref.ref[Tensor]
    unit: weakref.ref[Unit]
    # Below the unit, as `ShardedParam` has it.
    name: str
    # When it stands, or stood, on the modules.
    when: str


_full: dict[int, _Full] = {}  # by identity; an entry goes with its parameter
# Optimizers without such parameters, by the lengths of their groups: they are looked at once, and when they get more.
_looked_at: weakref.WeakKeyDictionary[Optimizer, list[int]] = weakref.WeakKeyDictionary()
_registrations = itertools.count()


def note_full(unit: Unit) -> None:
    """Remember what stands on the modules of `unit` while it computes, and between forward and backward."""
    for param in unit.params:
        for full in (param.full, param.kept):
            if full is not None:
                _note(unit, full, param, "they compute (after unshard(), or between forward and backward)")


def note_lent(unit: Unit, params: Iterable[ShardedParam], lent: Iterable[nn.Parameter]) -> None:
    """`lent`, one for each of `params`, stood there for `full_params`, which is over."""
    for param, full in zip(params, lent, strict=True):
        _note(unit, full, param, "full_params is open")


def _note(unit: Unit, full: Tensor, param: ShardedParam, when: str) -> None:
    if next(_registrations) == 0:
        register_optimizer_step_pre_hook(outside_graphs(_refuse_full))
    key = id(full)
    if key in _full:
        return

    def forget(_: weakref.ref[Tensor]) -> None:
        _full.pop(key, None)

    _full[key] = _Full(weakref.ref(full, forget), weakref.ref(unit), param.name, when)


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
