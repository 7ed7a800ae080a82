"""Finds what a pipeline takes and holds at least, by a walk through its table with whole passes instead of spans, and
before that without its table.

Each rank does its actions in order, as in `simulate_pipeline`, and nothing takes longer or holds more than there:

seconds    kernels of a pass and messages of divided layers, or the host's launches; gathers that a pass waits for;
           messages between stages; reductions; the optimizer. Not: what messages take from compute, copies of messages
bytes      shards and state, buffers, what was received, full parameters and held gradients between passes, what open
           micro-batches hold, and the most of each pass. Not: staging, messages

Without a table it is known that each micro-batch goes through all stages and back. A rank has one stage or, if it has
several, as much as the mean of all ranks at least; what it holds for other micro-batches is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
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
    """A forward or a backward. `launching`: seconds of the host beside the device; `most`: activations and new
    gradients when there is most of them; `end`: activations at the end; `came`: bytes of new gradients."""

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
    if clock.hardware.blocking:
        seconds, launching = seconds + launching, 0.0
    return _Pass(seconds, launching, most, end, came)


@dataclass
class _Stage:
    """A stage on its rank: its passes by kind, and what changes as they run. `gather`: seconds until a sharded stage
    has all parameters; `again`: until one has them again that a forward freed; `held_nbytes`, `full_nbytes`: of
    gradients between backwards, and of full parameters that forwards keep, and that backwards leave. `rest`: bytes of
    shards and state; `stays`: of what else is there all the time; `stepping`: seconds in which the optimizer reads and
    writes."""

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
    rest: float
    stays: float
    stepping: float
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


# Passes of a stage by kind, and the units whose gradients come in its backward.
_Passes = tuple[dict[str, _Pass], tuple[int, ...]]
# Those of stages that are alike, which have one step.
_Known = dict[tuple[object, ...], _Passes]


def _passes(
    stage: StageStep, strategy: Strategy, clock: Clock, known: _Known, elsewhere: float, given: float
) -> _Passes:
    key = (id(stage.step), id(stage.halves), clock.itemsize, elsewhere, given)
    if key not in known:
        parts, halves = stage.step.parts(), () if stage.halves is None else stage.halves.parts()
        spans = {FORWARD: parts[0], BACKWARD: parts[1]} | dict(zip((INPUTS, WEIGHTS), halves[1:], strict=False))
        less = {FORWARD: 0.0, WEIGHTS: elsewhere + given}
        apart = stage.halves is not None
        passes = {
            kind: _pass(each, clock, strategy, less.get(kind, elsewhere), apart=apart) for kind, each in spans.items()
        }
        known[key] = passes, tuple({index for span in stage.step.spans for index, _ in span.gradients})
    return known[key]


def _stage(
    number: int, own: set[int], last: int, stage: StageStep, strategy: Strategy, clock: Clock, known: _Known
) -> _Stage:
    hardware, units = clock.hardware, stage.units
    next_is_here, previous_is_here = number + 1 in own, number - 1 in own
    given = stage.given_nbytes if number else 0.0
    elsewhere = stage.made_nbytes if next_is_here else 0.0
    passes, come = _passes(stage, strategy, clock, known, elsewhere, given)
    # Of a schedule that computes gradients of weights apart, no hook reports them: they are not counted here.
    trained = [] if stage.halves is not None else [units[index] for index in come]
    held = sum(_held(group) for unit in trained for group in unit.groups)
    # Each backward adds to them.
    added = passes[BACKWARD].seconds + 2 * held / (hardware.bandwidth * hardware.stream)
    passes = passes | {BACKWARD: passes[BACKWARD]._replace(seconds=added)}
    gathers = [sum(_gather(group, strategy, hardware) for group in unit.groups) for unit in units]
    freed = sorted(s for s, unit in zip(gathers, units, strict=True) if not unit.keeps and not unit.part)
    # Those that are gathered ahead in the pass before are full, or under way.
    again = sum(freed[: max(len(freed) - strategy.prefetch_depth, 0)])
    shared = [_reduce(group, strategy, hardware) for unit in trained for group in unit.groups]
    groups = [group for unit in units for group in unit.groups]
    received = given + (0.0 if number == last else stage.made_nbytes)
    stays = stage.buffer_nbytes + sum(unit.staying_nbytes for unit in units) + strategy.accumulate * received
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
        float(sum(group.memory.shard_nbytes + group.state_nbytes for group in groups)),
        stays,
        _stepping(groups, strategy, hardware),
    )


def _stepping(groups: Sequence[Group], strategy: Strategy, hardware: Hardware) -> float:
    if strategy.optimizer == "none":
        return 0.0
    rate = hardware.host if strategy.offload else hardware.step_rate
    launching = hardware.step_launch * sum(len(g.stepped) for g in groups if g.sent is not None)
    return sum(3 * g.sent.reduced_nbytes + 2 * g.state_nbytes for g in groups if g.sent is not None) / rate + launching


def _clock(units: Sequence[Unit], strategy: Strategy, hardware: Hardware) -> Clock:
    itemsize = itemsize_of(units, strategy)
    return Clock(hardware, itemsize, compiled=strategy.compiled, float8=strategy.float8)


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

    def __init__(
        self, row: Sequence[Action], stages: Sequence[StageStep], strategy: Strategy, hardware: Hardware, known: _Known
    ):
        self.row = row
        own = {action.stage for action in row}
        first, last = stages[min(own)], len(stages) - 1
        self.clock = _clock(first.units, strategy, hardware)
        self.stages = {n: _stage(n, own, last, stages[n], strategy, self.clock, known) for n in sorted(own)}
        there = self.stages.values()
        rest = sum(each.rest for each in there)
        self.host_nbytes = rest * strategy.offload
        self.counted = sum(each.stays for each in there) + strategy.accumulate * first.batch_nbytes
        self.counted += rest * (not strategy.offload)
        self.most = self.counted
        self.stepping = sum(each.stepping for each in there)
        # Gathers that the table asks for run beside what comes before them.
        self.asks = any(action.kind in (UNSHARD, RESHARD) for action in row)
        self.now = self.host = self.free = self.latest = 0.0
        self.place = 0
        self.sending = {
            (kind, n): _sending(each.made if kind == SEND_FORWARD else each.given, strategy, hardware)
            for n, each in self.stages.items()
            for kind in (SEND_FORWARD, SEND_BACKWARD)
        }

    def run(self, arrivals: dict[Hashable, float]) -> bool:
        """Actions until one needs what is not sent yet; whether there was any."""
        begun, row = self.place, self.row
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
                self.host += stage.passes[kind].launching
                taken = stage.passes[kind].seconds if self.asks else stage.seconds(kind)
                self.now = max(self.now + taken, self.host)
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


def _sending(nbytes: float, strategy: Strategy, hardware: Hardware) -> float:
    return hardware.collective("send", 2, strategy.group("pp")[1], nbytes)


def least_of(stages: Sequence[StageStep], table: Table, strategy: Strategy, hardware: Hardware) -> Least:
    """The least of a steady step of a pipeline; its seconds are infinite if the table does not end."""
    known: _Known = {}
    rows = [_Row(row, stages, strategy, hardware, known) for row in table]
    arrivals: dict[Hashable, float] = {}
    while any([row.run(arrivals) for row in rows]):
        pass
    over = max(row.now for row in rows)
    seconds = over + max(row.stepping for row in rows)
    if any(row.place < len(row.row) for row in rows):
        seconds = math.inf
    # Sums are rounded.
    return Least(seconds * (1 - 1e-9), max(row.most for row in rows) * (1 - 1e-9), max(row.host_nbytes for row in rows))


# ---- without a table -------------------------------------------------------------------------------------------------


# Those that run stages as `_one_f_one_b` and `_gpipe` write them: one on a rank, its gradients reduced at the end.
_ALONE = ("1F1B", "GPipe")


def floor_of(stages: Sequence[StageStep], strategy: Strategy, hardware: Hardware) -> Least:
    """No more than `least_of` finds with the table of the schedule of `strategy`, in less time."""
    known: _Known = {}
    last, alone = len(stages) - 1, strategy.schedule in _ALONE
    clock = _clock(stages[0].units, strategy, hardware)
    # With several stages on a rank, those beside a stage may be there, too.
    there = [
        _stage(n, {n} if alone else {n - 1, n, n + 1}, last, each, strategy, clock, known)
        for n, each in enumerate(stages)
    ]
    micros, ranks = strategy.accumulate, strategy.pipeline
    taken = [micros * _taken(each, alone=alone) for each in there]
    launched = [micros * _both(each, lambda done: done.launching) for each in there]
    over = max(*taken, *launched, sum(taken) / ranks, sum(launched) / ranks)
    if alone:
        over = max(over, _filled(there, taken, strategy, hardware))
    stays = [each.stays + each.rest * (not strategy.offload) for each in there]
    active = [_active(each, micros, _opened(n, strategy), alone=alone) for n, each in enumerate(there)]
    device = max(sum(stays) / ranks + min(active), *(one + other for one, other in zip(stays, active, strict=True)))
    device += micros * stages[0].batch_nbytes
    rests = [each.rest for each in there]
    host = max(sum(rests) / ranks, *rests) * strategy.offload
    seconds = over + max(each.stepping for each in there)
    return Least(seconds * (1 - 1e-8), device * (1 - 1e-8), host * (1 - 1e-8))


def _both(stage: _Stage, of: Callable[[_Pass], float]) -> float:
    """Returns what a micro-batch takes of a forward, and of a whole backward or its halves."""
    forward, *backward = (of(stage.passes[kind]) for kind in (FORWARD, BACKWARD))
    if INPUTS in stage.passes:
        backward.append(of(stage.passes[INPUTS]) + of(stage.passes[WEIGHTS]))
    return forward + min(backward)


def _taken(stage: _Stage, *, alone: bool) -> float:
    """Seconds of a micro-batch on its stage. The pass after each forward waits for parameters that this one freed."""
    both = _both(stage, lambda done: done.seconds)
    longest = max(stage.passes[kind].seconds for kind in (FORWARD, BACKWARD))
    return both + max(stage.again - longest, 0.0) * alone


def _filled(there: Sequence[_Stage], taken: Sequence[float], strategy: Strategy, hardware: Hardware) -> float:
    """Seconds until the reductions are over. Before a stage begins, the first micro-batch comes through those before
    it; after it ends, the last one goes back through them."""
    found = coming = going = 0.0
    for number, stage in enumerate(there):
        if number:
            coming += _sending(there[number - 1].made, strategy, hardware)
            going += _sending(stage.given, strategy, hardware)
        found = max(found, coming + taken[number] + max(stage.reduce, (going + there[0].reduce) * (number > 0)))
        coming += stage.passes[FORWARD].seconds
        going += stage.passes[BACKWARD].seconds
    return found


def _opened(number: int, strategy: Strategy) -> int:
    """Micro-batches whose backward is not over, at most, where the schedule is known to have as many."""
    there = {"1F1B": strategy.pipeline - number, "GPipe": strategy.accumulate}.get(strategy.schedule, 1)
    return min(there, strategy.accumulate)


def _active(stage: _Stage, micros: int, opened: int, *, alone: bool) -> float:
    """Bytes of full parameters, gradients and activations, when there is most of them."""
    forward, aside = stage.passes[FORWARD], stage.aside
    backwards = [stage.passes[BACKWARD].most]
    if INPUTS in stage.passes:
        backwards.append(max(stage.passes[INPUTS].most, stage.passes[WEIGHTS].most))
    backward = min(backwards)
    if not alone:
        return max(aside, forward.most, backward)
    kept, held, whole = stage.kept_nbytes, stage.held_nbytes, stage.passes[BACKWARD]
    others = (opened - 1) * aside
    most = max(kept + others + aside, others + forward.most, others + kept + backward)
    most = max(most, others + stage.left_nbytes + max(whole.came + whole.end, held))
    if micros > opened:
        # A forward and a backward in turn, with gradients of those before.
        return max(most, others + held + max(kept + backward, stage.left_nbytes + forward.most))
    return max(most, others - aside + held + kept + backward) if opened > 1 else most
