"""Records which unit has a parameter, its modules and its memory, so that a later `fully_shard` finds what an earlier
one took. Ties across units are found by it, and two parameters over the same memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..engine import Unit, unit_of
from ..engine.names import clean_name
from ..param import Found, local_data

# On modules: the unit that has their parameters. On parameters as they were before: names of the unit and of itself.
_AROUND = "_fullshard_around"
_OWNER = "_fullshard_owner"


def note_managed(unit: Unit, managed: Iterable[nn.Module]) -> None:
    """Record `unit` on the modules that it manages."""
    for module in managed:
        module.__dict__[_AROUND] = unit


def note_owner(found: Iterable[Found], unit_name: str) -> None:
    """Record the name of their unit on the parameters as they were before."""
    for item in found:
        setattr(item.parameter, _OWNER, (unit_name, item.name))


def refuse_owned(item: Found, module_name: str, roots: Sequence[nn.Module]) -> None:
    """Raise if an earlier call took the parameter of `item`, or those of a module that it is on. `module_name` names
    `roots`, which the present call shards."""
    parameter, name = item.parameter, item.name
    for slot in item.slots:
        around = slot.module.__dict__.get(_AROUND)
        if around is not None and any(slot in param.slots for param in around.params):
            raise RuntimeError(
                f"{name}: expected inner modules to be sharded before those around them, found {module_name} after "
                f"{around.record.name}, which has its parameters already; call fully_shard bottom-up: on each "
                f"block first, on the whole model last"
            )
    owner = getattr(parameter, _OWNER, None)
    if owner is not None:
        here = name.rpartition(".")[0]
        there = _path_of_owner(owner, roots)
        raise ValueError(
            f"{name}: expected each parameter in one unit, found it tied to "
            f"{f'{there}.{owner[1]} (of the unit {there}: {owner[0]})' if there else f'{owner[1]} of {owner[0]}'}, "
            f"which was sharded before this {module_name}; make one unit of both places, "
            f"fully_shard([{there or owner[0]}, {here or module_name}]), or leave both to the module around them"
        )


def _path_of_owner(owner: tuple[str, str], roots: Sequence[nn.Module]) -> str:
    """The dotted name, below `roots`, of the unit that has a tied parameter; "" if it is not below them."""
    for root in roots:
        for path, module in root.named_modules():
            unit = unit_of(module)
            if unit is not None and unit.record.name == owner[0] and any(p.name == owner[1] for p in unit.params):
                return clean_name(path)
    return ""


# ---- memory ----------------------------------------------------------------------------------------------------------
# Parameters that are different objects over the same memory: tied in the plain model, two parameters once they are cut.

_MEMORY = "_fullshard_memory"


class Span(NamedTuple):
    """The bytes [start, end) of a parameter before it is cut. `memory` stands for its storage, whose address another
    one may have later."""

    memory: object
    start: int
    end: int
    name: str
    trains: bool


_spans: weakref.WeakKeyDictionary[Unit, list[Span]] = weakref.WeakKeyDictionary()


def check_memory(found: Iterable[Found], roots: Sequence[nn.Module]) -> list[Span]:
    """The memory of `found`, for `note_memory`. Raises `ValueError` if two parameters of them and of the units below
    `roots` overlap and one of them trains."""
    spans = list(filter(None, map(_span, found)))
    units = {unit for root in roots for module in root.modules() if (unit := unit_of(module)) is not None}
    known = [
        span._replace(name=f"{span.name} (of the unit {unit.record.name})")
        for unit in units
        for span in _spans.get(unit, ())
    ]
    last: Span | None = None
    for span in sorted([*spans, *known], key=lambda span: (id(span.memory), span.start)):
        if last is None or span.memory is not last.memory or span.start >= last.end:
            last = span
        elif span.trains or last.trains:
            raise ValueError(
                f"{last.name} and {span.name}: expected each parameter in memory of its own, found two parameters over "
                f"the same memory, which train as one and apart once they are cut; make them one object, as "
                f"`a.weight = b.weight` does, or give one a copy: nn.Parameter(p.detach().clone())"
            )
        elif span.end > last.end:
            last = span
    return spans


def note_memory(unit: Unit, spans: list[Span]) -> None:
    """Remember the memory that the parameters of `unit` had."""
    _spans[unit] = spans


def _span(item: Found) -> Span | None:
    local = local_data(item.parameter)
    if type(local) not in (torch.Tensor, nn.Parameter) or local.layout is not torch.strided or not local.numel():
        return None
    storage = local.untyped_storage()
    start = int(local.storage_offset()) * local.itemsize
    memory = storage.__dict__.setdefault(_MEMORY, object())
    return Span(memory, start, start + int(local.nbytes), item.name, item.parameter.requires_grad)
