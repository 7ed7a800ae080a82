"""Finds what a pipeline takes and holds at least, by a walk through its table with whole passes instead of spans.

Each rank does its actions in order, as in `simulate_pipeline`, and nothing takes longer or holds more than there:

seconds    kernels of a pass and messages of divided layers, or the host's launches; gathers that a pass waits for;
           messages between stages; reductions; the optimizer. Not: what messages take from compute, copies of messages
bytes      shards and state, buffers, what was received, full parameters and held gradients between passes, what open
           micro-batches hold, and the most of each pass. Not: staging, messages
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .clock import Clock
from .machine import Hardware
from .pipeline import (
    BACKWARD,
    FORWARD,
    INPUTS,
    REDUCE,
    RESHARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    SENT,
    UNSHARD,
    WEIGHTS,
    Action,
    StageStep,
    Table,
)
from .simulation import itemsize_of
from .spans import Span
from .strategy import Group, Strategy, Unit


class Least(NamedTuple):
    """The seconds of a step, and the bytes of the rank that has most, on its device as they are counted and on the
    host."""

    seconds: float
    device: float
    host: float


class _Pass(NamedTuple):
    """A forward or a backward. `launching`: seconds of the host; `most`: activations and new gradients when there is
    most of them; `end`: activations at the end; `came`: bytes of new gradients."""

    seconds: float
    launching: float
    most: float
    end: float
    came: float


def _pass(spans: Iterable[Span], clock: Clock, strategy: Strategy, elsewhere: float = 0.0, *, apart: bool) -> _Pass:
    """`elsewhere`: bytes of activations that are counted elsewhere; `apart`: gradients of inputs and of weights are
    not computed together, and new ones are not counted."""
    seconds = launching = most = end = came = 0.0
    for span in spans:
        seconds += clock.seconds(span.work)
        seconds += sum(clock.alone(message, *strategy.group(message.axis)) for message in span.messages)
        launching += clock.launching(span.work)
        new = 0.0 if apart else sum(nbytes for _, nbytes in span.gradients)
        end = max(span.end - elsewhere, 0.0)
        most = max(most, came + new * span.ready + max(span.peak - elsewhere, 0.0), came + new + end)
        came += new
    return _Pass(seconds, launching, most, end, came)


@dataclass
class _Stage:
    """A stage on its rank: its passes by kind, and what changes as they run. `gather`: seconds until a sharded stage
    has all parameters; `again`: until one has them again that a forward freed; `held_nbytes`, `full_nbytes`: of
    gradients between backwards, and of full parameters that forwards keep, and that backwards leave."""

    passes: dict[str, _Pass]
    gather: float
    again: float
    reduce: float
    held_nbytes: float
    kept_nbytes: float
    left_nbytes: float
    aside: float
    given: float
    made: float
    next_is_here: bool
    previous_is_here: bool
    is_last: bool
    is_full = False
    is_freed = False
    holds = False
    full = 0.0
    open = 0

    @property
    def held(self) -> float:
        return self.held_nbytes * self.holds

    @property
    def between(self) -> float:
        """Bytes between passes."""
        return self.full + self.held + self.open * self.aside

    def seconds(self, kind: str) -> float:
        """Seconds of the next pass, which waits for parameters that are not full."""
        found = self.passes[kind].seconds
        if not self.is_full:
            found = max(found, self.gather)
        elif self.is_freed:
            found = max(found, self.again)
        return found

    def run(self, kind: str) -> float:
        """Do a pass; the most bytes while it runs."""
        done = self.passes[kind]
        if kind == FORWARD:
            most = self.between + done.most
            self.open += 1
            self.full = self.kept_nbytes
        else:
            # What is left for gradients of weights apart is not counted between passes.
            self.open -= kind != WEIGHTS
            most = self.between + done.most
            whole = kind == BACKWARD
            self.full = max(self.left_nbytes, self.full) if whole else self.full
            most = max(most, self.between + (done.came + done.end if whole else 0.0))
            self.holds = self.holds or whole
        self.is_full, self.is_freed = True, kind == FORWARD
        return max(most, self.between)


def _stage(number: int, own: set[int], last: int, stage: StageStep, strategy: Strategy, clock: Clock) -> _Stage:
    hardware, units = clock.hardware, stage.units
    next_is_here, previous_is_here = number + 1 in own, number - 1 in own
    parts, halves = stage.step.parts(), () if stage.halves is None else stage.halves.parts()
    splits = stage.halves is not None
    given = stage.given_nbytes if number else 0.0
    elsewhere = stage.made_nbytes if next_is_here else 0.0
    spans = {FORWARD: parts[0], BACKWARD: parts[1]} | dict(zip((INPUTS, WEIGHTS), halves[1:], strict=False))
    passes = {
        kind: _pass(
            each,
            clock,
            strategy,
            {FORWARD: 0.0, WEIGHTS: elsewhere + given}.get(kind, elsewhere),
            apart=splits,
        )
        for kind, each in spans.items()
    }
    # Of a schedule that computes gradients of weights apart, no hook reports them: they are not counted here.
    trained = [units[index] for index in {index for span in stage.step.spans for index, _ in span.gradients}]
    if splits:
        trained = []
    held = sum(_held(group) for unit in trained for group in unit.groups)
    # Each backward adds to them.
    added = passes[BACKWARD].seconds + 2 * held / (hardware.bandwidth * hardware.stream)
    passes[BACKWARD] = passes[BACKWARD]._replace(seconds=added)
    gathers = [sum(_gather(group, strategy, hardware) for group in unit.groups) for unit in units]
    freed = sorted(s for s, unit in zip(gathers, units, strict=True) if not unit.keeps and not unit.part)
    # Those that are gathered ahead in the pass before are full, or under way.
    again = sum(freed[: len(freed) - strategy.prefetch_depth])
    shared = [_reduce(group, strategy, hardware) for unit in trained for group in unit.groups]
    return _Stage(
        passes,
        sum(gathers),
        again,
        max(sum(each[place] for each in shared) for place in (0, 1)) if shared else 0.0,
        held,
        sum(_full(unit) for unit in units if unit.keeps),
        sum(_full(unit) for unit in units if unit.keeps or unit in trained),
        max(passes[FORWARD].end - elsewhere, 0.0),
        given,
        stage.made_nbytes,
        next_is_here,
        previous_is_here,
        number == last,
    )


def _full(unit: Unit) -> float:
    return sum(group.memory.transient_nbytes for group in unit.groups)


def _held(group: Group) -> float:
    sent = group.sent
    return 0.0 if sent is None else float(sum(s.layout.numel for s in sent.pack.segments) * sent.held_itemsize)


def _gather(group: Group, strategy: Strategy, hardware: Hardware) -> float:
    ranks = group.memory.pack.world
    if ranks == 1 or not group.gather_calls:
        return 0.0
    return hardware.collective("all-gather", ranks, strategy.stride(ranks), group.gathered_nbytes)


def _reduce(group: Group, strategy: Strategy, hardware: Hardware) -> tuple[float, float]:
    """Seconds of the messages of a reduction, over the shards and among the replicas."""
    sent, shared, copied = group.sent, 0.0, 0.0
    if sent is not None and sent.pack.world > 1 and group.reduce_calls:
        kind, ranks = "all-to-all" if sent.exchanges else "reduce-scatter", sent.pack.world
        shared = hardware.collective(kind, ranks, strategy.stride(ranks), group.reduced_message_nbytes)
    if sent is not None and sent.replicas > 1:
        apart, nbytes = strategy.shard * strategy.tensor, group.replicated_message_nbytes
        copied = hardware.collective("all-reduce", sent.replicas, apart, nbytes)
    return shared, copied


class _Row:
    """A rank: its actions, its clocks, and its bytes."""

    def __init__(self, row: Sequence[Action], stages: Sequence[StageStep], strategy: Strategy, hardware: Hardware):
        self.row, self.strategy = row, strategy
        own = {action.stage for action in row}
        itemsize = itemsize_of(stages[min(own)].units, strategy)
        self.clock = Clock(hardware, itemsize, compiled=strategy.compiled, float8=strategy.float8)
        last = len(stages) - 1
        self.stages = {n: _stage(n, own, last, stages[n], strategy, self.clock) for n in sorted(own)}
        units = [unit for n in self.stages for unit in stages[n].units]
        groups = [group for unit in units for group in unit.groups]
        rest = float(sum(group.memory.shard_nbytes + group.state_nbytes for group in groups))
        received = sum(each.given + (0.0 if each.is_last else each.made) for each in self.stages.values())
        counted = sum(stages[n].buffer_nbytes for n in own) + sum(unit.staying_nbytes for unit in units)
        counted += strategy.accumulate * (stages[min(own)].batch_nbytes + received)
        self.host_nbytes = rest * strategy.offload
        self.counted = self.most = counted + rest * (not strategy.offload)
        self.stepping = self._stepping(groups)
        # Gathers that the table asks for run beside what comes before them.
        self.asks = any(action.kind in (UNSHARD, RESHARD) for action in row)
        self.now = self.host = self.free = self.latest = 0.0
        self.place = 0
        seconds = hardware.collective
        stride = strategy.group("pp")[1]
        self.sending = {
            (kind, n): seconds("send", 2, stride, each.made if kind == SEND_FORWARD else each.given)
            for n, each in self.stages.items()
            for kind in (SEND_FORWARD, SEND_BACKWARD)
        }

    def _stepping(self, groups: Sequence[Group]) -> float:
        """Seconds in which the optimizer reads and writes."""
        hardware, strategy = self.clock.hardware, self.strategy
        if strategy.optimizer == "none":
            return 0.0
        rate = hardware.host if strategy.offload else hardware.bandwidth * hardware.stream
        moved = sum(3 * g.sent.reduced_nbytes + 2 * g.state_nbytes for g in groups if g.sent is not None)
        return moved / rate

    def run(self, arrivals: dict[Hashable, float]) -> bool:
        """Actions until one needs what is not sent yet; whether there was any."""
        begun, row, blocking = self.place, self.row, self.clock.hardware.blocking
        while self.place < len(row):
            kind, number, micro = row[self.place]
            stage = self.stages[number]
            if kind in (FORWARD, BACKWARD, INPUTS, WEIGHTS):
                needs: Hashable = None
                if kind == FORWARD and number and not stage.previous_is_here:
                    needs = SEND_FORWARD, number, micro
                elif kind in (BACKWARD, INPUTS) and not stage.is_last and not stage.next_is_here:
                    needs = SEND_BACKWARD, number, micro
                if needs is not None:
                    if needs not in arrivals:
                        break
                    self.now = max(self.now, arrivals[needs])
                launching = stage.passes[kind].launching
                self.host += launching
                taken = stage.passes[kind].seconds if self.asks else stage.seconds(kind)
                self.now = self.now + taken + launching if blocking else max(self.now + taken, self.host)
                others = sum(other.between for n, other in self.stages.items() if n != number)
                self.most = max(self.most, self.counted + others + stage.run(kind))
            elif kind in (SEND_FORWARD, SEND_BACKWARD):
                self.free = max(self.free, self.now) + self.sending[kind, number]
                self.latest = self.free
                arrivals[kind, number + (1 if kind == SEND_FORWARD else -1), micro] = self.latest
            elif kind == SENT:
                self.now = max(self.now, self.latest)
            elif kind == REDUCE:
                self.now += stage.reduce
                stage.full, stage.holds, stage.is_full = 0.0, False, False
            elif kind == RESHARD:
                stage.full = 0.0
            self.place += 1
        return self.place > begun


def least_of(stages: Sequence[StageStep], table: Table, strategy: Strategy, hardware: Hardware) -> Least:
    """The least of a steady step of a pipeline; its seconds are infinite if the table does not end."""
    rows = [_Row(row, stages, strategy, hardware) for row in table]
    arrivals: dict[Hashable, float] = {}
    while any([row.run(arrivals) for row in rows]):
        pass
    over = max(row.now for row in rows)
    seconds = over + max(row.stepping for row in rows)
    if any(row.place < len(row.row) for row in rows):
        seconds = math.inf
    # Sums are rounded.
    return Least(seconds * (1 - 1e-9), max(row.most for row in rows) * (1 - 1e-9), max(row.host_nbytes for row in rows))
