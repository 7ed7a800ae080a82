"""In which order units are gathered ahead, and in which order they send their gradients."""

from __future__ import annotations

from collections.abc import Sequence

from ..layout import leading_within
from .record import NOWHERE, Full, RunRecord, UnitRecord, Use

# ---- prefetch --------------------------------------------------------------------------------------------------------
# Which unit is needed next: the recorded order, or the user's lists.
#
#     forward    the user's list for this unit; otherwise the units that followed it in the previous pass that began
#                with the same unit. The first pass, and a pass that leaves the recorded order, gather each unit when it
#                is needed: late, but right.
#     backward   the user's list for this unit; otherwise the unit whose forward ended before this use of it.
#     in bytes   where `RunRecord.prefetch_nbytes` is set: of the units that follow in either order, as many as fit.
#
# A wrong guess costs a gather: it is found full when needed, or dropped at the end of the backward. It never costs a
# result, because nothing is computed before a `wait`.

# These have their memory already.
_HAVE_MEMORY = (Full.FULL, Full.SHELVED)


def begin_forward(run: RunRecord, unit: UnitRecord) -> None:
    """The outermost forward, that of `unit`, begins: a new log; the plan is that of its last pass. What runs beside the
    model (a head called for each chunk of a loss) has a plan of its own."""
    run.forward_log = []
    run.forward_plan = run.forward_plans.get(unit.index, [])
    run.order_mark = len(run.order)


def next_in_forward(run: RunRecord, unit: UnitRecord) -> Sequence[UnitRecord]:
    """Note that `unit` began its forward; the units worth gathering now."""
    log, plan = run.forward_log, run.forward_plan
    position = len(log)
    log.append(unit)
    if unit.forward_prefetch:
        return unit.forward_prefetch
    if not plan or not (run.prefetch_depth or run.prefetch_nbytes):
        return ()
    if position >= len(plan) or plan[position] is not unit:
        # A changed order. One deviation makes the rest of the plan worthless for this pass.
        run.forward_plan = []
        return ()
    if run.prefetch_nbytes is not None:
        return within(plan[position + 1 :], run.prefetch_nbytes)
    return plan[position + 1 : position + 1 + run.prefetch_depth]


def end_forward(run: RunRecord, unit: UnitRecord, *, backward_follows: bool) -> None:
    """The outermost forward, that of `unit`, ended: what it did is the plan of its next pass.

    When no backward can follow (evaluation), its uses are forgotten; otherwise thousands of evaluation batches would
    pile up in the order until some backward ends.
    """
    run.forward_plan = run.forward_plans[unit.index] = run.forward_log
    if not backward_follows:
        for unit in run.order[run.order_mark :]:
            if unit.uses:  # a backward inside the evaluation may have counted them off
                unit.uses.pop()
            if unit.open:
                unit.open.pop()
        del run.order[run.order_mark :]


def next_in_backward(run: RunRecord, unit: UnitRecord) -> Sequence[UnitRecord]:
    """`unit` is needed by the backward now; the units worth gathering behind it."""
    if unit.backward_prefetch:
        return unit.backward_prefetch
    if not unit.uses:
        # A second backward over the same forward: the uses were counted off by the first.
        return ()
    position = unit.uses.pop()
    if run.prefetch_nbytes is not None:
        return within([u for u in reversed(run.order[:position]) if u.gathers_in_backward], run.prefetch_nbytes)
    return (run.order[position - 1],) if position else ()


def within(following: Sequence[UnitRecord], nbytes: int) -> list[UnitRecord]:
    """The first of `following` that fit into `nbytes` together, gathers already under way included."""
    ahead = list(dict.fromkeys(unit for unit in following if unit.full not in _HAVE_MEMORY))
    return ahead[: leading_within((unit.gather_nbytes for unit in ahead), nbytes)]


# ---- sending ---------------------------------------------------------------------------------------------------------
# In which order the units of a backward send their gradients: an order that no absent gradient can change.
#
# Messages of one group have to be issued in one order by all ranks; equal-shaped ones in another order mix without a
# word. When the gradients of a unit are ready is no such order: a rank on which one of them is absent never sees it.
# What ranks agree on is the order of the forwards, and with it that of the backwards, which is its reverse. So:
#
#     owing    from the first gradient of its outputs on, a unit owes one message, whatever gradients come
#     order    the unit whose first use began last goes first; of units inside each other, the inner one
#     due      before anything is gathered for a use that ended before the first use of the owing unit began; with the
#              end of the backward at the latest
#     early    a unit whose gradients are complete on this rank goes before it is due, if those ahead of it went, and if
#              nothing can be gathered between now and then: so the order of all messages stays the same
#
# Uses are numbered by a clock that counts the ends of forwards: inside of a use (begin, end) ended those in [begin,
# end). Backward visits uses by falling end. That is all the arithmetic: a unit is due at a use that ends before its
# `begin`, and may go early when the last visited use has an end of `begin` or less.

# Of a unit whose backward was noticed although none of its forwards is known: it waits for the end.
UNKNOWN = Use(-1, -1)


def begin_use(run: RunRecord, unit: UnitRecord) -> None:
    """A forward of `unit` begins."""
    unit.begins.append(run.clock)


def end_use(run: RunRecord, unit: UnitRecord) -> None:
    """It ended: from now on its backward may come."""
    begin = unit.begins.pop() if unit.begins else run.clock
    unit.open.append(Use(begin, run.clock))
    run.clock += 1


def visit(run: RunRecord, unit: UnitRecord, use: Use | None) -> list[UnitRecord]:
    """The backward of `use` begins (None: of the youngest use whose backward may come); the units to send before."""
    if use is None:
        # Noticed once more, by a module of several or by a saved weight; or by these alone.
        use = unit.visited if unit in run.owing else unit.open[-1] if unit.open else UNKNOWN
    due: list[UnitRecord] = []
    if use is not UNKNOWN:
        due = [other for other in run.owing if other.first.begin > use.end]
        run.frontier = min(run.frontier, use.end)
        if use in unit.open:
            unit.open.remove(use)
    for other in due:
        _sent(run, other)
    unit.visited, unit.settled = use, False
    if unit.trainable:
        # An older forward of the unit may belong to this backward, too, and then its gradients come last.
        unit.first = min((use, *unit.open, *((unit.first,) if unit in run.owing else ())))
        if unit not in run.owing:
            run.owing.append(unit)
        run.owing.sort(key=_rank)
    return due


def settle(run: RunRecord, unit: UnitRecord) -> list[UnitRecord]:
    """All gradients that come to `unit` on this rank are there; the units to send now."""
    unit.settled = True
    early: list[UnitRecord] = []
    for other in run.owing:
        if not other.settled or run.frontier > other.first.begin:
            break
        early.append(other)
    for other in early:
        _sent(run, other)
    return early


def end_sending(run: RunRecord) -> list[UnitRecord]:
    """The backward is over; the units that still owe a message, in order."""
    left = list(run.owing)
    for unit in left:
        _sent(run, unit)
    run.frontier = NOWHERE
    return left


def _sent(run: RunRecord, unit: UnitRecord) -> None:
    run.owing.remove(unit)
    unit.settled = False


def _rank(unit: UnitRecord) -> tuple[int, int, int]:
    return (-unit.first.begin, unit.first.end, unit.index)
