"""Dotted names of modules and parameters, as in the user's code, for errors and reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from ..param import ShardedParam

_SHOWN = 4
# Names that wrappers insert into dotted names.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


class NamedUnit(Protocol):
    """The part of a unit that errors need. `module`: its own; `model`: the module of its root, once that formed."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def model(self) -> nn.Module: ...
    @property
    def params(self) -> Sequence[ShardedParam]: ...


def clean_name(name: str) -> str:
    """`name` without the components that checkpoint and compile wrappers insert."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "").removesuffix("." + wrapper.rstrip("."))
    return name


def dotted_name(unit: NamedUnit, name: str) -> str:
    """The dotted name in the user's model of the parameter `name` of `unit`."""
    for param, dotted in parameter_names(unit.model, [unit]).items():
        if param.name == name:
            return dotted
    return name


def first_few(names: Sequence[str]) -> str:
    """The first few of `names`, for an error."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def parameter_names(model: nn.Module, units: Sequence[NamedUnit]) -> dict[ShardedParam, str]:
    """The dotted names of the parameters of `units` below `model`; relative to their unit if outside of `model`."""
    prefixes = {module: f"{clean_name(name)}." if name else "" for name, module in model.named_modules()}
    names = {}
    for unit in units:
        for param in unit.params:
            slot = next((slot for slot in param.slots if slot.module in prefixes), None)
            names[param] = param.name if slot is None else prefixes[slot.module] + slot.name
    return names
