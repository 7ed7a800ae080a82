"""Dotted names of modules and parameters, as the user's own code spells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from ..param import ShardedParam

if TYPE_CHECKING:
    from .unit import Unit

_SHOWN = 4
# Names that wrappers insert into dotted names.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def clean_name(name: str) -> str:
    """`name` without what recomputation and compile wrappers insert into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "").removesuffix("." + wrapper.rstrip("."))
    return name


def dotted_name(unit: Unit, name: str) -> str:
    """The parameter that is `name` below `unit`, as the user's model spells it once its root is known."""
    model = unit.module if unit.root is None else unit.root.units[0].module
    for param, dotted in parameter_names(model, [unit]).items():
        if param.name == name:
            return dotted
    return name


def first_few(names: Sequence[str]) -> str:
    """The first of many names, for an error."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def parameter_names(model: nn.Module, units: Sequence[Unit]) -> dict[ShardedParam, str]:
    """The dotted names below `model` of the parameters of `units`; relative to their unit for those outside of it."""
    prefixes = {module: f"{clean_name(name)}." if name else "" for name, module in model.named_modules()}
    names = {}
    for unit in units:
        for param in unit.params:
            slot = next((slot for slot in param.slots if slot.module in prefixes), None)
            names[param] = param.name if slot is None else prefixes[slot.module] + slot.name
    return names
