"""The state of one unit and of one run, and the orders that the rules keep in it: everything they know.

`full` is the state of the full parameters. The legal transitions and their commands:

    from        to          command             meaning
    SHARDED     PENDING     unshard             an all-gather was issued; its result may not be used yet
    PENDING     FULL        wait                the full parameters are on the modules
    PENDING     SHARDED     cancel              gathered but never needed; the result is discarded
    FULL        SHARDED     reshard             the memory is freed, the sharded parameters are on the modules again
    FULL        SHELVED     shelve              the sharded parameters are on the modules, the memory is kept for the
                                                next use
    SHELVED     FULL        expose              the kept full parameters are on the modules again
    SHELVED     SHARDED     reshard
    FULL        SECONDARY   reshard_secondary   the secondary shard (this rank's part among k ranks) is kept, the rest
                                                of the memory is freed
    SECONDARY   PENDING     unshard_secondary   an all-gather of secondary shards over the k ranks was issued
    SECONDARY   SECONDARY   shelve              the sharded parameters are on the modules instead of secondary shards
    SECONDARY   SHARDED     reshard             the secondary shard is freed

`phase` is the part of a step that the unit is in:

    IDLE       between its forward and its backward, or outside of a step
    FORWARD    its forward is running
    BACKWARD   its backward is running: the gradient of an output arrived, those of the parameters have not
    DONE       the gradients of this use were handed over; another use in the same backward makes it BACKWARD again

The records are mutable and slotted: a rule costs under a microsecond (ADR 0001).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from ..layout import leading_within


class Full(IntEnum):
    """Where the full parameters of a unit are."""

    SHARDED = 0
    PENDING = 1
    FULL = 2
    SHELVED = 3
    SECONDARY = 4


class Phase(IntEnum):
    """The part of a step that a unit is in."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2
    DONE = 3


class Use(NamedTuple):
    """One forward of a unit: how many forwards of the run had ended when it began and when it ended."""

    begin: int
    end: int


# After every use: no backward began.
NOWHERE = 1 << 62


@dataclass(slots=True, eq=False, repr=False)
class UnitPlan:
    """The facts that the rules read about a unit and never write: the user's settings, and facts about its
    parameters."""

    reshard_after_forward: bool
    # Integer reshard_after_forward: keep a part after forward, to gather from fewer ranks in backward.
    keeps_secondary: bool = False
    # Stays full between forward and backward within the memory budget; if frozen, also between steps.
    resident: bool = False
    # Bytes of a gather, including messages; the same on every rank.
    gather_nbytes: int = 0
    reshard_after_backward: bool = True
    # Whether a unit that is not freed after forward stays full also when no backward can follow.
    keeps_in_evaluation: bool = True
    # Whether gradients are reduced at the end of this backward or kept until one that does.
    sync: bool = True
    # Whether backward reads the unit's weights; False is the user's promise.
    gathers_in_backward: bool = True
    # Some parameter gets gradients.
    trainable: bool = True
    # Some parameters get no gradient, so "all gradients are ready" does not say that all weights were used.
    frees_late: bool = False
    # The user's prefetch lists for forward and backward, instead of the recorded order.
    forward_prefetch: tuple[UnitRecord, ...] = ()
    backward_prefetch: tuple[UnitRecord, ...] = ()


@dataclass(slots=True, eq=False, repr=False)
class Pins:
    """Why the full parameters of a unit must stay in memory (section "pins" below)."""

    # Expected backwards without reports.
    count: int = 0
    # A forward is running; one ran since the last pin; gradients came in the running backward.
    running: bool = False
    used: bool = False
    brought: bool = False


@dataclass(slots=True, eq=False, repr=False)
class Sending:
    """When the unit's gradients are sent (order.py)."""

    # The clock at the begin of running forwards, and forwards whose backward may come, oldest first.
    begins: list[int] = field(default_factory=list)
    open: list[Use] = field(default_factory=list)
    # The oldest use that this backward may visit, and the last one it visited.
    first: Use = Use(0, 0)
    visited: Use = Use(0, 0)
    # All gradients of the unit on this rank arrived.
    settled: bool = False


