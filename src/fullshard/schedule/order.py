"""The order in which units are prefetched, and the order in which they send gradients."""

from __future__ import annotations

from collections.abc import Sequence

from ..layout import leading_within
from .record import NOWHERE, Full, RunRecord, UnitRecord, Use

# ---- prefetch --------------------------------------------------------------------------------------------------------
# Chooses the units to prefetch, from the recorded order or the user's lists.
#
#     forward    the user's list for this unit; otherwise the units that followed it in the previous pass that began
#                with the same unit. The first pass, and a pass that leaves the recorded order, unshard each unit only
#                when it is needed: slower, but correct.
#     backward   the user's list for this unit; otherwise the unit whose forward ended before this use of it.
#     in bytes   with `RunRecord.prefetch_nbytes`: as many of the following units, in either order, as fit.
#
# A wrong guess costs at most one all-gather: the unit is full later, or cancelled at the end of the backward. Results
# stay correct, because nothing is computed before a `wait`.

# Units in these states have their memory already.
_HAVE_MEMORY = (Full.FULL, Full.SHELVED)


def begin_forward(run: RunRecord, unit: UnitRecord) -> None:
    """The outermost forward, of `unit`, begins: start a log; the plan is its previous pass. A module called outside of
    the model's forward (a head, for each chunk of a loss) has its own plan."""
    run.forward_log = []
    run.forward_plan = run.forward_plans.get(unit.index, [])
    run.order_mark = len(run.order)


def next_in_forward(run: RunRecord, unit: UnitRecord) -> Sequence[UnitRecord]:
    """Note that `unit` began its forward; return the units to prefetch now."""
    log, plan = run.forward_log, run.forward_plan
    position = len(log)
    log.append(unit)
    if unit.plan.forward_prefetch:
        return unit.plan.forward_prefetch
    if not plan or not (run.prefetch_depth or run.prefetch_nbytes):
        return ()
    if position >= len(plan) or plan[position] is not unit:
        # The order changed: ignore the rest of the plan in this pass.
        run.forward_plan = []
        return ()
    if run.prefetch_nbytes is not None:
        return within(plan[position + 1 :], run.prefetch_nbytes)
    return plan[position + 1 : position + 1 + run.prefetch_depth]


def end_forward(run: RunRecord, unit: UnitRecord, *, backward_follows: bool) -> None:
    """The outermost forward, of `unit`, ended: its log is the plan of its next pass.

    Without a backward (evaluation) its uses are forgotten. Otherwise they would pile up over thousands of batches.
    """
    run.forward_plan = run.forward_plans[unit.index] = run.forward_log
    if not backward_follows:
        for unit in run.order[run.order_mark :]:
            if unit.uses:  # a backward inside the evaluation may have counted them off
                unit.uses.pop()
            if unit.sending.open:
                unit.sending.open.pop()
        del run.order[run.order_mark :]
        optional = run.owed.optional
        if optional.records:
            del optional.uses[optional.mark :], optional.begins[-1:], optional.starts[-1:]


def next_in_backward(run: RunRecord, unit: UnitRecord) -> Sequence[UnitRecord]:
    """The backward needs `unit` now; return the units to prefetch after it."""
    found = following_in_backward(run, unit)
    if unit.uses and not unit.plan.backward_prefetch:
        unit.uses.pop()
    return found


def following_in_backward(run: RunRecord, unit: UnitRecord) -> Sequence[UnitRecord]:
    """The units to prefetch once the backward needs `unit`."""
    if unit.plan.backward_prefetch:
        return unit.plan.backward_prefetch
    if not unit.uses:
        # A second backward over the same forward: the uses were counted off by the first.
        return ()
    position = unit.uses[-1]
    # With optional units not into an older forward: some ranks come here before its units are freed, others after that.
    starts = run.owed.optional.starts
    start = max((start for start in starts if start <= position), default=0) if starts else 0
    if run.prefetch_nbytes is not None:
        ahead = [u for u in reversed(run.order[start:position]) if u.plan.gathers_in_backward]
        return within(ahead, run.prefetch_nbytes)
    return (run.order[position - 1],) if position > start else ()


