"""A step of a pipeline in time and bytes: each rank does its row of a table of actions, with the simulation of each of
its stages, and waits for what other ranks send.

A table has a row for each rank: actions in order, as torch's schedules have them. No formula says what a schedule
wastes or holds: its own table does. What a rank has beside its stages:

received    for each micro-batch a buffer of activations, and one of gradients; torch keeps them from step to step
sent        on gloo until a schedule waits for all that it sent, elsewhere until it arrives; gradients of inputs that
            were computed apart until the next step begins, as torch leaves them on the buffers of inputs
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ..schedule import UnitRecord, Use, rules
from .account import KINDS, Exposed, Simulated, Traffic
from .clock import AXES
from .machine import Hardware
from .simulation import Simulation
from .spans import Span, Step
from .strategy import Strategy, Unit

# Kinds of actions: a forward, a whole backward, and its halves: gradients of inputs, and of weights.
FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
# Messages to the next stage and to the one before, and a wait until all that was sent is there.
SEND_FORWARD, SEND_BACKWARD, SENT = "SEND_F", "SEND_B", "SENT"
# All parameters of a stage become full, or are freed; its gradients are reduced.
UNSHARD, RESHARD, REDUCE = "UNSHARD", "RESHARD", "REDUCE_GRAD"
_COMPUTES = (FORWARD, BACKWARD, INPUTS, WEIGHTS)
_WORD = re.compile(r"(\d+)(SEND_F|SEND_B|SENT|UNSHARD|RESHARD|REDUCE_GRAD|[FBIW])(\d*)")
# Where a rank waits for another one.
_WAITS = "other stages"


class Action(NamedTuple):
    """One action of a rank: a kind, a stage, and a micro-batch, -1 for all of them."""

    kind: str
    stage: int
    micro: int = -1


Table = tuple[tuple[Action, ...], ...]


def read_table(rows: Sequence[Sequence[str]]) -> Table:
    """A table of torch's words for actions. Buffers of what is received are there, so that receiving is no action.

    >>> read_table([["0F0", "0SEND_F0", "0RECV_B0", "0B0", "0REDUCE_GRAD"]])[0][2:]
    (Action(kind='B', stage=0, micro=0), Action(kind='REDUCE_GRAD', stage=0, micro=-1))
    """
    return tuple(tuple(_read(word) for word in row if "RECV" not in word) for row in rows)


def _read(word: str) -> Action:
    found = _WORD.fullmatch(word)
    if found is None or bool(found[3]) is not (found[2] in (*_COMPUTES, SEND_FORWARD, SEND_BACKWARD)):
        raise ValueError(f"expected an action such as 0F0, 1B2, 1SEND_B2 or 1REDUCE_GRAD, found {word!r}")
    return Action(found[2], int(found[1]), int(found[3] or -1))


def shown(action: Action) -> str:
    """
    >>> shown(Action("F", 2, 0)), shown(Action("REDUCE_GRAD", 2))
    ('2F0', '2REDUCE_GRAD')
    """
    return f"{action.stage}{action.kind}{action.micro if action.micro >= 0 else ''}"


class StageStep(NamedTuple):
    """The work of a stage for a micro-batch. `units`: the stage's own. `halves`: with gradients of weights apart, None
    if its schedule needs none. `given_nbytes`, `made_nbytes`: as in `Stage`; `batch_nbytes`: of a micro-batch's inputs
    and targets."""

    units: Sequence[Unit]
    step: Step
    halves: Step | None
    given_nbytes: float
    made_nbytes: float
    batch_nbytes: float
    buffer_nbytes: float


class _Open(NamedTuple):
    """A micro-batch whose backward is not over: its uses, what it holds here and on the host."""

    uses: dict[int, Use]
    activations: float
    loss: float
    hosted: float


class StageSimulation(Simulation):
    """One stage on its rank. `is_last`: whether the loss is here. `next_is_here`, `previous_is_here`: whether stages
    beside it are on this rank, which get its results themselves instead of messages."""

    def __init__(
        self,
        number: int,
        stage: StageStep,
        strategy: Strategy,
        hardware: Hardware,
        beside: Simulation | None,
        *,
        brief: bool = False,
    ) -> None:
        self.number, self.stage = number, stage
        self.is_last = self.next_is_here = self.previous_is_here = False
        self._elsewhere, self._apart = 0.0, False
        super().__init__(stage.units, strategy, hardware, stage.buffer_nbytes, beside=beside, brief=brief)
        self.open: dict[int, _Open] = {}
        # Whether all of it was asked to become full, and nothing waited for that yet.
        self.arriving = False
        parts, halves = stage.step.parts(), () if stage.halves is None else stage.halves.parts()
        self._forward, self._backward = parts[0], parts[1]
        self._halves: tuple[tuple[Span, ...], ...] = halves

    @property
    def key(self) -> str:
        return f"stage {self.number}"

    @property
    def turn(self) -> str:
        return "loss" if self.is_last else "backward"

    @property
    def elsewhere(self) -> float:
        return self._elsewhere

    def forward(self, micro: int) -> None:
        self._arrive()
        self.uses, self._elsewhere = {}, 0.0
        self._play(self._forward)
        # The next stage has the results instead of what it would receive.
        self._put_aside(micro, less=self.stage.made_nbytes if self.next_is_here else 0.0)

    def backward(self, micro: int, kind: str) -> None:
        """`kind`: BACKWARD, INPUTS or WEIGHTS."""
        self._arrive()
        for record in self.schedule.units:
            record.plan.sync = record.plan.reshard_after_backward = False
        self.schedule.ending.is_last = False
        self._take_up(micro)
        self._apart = kind == WEIGHTS and self.number > 0
        self._elsewhere = self.stage.made_nbytes if self.next_is_here else 0.0
        self._elsewhere += self._given if kind == WEIGHTS else 0.0
        spans = self._backward if kind == BACKWARD else self._halves[1 if kind == INPUTS else 2]
        self._play(spans)
        if kind == INPUTS:
            # The gradients of inputs are counted as what is sent, or as what a stage on this rank received.
            self._put_aside(micro, less=self._given)
        self._bring(self.stage.step.brought if kind != INPUTS else ())
        if self._apart:
            # No hook reports these: they are on the full parameters until the next backward ends.
            self.bytes.set("activations", self.key, 0.0)
            self.bytes.set("loss", self.key, 0.0)
            self._note()
        else:
            self._end_backward()

    def _come(self, unit: Unit, record: UnitRecord, nbytes: float) -> None:
        before = self.bytes.nbytes("gradients", record.name)
        if not (self._apart and (before or self.bytes.nbytes("held gradients", record.name))):
            super()._come(unit, record, nbytes)
            return
        # torch adds each to what is there, one after the other.
        sizes = [parameter.numel for parameter in unit.shape.parameters if parameter.trainable]
        self.bytes.add("gradients", record.name, nbytes * max(sizes) / sum(sizes))
        self.bytes.set("gradients", record.name, before)

    def _event(self, kind: str, record: UnitRecord, use: int) -> None:
        if not self._apart:
            super()._event(kind, record, use)

    def unshard(self) -> None:
        for record in self.schedule.units:
            self._do(rules.unshard(self.schedule, record))
        self.arriving = True

    def reshard(self) -> None:
        for record in self.schedule.units:
            self._do(rules.reshard(self.schedule, record))

    def reduce(self) -> None:
        """Reduce what all micro-batches left, once."""
        for record in self.schedule.units:
            record.plan.sync = record.plan.reshard_after_backward = True
        run = self.schedule
        run.ending.is_last = True
        self.phase = "end of backward"
        kinds = ("held gradients", "gradients")
        present = [any(self.bytes.nbytes(kind, record.name) > 0 for kind in kinds) for record in run.units]
        self._do(rules.finalize(run, run.units[0], present))
        self._do(rules.wait_finalize(run, run.units[0]))
        self._note()

    def _arrive(self) -> None:
        if self.arriving:
            self.arriving = False
            for record in self.schedule.units:
                self._do(rules.wait_unshard(self.schedule, record))

    @property
    def _given(self) -> float:
        return self.stage.given_nbytes if self.number else 0.0

    @property
    def _aside(self) -> str:
        return f"{self.key}, in flight"

    def _put_aside(self, micro: int, *, less: float = 0.0) -> None:
        """Keep what is held for a micro-batch until its backward. `less`: bytes that are counted elsewhere."""
        there, host = self.bytes, self.host
        activations = max(there.clear("activations", self.key) - less, 0.0)
        found = _Open(self.uses, activations, there.clear("loss", self.key), host.clear("activations", self.key))
        there.add("activations", self._aside, found.activations)
        there.add("loss", self._aside, found.loss)
        host.add("activations", self._aside, found.hosted)
        self.open[micro] = found

    def _take_up(self, micro: int) -> None:
        found = self.open.pop(micro)
        self.uses = found.uses
        for there, kind, nbytes in (
            (self.bytes, "activations", found.activations),
            (self.bytes, "loss", found.loss),
            (self.host, "activations", found.hosted),
        ):
            # It stays as it is, under another name.
            there.rename(kind, self._aside, self.key, nbytes)

    def finish(self, units: Sequence[Unit]) -> None:
        self._optimize(units)


class _Rank:
    """One rank of a pipeline. `row`: its actions; `stages`: by their numbers."""

    def __init__(
        self, row: Sequence[Action], stages: Sequence[StageStep], strategy: Strategy, hardware: Hardware, *, brief: bool
    ) -> None:
        self.row, self.strategy, self.hardware = row, strategy, hardware
        self.stages: dict[int, StageSimulation] = {}
        beside: StageSimulation | None = None
        for number in sorted({action.stage for action in row}):
            beside = self.stages[number] = StageSimulation(
                number, stages[number], strategy, hardware, beside, brief=brief
            )
        assert beside is not None
        self.bytes, self.host, self.clock = beside.bytes, beside.host, beside.clock
        for number, stage in self.stages.items():
            stage.is_last = number == len(stages) - 1
            stage.next_is_here, stage.previous_is_here = number + 1 in self.stages, number - 1 in self.stages
        micros = strategy.accumulate
        first = next(iter(self.stages.values()))
        self.bytes.add("batch", "", micros * first.stage.batch_nbytes)
        received = sum(
            stage.stage.given_nbytes * (number > 0) + stage.stage.made_nbytes * (not stage.is_last)
            for number, stage in self.stages.items()
        )
        self.bytes.add("stage buffers", "received", micros * received)
        # The messages whose tensors are still there: (kind, stage, micro-batch) -> when it arrives.
        self.sent: dict[tuple[str, int, int], float] = {}
        self.place = 0
        self.latest = 0.0
        # The last but one of the messages before the first wait for them.
        self.began: list[tuple[str, int, int]] | None = None
        # torch's schedules of one stage have the output of the latest forward until the next one.
        self.output: tuple[int, int] | None = None
        self.is_single = any(action.kind == SENT for action in row)

    def begin(self, *, measured: bool) -> None:
        self.place, self.latest, self.began = 0, 0.0, None
        self.sent.clear()
        self.bytes.forget()
        self.host.forget()
        self.clock.begin(Simulated(traffic={axis: Traffic() for axis in AXES}))
        for stage in self.stages.values():
            stage.measured = measured

    def wait(self, when: float) -> None:
        """Wait for other ranks of the pipeline."""
        late = when - self.clock.now
        if late > 0:
            self.clock.found.bubble += late
            self.clock.wait(when, f"stage {next(iter(self.stages))}", _WAITS)

    def run(self, arrivals: dict[Hashable, float]) -> bool:
        """Actions until one needs what is not sent yet; whether there was any."""
        begun = self.place
        while self.place < len(self.row):
            action = self.row[self.place]
            needs = self._needs(action)
            if needs is not None and needs not in arrivals:
                break
            if needs is not None:
                self.wait(arrivals[needs])
            self._do(action, arrivals)
            self._free_sent()
            self.place += 1
        return self.place > begun

    def _needs(self, action: Action) -> Hashable | None:
        stage = self.stages[action.stage]
        if action.kind == FORWARD and action.stage and not stage.previous_is_here:
            return SEND_FORWARD, action.stage, action.micro
        if action.kind in (BACKWARD, INPUTS) and not stage.is_last and not stage.next_is_here:
            return SEND_BACKWARD, action.stage, action.micro
        return None

    def _do(self, action: Action, arrivals: dict[Hashable, float]) -> None:
        kind, number, micro = action
        stage = self.stages[number]
        if kind == FORWARD:
            stage.forward(micro)
            self.bytes.set("loss", "last output", 0.0)
            self.output = (number, micro) if self.is_single else None
        elif kind in (BACKWARD, INPUTS, WEIGHTS):
            stage.backward(micro, kind)
            if kind != WEIGHTS and number and not stage.previous_is_here:
                self.sent[SEND_BACKWARD if kind == BACKWARD else INPUTS, number, micro] = math.inf
            if self.output == (number, micro):
                self.bytes.set("loss", "last output", stage.stage.made_nbytes)
        elif kind in (SEND_FORWARD, SEND_BACKWARD):
            on = kind == SEND_FORWARD
            nbytes = stage.stage.made_nbytes if on else stage.stage.given_nbytes
            self.latest = self.clock.give(nbytes, self.strategy.group("pp")[1])
            arrivals[kind, number + (1 if on else -1), micro] = self.latest
            if (INPUTS, number, micro) not in self.sent or kind == SEND_FORWARD:
                self.sent[kind, number, micro] = self.latest
        elif kind == SENT:
            self.clock.wait(self.latest, f"stage {number}", "what it sends")
            self._let_go()
        else:
            {UNSHARD: stage.unshard, RESHARD: stage.reshard, REDUCE: stage.reduce}[kind]()

    def _let_go(self) -> None:
        """Note that what was sent is there. A schedule of one stage still has the latest gradient, and the output of
        the last but one forward with which it began; GPipe has all."""
        if self.strategy.schedule == "GPipe":
            return
        gradients = sorted(key for key in self.sent if key[0] == SEND_BACKWARD)[-1:]
        if self.began is None:
            self.began = sorted(key for key in self.sent if key[0] == SEND_FORWARD)[-2:-1]
        self.sent = {key: self.sent[key] for key in (*gradients, *self.began) if key in self.sent}

    def _free_sent(self) -> None:
        if self.hardware.backend != "gloo":
            self.sent = {key: when for key, when in self.sent.items() if when > self.clock.now}
        there = 0.0
        for kind, number, micro in self.sent:
            stage = self.stages[number]
            # The output of a micro-batch whose backward is not over is there anyway.
            if kind != SEND_FORWARD:
                there += stage.stage.given_nbytes
            elif micro not in stage.open:
                there += stage.stage.made_nbytes
        self.bytes.set("stage buffers", "sent", there)

    def end(self, when: float) -> None:
        """All ranks have come to the end: of the schedule, which gives each the loss."""
        self.wait(when)
        self.sent = {key: when for key, when in self.sent.items() if key[0] == INPUTS}
        self._free_sent()
        self.bytes.set("loss", "last output", 0.0)
        first = next(iter(self.stages.values()))
        first.finish([unit for stage in self.stages.values() for unit in stage.units])


def simulate_pipeline(
    stages: Sequence[StageStep], table: Table, strategy: Strategy, hardware: Hardware, *, brief: bool = False
) -> list[Simulated]:
    """One steady step of each rank of a pipeline. `brief`: as of `simulate`. Raises `ValueError` for a table in which
    ranks wait for each other without end."""
    ranks = [_Rank(row, stages, strategy, hardware, brief=brief) for row in table]
    for measured in (False, True):
        for rank in ranks:
            rank.begin(measured=measured)
        arrivals: dict[Hashable, float] = {}
        while any([rank.run(arrivals) for rank in ranks]):
            pass
        waiting = [rank.row[rank.place] for rank in ranks if rank.place < len(rank.row)]
        if waiting:
            names = ", ".join(map(shown, waiting))
            raise ValueError(f"expected a table that ends, found ranks that wait: {names}")
        over = max(rank.clock.now for rank in ranks)
        for rank in ranks:
            rank.end(over)
    seconds = max(rank.clock.now for rank in ranks)
    for rank in ranks:
        found = rank.clock.found
        found.seconds = seconds
        found.bubble += seconds - rank.clock.now
        at_most = ((f"{kind} {name}".strip(), nbytes) for kind, name, nbytes in rank.bytes.at_most)
        found.terms = sorted(at_most, key=lambda term: -term[1])
        on_host = zip(KINDS, rank.host.peak, strict=True)
        found.on_host = tuple((kind, nbytes) for kind, nbytes in on_host if nbytes)
        if seconds > rank.clock.now:
            found.exposed.append(Exposed("optimizer", _WAITS, seconds - rank.clock.now))
    return [rank.clock.found for rank in ranks]
