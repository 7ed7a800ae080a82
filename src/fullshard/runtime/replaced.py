"""Parameters that `fully_shard`, loading or `to_empty` took off their modules, while somebody still holds them.

An optimizer that was built before holds them. No gradient reaches them any more, so its steps would train
nothing and say nothing: the first one is refused instead. Handing it the new parameters silently would be no better:
what it already keeps for the old ones (momentum, master weights, groups by shape) is of whole parameters.

Usually nobody holds one. Then there is nothing to remember, and a step costs one look at an empty dict.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..param import Found
from .names import dotted_name, first_few
from .outside import outside_graphs
from .unit import Unit


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


@contextmanager
def noting_emptied(unit: Unit | None, module: nn.Module, *, name: str = "", recurse: bool = False) -> Iterator[None]:
    """Inside, what is on the meta device gets memory. Sharded parameters stay the same objects; in the place of plain
    ones (ignored, or of no unit) torch makes new ones. `module` is `name` below the module of `unit`."""
    before = [
        (part, own_name, f"{prefix}.{own_name}" if prefix else own_name, parameter)
        for prefix, part in (module.named_modules(prefix=name) if recurse else ((name, module),))
        for own_name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
        if parameter.is_meta and not isinstance(parameter, DTensor)
    ]
    yield
    for part, own_name, dotted, parameter in before:
        if unit is not None and getattr(part, own_name) is not parameter:
            _note(unit, parameter, dotted, "to_empty replaced")


def _note(unit: Unit, parameter: Tensor, name: str, how: str) -> None:
    if next(_registrations) == 0:
        register_optimizer_step_pre_hook(outside_graphs(_refuse_replaced))
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
                names.append(dotted_name(unit, entry.name))
                how = how or entry.how
    if names:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step: expected parameters that are on the model, found some that {how}: "
            f"{first_few(names)}; no gradient reaches them, so the step would train nothing. Build the optimizer after "
            f"that, from model.parameters()"
        )


def _has_new_gradient(parameter: Tensor, entry: _Replaced) -> bool:
    gradient = parameter.grad
    return gradient is not None and (entry.gradient is None or entry.gradient() is not gradient)
