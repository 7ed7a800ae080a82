"""Places of parameters on modules: a program finds the full one there in the forward and backward of its unit, else the
shard, whose dtype may differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn


class Slot(NamedTuple):
    """A place on a module for a parameter of a unit: in its forward the full one, else the shard."""

    module: nn.Module
    name: str
    full: nn.Parameter
    shard: nn.Parameter


def slots_of(model: nn.Module, unit_of: dict[int, int], shards: Mapping[int, nn.Parameter]) -> dict[int, list[Slot]]:
    """The places by unit. Those of the root are full all the time: the loss follows its forward."""
    found: dict[int, list[Slot]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            unit, shard = unit_of.get(id(parameter), 0), shards.get(id(parameter))
            if unit and shard is not None and shard.dtype is not parameter.dtype:
                found.setdefault(unit, []).append(Slot(module, name, parameter, shard))
    return found


def show(slots: Iterable[Slot], *, full: bool) -> None:
    """Put the full parameters on the modules, or the shards."""
    for slot in slots:
        setattr(slot.module, slot.name, slot.full if full else slot.shard)
