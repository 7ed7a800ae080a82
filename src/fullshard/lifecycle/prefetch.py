"""Which unit is needed next: the recorded order, or the user's lists.

    forward    the user's list for this unit; otherwise the units that followed it in the previous pass that began with
               the same unit. The first pass, and a pass that leaves the recorded order, gather each unit when it is
               needed: late, but right.
    backward   the user's list for this unit; otherwise the unit whose forward ended before this use of it.
    in bytes   where `RunRecord.prefetch_nbytes` is set: of the units that follow in either order, as many as fit.

A wrong guess costs a gather: it is found full when needed, or dropped at the end of the backward. It never costs a
result, because nothing is computed before a `wait`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..layout import leading_within
from .state import Full, RunRecord, UnitRecord

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
