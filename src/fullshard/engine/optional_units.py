"""Optional units of a root: `fully_shard(module, optional=True)`. schedule/optional.py decides about them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..schedule import Full, RunRecord, UnitRecord, optional
from .unit import Unit, unit_of


def arrange(units: Sequence[Unit]) -> None:
    """The root of `units`, some of them optional, forms. Raises `ValueError` if an optional unit is the root, or if
    it, the unit around it or one inside of it has several modules."""
    marked = [unit.settings.optional for unit in units]
    around = _around(units)
    for index, unit in enumerate(units):
        name = unit.record.name
        if marked[index] and around[index] < 0:
            raise ValueError(
                f"{name}: expected optional=True for a unit inside of the model, found it for the outermost one, "
                f"without which nothing is computed; leave it out there"
            )
        step, inside = index, False
        while step >= 0 and not inside:
            inside, step = marked[step], around[step]
        for part in (unit, *((units[around[index]],) if around[index] >= 0 else ())) if inside else ():
            if len(part.modules) > 1:
                raise ValueError(
                    f"{part.record.name}: expected one module in an optional unit, in those inside of it, and in the "
                    f"one around it, found {len(part.modules)} (optional={name}); apply fully_shard to each of them"
                )
    if any(_sends(unit) for unit in units):
        optional.arrange([unit.record for unit in units], around, marked)


def note_stale(units: Sequence[Unit], thread: int) -> None:
    """An outermost forward begins, in `thread`."""
    for unit in units:
        if unit.record.joining is not None and unit.record.full is not Full.SHARDED:
            unit.record.joining.is_stale = unit.seal.is_broken(thread)


def _sends(unit: Unit) -> bool:
    return any(len(links.everyone) > 1 for links in unit.links)


def _around(units: Sequence[Unit]) -> list[int]:
    """The index of the unit around each."""
    indices = {unit: index for index, unit in enumerate(units)}
    around = [-1] * len(units)
    seen: set[nn.Module] = set()
    stack: list[tuple[nn.Module, int]] = [(units[0].module, -1)]
    while stack:
        module, outer = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        unit = unit_of(module)
        if unit is not None and unit is not units[0] and unit.module is module:
            around[indices[unit]] = outer
        if unit is not None:
            outer = indices[unit]
        # In the order of `modules()`, where a shared module belongs to the first that has it.
        stack += [(child, outer) for child in reversed(list(module.children()))]
    return around


def refuse_out_of_place(run: RunRecord, record: UnitRecord) -> None:
    """Raise `RuntimeError` if the forward of `record` that begins would send what no other rank sends with it."""
    if optional.is_outside(run, record):
        raise RuntimeError(
            f"{record.name}: expected an optional unit to run inside of the forward of the model, where the ranks that "
            f"leave it out join its messages, found it run by itself; run it in forward, or in a method registered "
            f"with register_fsdp_forward_method, or leave optional=True out"
        )
    if optional.is_freed(record):
        raise RuntimeError(
            f"{record.name}: expected one run of an optional unit, and of each unit inside of it, in a forward of the "
            f"unit around it, at its place in the order of modules, found a second or a later one, after its "
            f"parameters were freed on all ranks; give it its inputs in one batch, or pass reshard_after_forward=False "
            f"with optional=True, also to the units inside of it"
        )


def refuse_recomputed_early(run: RunRecord, record: UnitRecord) -> None:
    """Raise `RuntimeError` if recomputation of `record` would send what no other rank sends with it."""
    if optional.is_recomputed_early(run, record):
        raise RuntimeError(
            f"{record.name}: expected an optional unit, and each unit inside of one, to be recomputed by itself, so "
            f"that it is gathered where the ranks that leave it out gather it, found it recomputed with others; apply "
            f"checkpoint(..., use_reentrant=False) to each of these units instead of to what is around them, or pass "
            f"reshard_after_forward=False with optional=True, also to the units inside of it"
        )