@dataclass(slots=True, eq=False, repr=False)
class Joining:
    """Says whose messages a rank joins that leaves optional units out (optional.py)."""

    # Whether the unit, or one around it, is optional.
    is_optional: bool
    # The last index below the unit's module.
    last: int
    # Whether it was unsharded, and its shards were written since, when the outermost forward began.
    is_stale: bool = False
    # Optional units that come before this one in the model, beside it or beside one around it.
    before: tuple[UnitRecord, ...] = ()
    # Whether it had its use in this forward of the unit around it.
    ran: bool = False
    # Running forwards that belong to a use that is over (a second run in one forward of the unit around it).
    again: int = 0


class UnitRecord:
    """The state of one unit, written by the rules alone; `plan` is what they read."""

    __slots__ = (
        "empty",
        "full",
        "in_backward",
        "index",
        "joining",
        "name",
        "pass_open",
        "pass_outputs",
        "phase",
        "pins",
        "plan",
        "sending",
        "uses",
    )

    def __init__(self, name: str, index: int, *, reshard_after_forward: bool = True) -> None:
        self.name = name
        # Position in `RunRecord.units`; the root is 0.
        self.index = index
        # Whether it has no parameters: it takes part in the step, but is never gathered.
        self.empty = False
        self.plan = UnitPlan(reshard_after_forward=reshard_after_forward)
        self.full = Full.SHARDED
        self.phase = Phase.IDLE
        # Whether its backward runs: from the first output gradient until the end of that backward. A forward in between
        # is recomputation.
        self.in_backward = False
        # Whether, of several modules of the unit, some ran and others may follow in the same use; whether an output of
        # those that ran requires a gradient.
        self.pass_open = False
        self.pass_outputs = False
        # Positions in `RunRecord.order` of forwards without their backward yet, oldest first.
        self.uses: list[int] = []
        self.pins = Pins()
        self.sending = Sending()
        # None in a model without optional units.
        self.joining: Joining | None = None

    def __repr__(self) -> str:
        return f"<unit {self.name} {self.full.name} {self.phase.name}>"


@dataclass(slots=True, eq=False, repr=False)
class OptionalUses:
    """The uses of optional units, which every rank visits in backward (optional.py)."""

    # Whether the running outermost forward has gradients.
    records: bool = False
    # The uses whose backward may come, by their ends; how many there were when the outermost forward began; whether the
    # step with them is over, and the next forward with gradients begins anew.
    uses: list[tuple[UnitRecord, Use]] = field(default_factory=list)
    mark: int = 0
    is_over: bool = False
    # The clock at the begin of each outermost forward of these uses; where each of the running order starts there.
    begins: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    # Uses that the running backward has left, and which of the forwards it reached.
    left: list[tuple[UnitRecord, Use]] = field(default_factory=list)
    reached: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False, repr=False)
class Owed:
    """Messages of gradients that were not sent yet (order.py)."""

    # Number of ended forwards; end of the last use that backward visited; units that owe a message, in order.
    clock: int = 0
    frontier: int = NOWHERE
    units: list[UnitRecord] = field(default_factory=list)
    optional: OptionalUses = field(default_factory=OptionalUses)


class Ending:
    """When a backward hands its gradients over: at its end, or at the user's `finalize_backward`."""

    __slots__ = ("active", "is_last", "manual", "sent", "waits")

    def __init__(self) -> None:
        # False: a later backward of the same step will use the leftovers of this one.
        self.is_last = True
        # The user's setting: gradients are handed over by `finalize_backward` alone.
        self.manual = False
        # The setting under which the running step began its first backward; None: no backward since the last one
        # that handed over.
        self.active: bool | None = None
        # Messages were sent that nothing waited for yet; the wait is left to the handle of `finalize_backward`.
        self.sent = self.waits = False

    @property
    def is_manual(self) -> bool:
        """The setting that holds for the running step."""
        return self.manual if self.active is None else self.active

    @property
    def ends_step(self) -> bool:
        """Whether the end of the running backward is that of the step, so that its order and prefetches are over."""
        return self.is_last and not (self.manual if self.active is None else self.active)

    def step_is_over(self) -> None:
        """Gradients were handed over, or a failed step was discarded."""
        self.active = None
        self.sent = self.waits = False


