"""The record of one unit and of one run: everything the rules know, and nothing else.

`full` says where the full parameters are. These are all the legal transitions, and who makes them:

    from       to         command   meaning
    SHARDED    PENDING    gather    an all-gather was issued; nothing may be computed with the result yet
    PENDING    FULL       wait      the result is there and stands on the modules
    PENDING    SHARDED    drop      gathered but never needed; the result is thrown away
    FULL       SHARDED    free      the memory is given back, the sharded parameters stand on the modules again
    FULL       SHELVED    shelve    the sharded parameters stand on the modules, the memory is kept for a next use
    SHELVED    FULL       expose    the kept full parameters stand on the modules again
    SHELVED    SHARDED    free
    FULL       NARROWED   narrow    this rank's part among k ranks is kept, the rest of the memory is given back
    NARROWED   PENDING    widen     an all-gather of these parts over the k ranks was issued
    NARROWED   NARROWED   shelve    the sharded parameters stand on the modules in the place of the kept parts
    NARROWED   SHARDED    free      the kept parts are given up

`phase` says which part of a step the unit is in:

    IDLE       between its forward and its backward, or outside of a step
    FORWARD    its forward is running
    BACKWARD   its backward is running: the gradient of an output arrived, those of the parameters have not
    DONE       the gradients of this use were handed over; another use in the same backward makes it BACKWARD again

The records are mutable and slotted: a rule costs under a microsecond (ADR 0001).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Full(IntEnum):
    """Where the full parameters of a unit are."""

    SHARDED = 0
    PENDING = 1
    FULL = 2
    SHELVED = 3
    NARROWED = 4


class Phase(IntEnum):
    """Which part of a step a unit is in."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2
    DONE = 3


class Use(NamedTuple):
    """One forward of a unit, by the clock of the run: how many forwards had ended when it began and when it ended."""

    begin: int
    end: int


# Behind every use: no backward began.
NOWHERE = 1 << 62


class UnitRecord:
    """What the rules know of one unit. Written by the rules alone; the settings at the bottom by the user's calls."""

    __slots__ = (
        "backward_prefetch",
        "begins",
        "brought",
        "empty",
        "first",
        "forward_prefetch",
        "frees_late",
        "full",
        "gather_nbytes",
        "gathers_in_backward",
        "in_backward",
        "index",
        "inputs_hooked",
        "keeps_in_evaluation",
        "name",
        "narrows",
        "open",
        "pass_open",
        "pass_outputs",
        "phase",
        "pins",
        "reshard_after_backward",
        "reshard_after_forward",
        "resident",
        "running",
        "settled",
        "sync",
        "trainable",
        "used",
        "uses",
        "visited",
    )

    def __init__(self, name: str, index: int, *, reshard_after_forward: bool = True) -> None:
        self.name = name
        # Position in `RunRecord.units`; the root is 0.
        self.index = index
        # A unit without parameters takes part in the step, but there is nothing to gather.
        self.empty = False
        self.full = Full.SHARDED
        self.phase = Phase.IDLE
        # From the first gradient of an output until the end of that backward: a forward in between is recomputation.
        self.in_backward = False
        # Whether this use of the unit will report `inputs_reached`.
        self.inputs_hooked = False
        # A unit of several modules: some ran and others may follow in the same use; whether an output of those that
        # ran requires a gradient.
        self.pass_open = False
        self.pass_outputs = False
        # Positions in `RunRecord.order` of the forwards that wait for their backward, oldest first.
        self.uses: list[int] = []
        # ---- what stays in memory: a forward of its own is running; backwards to come that report nothing; a
        # forward ran since the last of these was noted; gradients came in the running backward.
        self.running = False
        self.pins = 0
        self.used = self.brought = False
        # ---- when to send (order.py): the clock at the beginnings of forwards that are running,
        self.begins: list[int] = []
        # forwards whose backward may come, oldest first,
        self.open: list[Use] = []
        # the oldest one that this backward may visit, the one it visited last,
        self.first = self.visited = Use(0, 0)
        # and whether all gradients that it brings on this rank are there.
        self.settled = False
        # ---- settings
        self.reshard_after_forward = reshard_after_forward
        # An integer reshard_after_forward: what is freed after forward keeps a part, to be gathered from fewer ranks.
        self.narrows = False
        # There is memory for it to stay full between forward and backward; and from step to step where it is frozen.
        self.resident = False
        # Bytes that a gather takes, messages included; the same on every rank.
        self.gather_nbytes = 0
        self.reshard_after_backward = True
        # Whether a unit that is not freed after forward stays full also when no backward can follow.
        self.keeps_in_evaluation = True
        # Whether gradients are reduced at the end of this backward or kept until one that does.
        self.sync = True
        # Whether a backward reads the unit's weights; False is the user's word.
        self.gathers_in_backward = True
        # Some parameter gets gradients.
        self.trainable = True
        # Some parameters get no gradient, so "all gradients are ready" does not say that all weights were used.
        self.frees_late = False
        # Units to gather when this one's forward begins, instead of the recorded order; likewise in backward.
        self.forward_prefetch: tuple[UnitRecord, ...] = ()
        self.backward_prefetch: tuple[UnitRecord, ...] = ()

    def __repr__(self) -> str:
        return f"<unit {self.name} {self.full.name} {self.phase.name}>"


