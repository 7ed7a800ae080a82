"""Where a rank joins the messages of optional units that it leaves out.

Messages have one order on all ranks, and no rank knows which units the others run. So an optional unit has a place in
the model, and every rank sends its messages there, whether or not it runs the unit:

    forward     before a unit that comes after it in the model begins, and at the latest when the forward of the unit
                around it ends
    backward    before the backward of a use that ended before it, and at the latest when the backward ends

A rank that did not run the unit by then reports its forward, or its backward, to the rules itself: the messages, the
prefetches and the order are those of the ranks that ran it. Its gradients are absent, as those of an unused parameter.

So an optional unit, and each unit inside of it, has one use in a forward of the unit around it. A second run belongs to
this use, which is possible while the unit is unsharded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from .record import Full, Joining, OptionalUses, RunRecord, UnitRecord, Use, following_in_backward, guessed

_Uses = list[tuple[UnitRecord, Use]]


def arrange(units: Sequence[UnitRecord], around: Sequence[int], optional: Sequence[bool]) -> None:
    """Give each unit its `joining`. `around[i]`: the index of the unit around units[i], -1 for none; `optional[i]`:
    whether the user marked it."""
    inside: list[bool] = []
    lasts = list(range(len(units)))
    for index, outer in enumerate(around):
        inside.append(optional[index] or (outer >= 0 and inside[outer]))
    for index in reversed(range(len(units))):
        if around[index] >= 0:
            lasts[around[index]] = max(lasts[around[index]], lasts[index])
    for unit, is_optional, last in zip(units, inside, lasts, strict=True):
        unit.joining = Joining(is_optional=is_optional, last=last)
    beside: dict[int, list[int]] = {}
    for index, outer in enumerate(around):
        beside.setdefault(outer, []).append(index)
    for index, unit in enumerate(units):
        before: list[UnitRecord] = []
        step = index
        while step >= 0:
            siblings = [other for other in beside[around[step]] if inside[other]] if around[step] >= 0 else []
            # The outer ones first: their place is before the unit around this one.
            before[:0] = [units[other] for other in siblings if other < step]
            step = around[step]
        assert unit.joining is not None
        unit.joining.before = tuple(before)


def skipped_before(run: RunRecord, unit: UnitRecord) -> Iterator[UnitRecord]:
    """The optional units whose place is before the forward of `unit`, which begins, and that this rank left out."""
    root = run.forward_root
    if unit.joining is None or root is None or root is unit:
        return
    for other in unit.joining.before:
        if _is_left_out(other) and _is_below(other, root):
            yield other


def skipped_below(run: RunRecord, unit: UnitRecord) -> Iterator[UnitRecord]:
    """The optional units inside of `unit`, whose forward ends, that this rank left out."""
    if unit.joining is not None:
        for other in run.units[unit.index + 1 : unit.joining.last + 1]:
            if _is_left_out(other):
                yield other


def _is_left_out(unit: UnitRecord) -> bool:
    joining = unit.joining
    return joining is not None and joining.is_optional and not joining.ran and not unit.pins.running


def _is_below(unit: UnitRecord, root: UnitRecord) -> bool:
    assert root.joining is not None
    return root.index < unit.index <= root.joining.last


def begins(run: RunRecord, unit: UnitRecord) -> None:
    """A use of `unit` begins: it is its only one, and those inside of it have theirs before them."""
    joining = unit.joining
    if joining is not None:
        joining.ran = True
        joining.is_stale = False
        for other in run.units[unit.index + 1 : joining.last + 1]:
            assert other.joining is not None
            other.joining.ran = False


def is_second(unit: UnitRecord) -> bool:
    """Whether a forward of `unit` that begins would be its second one in a forward of the unit around it."""
    joining = unit.joining
    if joining is None or not joining.is_optional:
        return False
    return joining.again > 0 or (joining.ran and not unit.pins.running)


def is_outside(run: RunRecord, unit: UnitRecord) -> bool:
    """Whether a forward of `unit` that begins would be outside of that of a unit around it, where no rank joins it."""
    return unit.joining is not None and unit.joining.is_optional and run.forward_root is None


def is_freed(unit: UnitRecord) -> bool:
    """Whether a forward of `unit` that begins would be a second one after all ranks freed its parameters."""
    return is_second(unit) and not unit.empty and unit.full in (Full.SHARDED, Full.SECONDARY)


# ---- backward --------------------------------------------------------------------------------------------------------


def ends(run: RunRecord, unit: UnitRecord, use: Use) -> None:
    """The `use` of `unit` ended: each rank visits it in backward."""
    optional = run.owed.optional
    if unit.joining is not None and unit.joining.is_optional and optional.records:
        optional.uses.append((unit, use))


def begin_outermost(run: RunRecord, unit: UnitRecord, *, grad: bool) -> None:
    """The outermost forward, of `unit`, begins; `grad`: with gradients."""
    optional = run.owed.optional
    optional.records = grad
    if not grad or unit.joining is None:
        return
    if optional.is_over:
        optional.uses.clear()
        optional.begins.clear()
        optional.is_over = False
    optional.mark = len(optional.uses)
    optional.begins.append(run.owed.clock)
    optional.starts.append(len(run.order))


def begin_visits(run: RunRecord) -> None:
    """A backward begins: every rank visits each use of the forwards that it reaches."""
    run.owed.optional.left = list(run.owed.optional.uses)
    run.owed.optional.reached = set()


def left_before(run: RunRecord, unit: UnitRecord, use: Use | None) -> Iterator[tuple[UnitRecord, Use]]:
    """The backward of `use` of `unit` begins (None: of the youngest open use): the optional uses that ended after it
    and that this rank did not visit, youngest first."""
    optional = run.owed.optional
    if not optional.left or unit.empty:
        return
    begin, end = guessed(run, unit) if use is None else use
    reached = bisect_right(optional.begins, begin) - 1
    if reached < 0:
        return
    optional.reached.add(reached)
    optional.left, found = _parted(optional, end)
    for other, its in found:
        if its.end > end:
            yield other, its


def is_recomputed_early(run: RunRecord, unit: UnitRecord) -> bool:
    """Whether recomputation of `unit`, whose backward did not begin, would gather it where no rank that left it out
    does: these gather what their backward visits next, and the unit that they prefetch then."""
    joining = unit.joining
    if joining is None or not joining.is_optional or not _is_gathered_next(unit):
        return False
    if not run.owed.optional.left:
        return True
    nearest, use = run.owed.optional.left[-1]
    if nearest is unit:
        # What is due goes before it.
        return any(other.sending.first.begin > use.end for other in run.owed.units)
    ahead = [nearest, *following_in_backward(run, nearest)]
    return next((other for other in ahead if _is_gathered_next(other)), None) is not unit


def _is_gathered_next(unit: UnitRecord) -> bool:
    return not unit.empty and unit.plan.gathers_in_backward and unit.full in (Full.SHARDED, Full.SECONDARY)


def left_at_end(run: RunRecord) -> _Uses:
    """The backward is over: the optional uses that this rank did not visit, or that `sends_at_end`, youngest first."""
    optional = run.owed.optional
    found = _parted(optional, -1)[1]
    optional.left = []
    return found


def sends_at_end(unit: UnitRecord) -> bool:
    """Whether `unit` is an optional one that stays unsharded between forward and backward. Ranks may run it in any
    order: it gathers nothing in backward, and sends its gradients at the end."""
    joining = unit.joining
    return joining is not None and joining.is_optional and not unit.plan.reshard_after_forward


def _parted(optional: OptionalUses, end: int) -> tuple[_Uses, _Uses]:
    """The uses that are left, without those from `end` on of forwards that were reached; and these, youngest first."""
    stay: _Uses = []
    found: _Uses = []
    for one in optional.left:
        is_meant = one[1].end >= end and bisect_right(optional.begins, one[1].begin) - 1 in optional.reached
        is_meant = is_meant and (end < 0 or not sends_at_end(one[0]))
        (found if is_meant else stay).append(one)
    return stay, found[::-1]
