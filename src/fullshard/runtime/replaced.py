"""Parameters that `fully_shard` took off their modules, or loading did, for as long as somebody still holds them.

An optimizer that was built before holds them. No gradient reaches them any more, so its steps would train
nothing and say nothing: the first one is refused instead. Handing it the new parameters silently would be no better:
what it already keeps for the old ones (momentum, master weights, groups by shape) is of whole parameters.

Usually nobody holds one. Then there is nothing to remember, and a step costs one look at an empty dict.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..param import Found
from .names import parameter_names
from .unit import Unit

_SHOWN = 4


class _Replaced(NamedTuple):
    parameter: weakref.ref[Tensor]
    unit: weakref.ref[Unit]
    # Below the unit, as `ShardedParam` has it.
    name: str
    # The one it had then, of training before it was replaced.
    gradient: weakref.ref[Tensor] | None
    # What replaced it, and by what.
    how: str


_replaced: dict[int, _Replaced] = {}  # by identity; an entry goes with its parameter
_registrations = itertools.count()


def note_replaced(unit: Unit, found: Iterable[Found]) -> None:
    """`found` stood on the modules of `unit` before its shards did."""
    for item in found:
        _note(unit, item.parameter, item.name, "fully_shard replaced by shards")


def note_assigned(unit: Unit, old: Tensor, name: str) -> None:
    """Another parameter was assigned to the place of `old`, which is `name` below `unit`."""
    _note(unit, old, name, "load_state_dict(assign=True) replaced")


def _note(unit: Unit, parameter: Tensor, name: str, how: str) -> None:
    if next(_registrations) == 0:
        register_optimizer_step_pre_hook(_refuse_replaced)
    key = id(parameter)

    def forget(_: weakref.ref[Tensor]) -> None:
        _replaced.pop(key, None)

    gradient = parameter.grad
    of_gradient = None if gradient is None else weakref.ref(gradient)
    _replaced[key] = _Replaced(weakref.ref(parameter, forget), weakref.ref(unit), name, of_gradient, how)


def _refuse_replaced(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not _replaced:
        return
    names, how = [], ""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = _replaced.get(id(parameter))
            # With a new gradient it is in use elsewhere: another model shared it. Frozen, no step was wanted.
            if entry is None or not parameter.requires_grad or _has_new_gradient(parameter, entry):
                continue
            unit = entry.unit()
            if unit is not None:
                names.append(_name(unit, entry.name))
                how = how or entry.how
    if names:
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        raise RuntimeError(
            f"{type(optimizer).__name__}.step: expected parameters that are on the model, found some that {how}: "
            f"{shown}; no gradient reaches them, so the step would train nothing. Build the optimizer after that, from "
            f"model.parameters()"
        )


def _has_new_gradient(parameter: Tensor, entry: _Replaced) -> bool:
    gradient = parameter.grad
    return gradient is not None and (entry.gradient is None or entry.gradient() is not gradient)


def _name(unit: Unit, name: str) -> str:
    """As the user's model spells it, once its root is known."""
    model = unit.module if unit.root is None else unit.root.units[0].module
    for param, dotted in parameter_names(model, [unit]).items():
        if param.name == name:
            return dotted
    return name