class RunRecord:
    """What the rules know of all units below one root."""

    __slots__ = (
        "clock",
        "forward_log",
        "forward_plan",
        "forward_plans",
        "forward_root",
        "frontier",
        "generation",
        "in_backward",
        "is_last_backward",
        "keep_full",
        "open_passes",
        "order",
        "order_mark",
        "owing",
        "prefetch_depth",
        "prefetch_nbytes",
        "units",
    )

    def __init__(self, units: list[UnitRecord], *, prefetch_depth: int = 1) -> None:
        # Root first, then in the order of `model.modules()`.
        self.units = units
        # How many units ahead a forward gathers along the recorded order. 0: gather when needed, as FSDP2 on a CPU.
        self.prefetch_depth = prefetch_depth
        # In its place, and in backward too: how many bytes of gathers may be ahead; None: no such limit.
        self.prefetch_nbytes: int | None = None
        # The unit whose forward is the outermost one running, or None.
        self.forward_root: UnitRecord | None = None
        # Units in the order in which forwards ended, once for each use, since the last backward ended.
        self.order: list[UnitRecord] = []
        # Length of `order` when the outermost forward began.
        self.order_mark = 0
        # Units with an open pass (`UnitRecord.pass_open`), in the order in which these began.
        self.open_passes: list[UnitRecord] = []
        # Units in the order in which the forwards of this pass began, and of the previous complete pass that began
        # with the same unit; all of these, by the index of the unit they began with.
        self.forward_log: list[UnitRecord] = []
        self.forward_plan: list[UnitRecord] = []
        self.forward_plans: dict[int, list[UnitRecord]] = {}
        # How many forwards ended; the end of the last use that the backward visited; units that have to send, in order.
        self.clock = 0
        self.frontier = NOWHERE
        self.owing: list[UnitRecord] = []
        self.in_backward = False
        # False: a later backward of the same step will still use what this one leaves behind.
        self.is_last_backward = True
        # A backward that builds a graph of its own (create_graph) will be followed by one that needs the weights.
        self.keep_full = False
        # Counts the times that leftovers of a failed step were discarded.
        self.generation = 0

    @property
    def has_leftovers(self) -> bool:
        """Whether a step began and did not come to its end. Only meaningful where no step can be running."""
        return self.forward_root is not None or self.in_backward


# ---- pins ------------------------------------------------------------------------------------------------------------
# Which full parameters have to stay in memory although their forward, or a backward, is over.
#
#     running    a forward of the unit continues: a backward inside of it (forces, a learning rule) does not end its use
#     pins       backwards to come through graphs that hold weights and report nothing: those that a backward recorded
#                (`create_graph`), and those made where saved tensors cannot be watched (transforms of torch.func)
#
# A pin goes with the backward that it waits for: one that brings gradients and does not keep its graph. Where there is
# no such backward, or one serves several forwards, it goes when the shards change, or with `reshard()`. Pinned memory
# is put aside (SHELVED), because users have to find sharded parameters at any time.

_THERE = (Full.FULL, Full.SHELVED)


def pin(unit: UnitRecord) -> None:
    """A backward through a graph that reports nothing will follow: one for all such graphs of one forward."""
    if unit.full in _THERE and (unit.used or not unit.pins):
        unit.pins += 1
        unit.used = False


def settle_pins(run: RunRecord, unit: UnitRecord, *, spent: bool, present: bool) -> bool:
    """A backward is over. `spent`: gradients came, and its graph is gone. `present`: `unit` has some.

    Whether its memory is to be put aside now."""
    if run.keep_full:
        pin(unit)
    elif unit.pins and spent and (present or unit.brought or unit.in_backward):
        unit.pins -= 1
    unit.brought = False
    return bool(unit.pins) and unit.full is Full.FULL and unit.reshard_after_backward and not unit.running


def is_held(run: RunRecord, unit: UnitRecord) -> bool:
    """Whether the weights of `unit` are read after the backward that runs."""
    return run.keep_full or unit.running or unit.pins > 0