class RunRecord:
    """The state of all units of one root."""

    __slots__ = (
        "ending",
        "forward_log",
        "forward_plan",
        "forward_plans",
        "forward_root",
        "generation",
        "in_backward",
        "keep_full",
        "open_passes",
        "order",
        "order_mark",
        "owed",
        "prefetch_depth",
        "prefetch_nbytes",
        "units",
    )

    def __init__(self, units: list[UnitRecord], *, prefetch_depth: int = 1) -> None:
        # Root first, then in the order of `model.modules()`.
        self.units = units
        # How many units a forward prefetches along the recorded order. 0: gather when needed, as FSDP2 on a CPU.
        self.prefetch_depth = prefetch_depth
        # Byte limit of prefetched gathers, instead of the depth and in backward too; None: no such limit.
        self.prefetch_nbytes: int | None = None
        # The unit of the outermost running forward, or None.
        self.forward_root: UnitRecord | None = None
        # Units in the order in which forwards ended, once for each use, since the last backward ended.
        self.order: list[UnitRecord] = []
        # Length of `order` when the outermost forward began.
        self.order_mark = 0
        # Units with an open pass (`UnitRecord.pass_open`), in the order in which these began.
        self.open_passes: list[UnitRecord] = []
        # Units in the order in which forwards began: in this pass; in the previous complete pass that began with the
        # same unit; and all such passes, by the index of their first unit.
        self.forward_log: list[UnitRecord] = []
        self.forward_plan: list[UnitRecord] = []
        self.forward_plans: dict[int, list[UnitRecord]] = {}
        self.owed = Owed()
        self.in_backward = False
        self.ending = Ending()
        # The running backward builds a graph (create_graph), whose own backward will need the weights.
        self.keep_full = False
        # Counts the times that leftovers of a failed step were discarded.
        self.generation = 0

    def refuse_forward(self, unit: UnitRecord) -> None:
        """[R47] Ranks did different things in the outermost forward, of `unit`, that is over: like one that raised, it
        leaves leftovers, and the next one discards the order that it recorded."""
        self.forward_root = unit

    @property
    def has_leftovers(self) -> bool:
        """Whether a step began and did not finish. Only meaningful while no step can be running."""
        return self.forward_root is not None or self.in_backward


# ---- pins ------------------------------------------------------------------------------------------------------------
# Full parameters that must stay in memory after their forward, or after a backward.
#
#     running    a forward of the unit continues: a backward inside of it (forces, a learning rule) does not end its use
#     pins       later backwards through graphs that hold weights and report nothing: recorded by a backward
#                (`create_graph`), or where saved tensors cannot be watched (torch.func transforms)
#
# The backward it waits for removes a pin: one that brings gradients and frees its graph. Without such a backward, or if
# one serves several forwards, the pin is removed when the shards change, or by `reshard()`. Pinned memory is SHELVED,
# because users must find sharded parameters at any time.

_THERE = (Full.FULL, Full.SHELVED)


def pin(unit: UnitRecord) -> None:
    """Expect a backward through a graph without reports: one pin for all such graphs of one forward."""
    if unit.full in _THERE and (unit.pins.used or not unit.pins.count):
        unit.pins.count += 1
        unit.pins.used = False


def settle_pins(run: RunRecord, unit: UnitRecord, *, spent: bool, present: bool) -> bool:
    """A backward is over. `spent`: it brought gradients and freed its graph. `present`: `unit` has gradients.

    Returns whether to shelve the unit now."""
    if run.keep_full:
        pin(unit)
    elif unit.pins.count and spent and (present or unit.pins.brought or unit.in_backward):
        unit.pins.count -= 1
    unit.pins.brought = False
    return (
        bool(unit.pins.count) and unit.full is Full.FULL and unit.plan.reshard_after_backward and not unit.pins.running
    )


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