def within(following: Sequence[UnitRecord], nbytes: int) -> list[UnitRecord]:
    """The first of `following` that fit in `nbytes` together, including all-gathers in flight."""
    ahead = list(dict.fromkeys(unit for unit in following if unit.full not in _HAVE_MEMORY))
    return ahead[: leading_within((unit.plan.gather_nbytes for unit in ahead), nbytes)]


# ---- sending ---------------------------------------------------------------------------------------------------------
# The order in which units send gradients in a backward; an absent gradient does not change it.
#
# All ranks must issue the messages of a group in the same order: messages of equal shape would mix silently otherwise.
# The order in which gradients become ready is unsuitable: a rank without some gradient never sees a unit ready. But all
# ranks agree on the order of forwards, and so on its reverse, the order of backwards:
#
#     owing    from the first gradient of its outputs on, a unit owes one message, with or without gradients
#     order    the unit whose first use began last goes first; of units inside each other, the inner one
#     due      before anything is gathered for a use that ended before the first use of the owing unit began; with the
#              end of the backward at the latest
#     early    a unit whose gradients are complete on this rank goes before it is due, if those ahead of it went and
#              nothing can be gathered in between: the order of all messages stays the same
#
# A clock counts the ends of forwards: the uses inside of a use (begin, end) have ends in [begin, end). Backward visits
# uses by decreasing end. So a unit is due at a use that ends before its `begin`, and may go early when the last visited
# use has an end of `begin` or less.

# The use of a unit in backward without a known forward: it sends at the end of the backward.
UNKNOWN = Use(-1, -1)


def begin_use(run: RunRecord, unit: UnitRecord) -> None:
    """A forward of `unit` begins."""
    unit.sending.begins.append(run.owed.clock)


def end_use(run: RunRecord, unit: UnitRecord) -> None:
    """The forward ended: its backward may come from now on."""
    sending = unit.sending
    begin = sending.begins.pop() if sending.begins else run.owed.clock
    sending.open.append(Use(begin, run.owed.clock))
    run.owed.clock += 1


def visit(run: RunRecord, unit: UnitRecord, use: Use | None) -> list[UnitRecord]:
    """The backward of `use` begins (None: of the youngest open use). Returns the units to send first."""
    sending = unit.sending
    if use is None:
        use = guessed(run, unit)
    due: list[UnitRecord] = []
    if use is not UNKNOWN:
        if run.owed.units:
            due = [other for other in run.owed.units if other.sending.first.begin > use.end]
        run.owed.frontier = min(run.owed.frontier, use.end)
        if use in sending.open:
            sending.open.remove(use)
    for other in due:
        _sent(run, other)
    sending.visited, sending.settled = use, False
    if unit.plan.trainable:
        # An older forward of the unit may belong to this backward; then its gradients come last.
        sending.first = min((use, *sending.open, *((sending.first,) if unit in run.owed.units else ())))
        if unit not in run.owed.units:
            run.owed.units.append(unit)
        if len(run.owed.units) > 1:
            run.owed.units.sort(key=_rank)
    return due


def guessed(run: RunRecord, unit: UnitRecord) -> Use:
    """The use that is meant by another module of the unit or by a saved weight, perhaps after a report with the use."""
    sending = unit.sending
    return sending.visited if unit in run.owed.units else sending.open[-1] if sending.open else UNKNOWN


def settle(run: RunRecord, unit: UnitRecord) -> list[UnitRecord]:
    """`unit` has all of its gradients on this rank. Returns the units to send now."""
    unit.sending.settled = True
    early: list[UnitRecord] = []
    for other in run.owed.units:
        if not other.sending.settled or run.owed.frontier > other.sending.first.begin:
            break
        early.append(other)
    for other in early:
        _sent(run, other)
    return early


def end_sending(run: RunRecord) -> list[UnitRecord]:
    """The backward is over. Returns the units that still owe a message, in order."""
    left = list(run.owed.units)
    for unit in left:
        _sent(run, unit)
    run.owed.frontier = NOWHERE
    return left


def _sent(run: RunRecord, unit: UnitRecord) -> None:
    run.owed.units.remove(unit)
    unit.sending.settled = False


def _rank(unit: UnitRecord) -> tuple[int, int, int]:
    return (-unit.sending.first.begin, unit.sending.first.end, unit.index)
