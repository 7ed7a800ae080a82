"""Finds the strategies that fit, and the fastest of them, among all combinations of the dials.

A strategy is simulated if it may be one of those that are asked for: if what it holds at least fits, and what it takes
at least is less than what the last of them takes. Of a pipeline this is found twice: without its table (`floor_of`),
and with it (`least_of`) if it still may be one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import product
from math import ceil, gcd, lcm
from typing import Any, NamedTuple

from .clock import Clock
from .description import Model
from .least import Least, floor_of, least_of
from .left_out import AXES, LeftOut, degrees_of
from .machine import Hardware
from .padding import padding_of
from .pipeline import StageStep, Table
from .recomputation import NONE, SELECTIVE, WHOLE, on_host
from .result import FAILURE_HOURS, Limited, Plan, plan_of
from .simulation import itemsize_of
from .sizes import Describe as Describe
from .sizes import Sizes
from .sizes import Ways as Ways
from .spans import Step, steps_of
from .stages import Steps, check_pipeline, pipeline_plan, stage_steps, steps_on_ranks
from .strategy import Strategy, Unit, units_of

# Ranks along `tp`, along `cp`, over which experts are divided, and of a pipeline.
Degrees = tuple[int, int, int, int]
# (degrees) -> the model as data of one of them, or why the model or the ranks do not allow these
Divide = Callable[[Degrees], Describe | str]


@dataclass(frozen=True)
class Change:
    """A strategy that was tried: its plan, and how it differs from the one that was asked for."""

    plan: Plan
    says: str
    count: int


class Planner:
    """Plans of one model on one hardware (`sizes` has the model)."""

    def __init__(
        self,
        describe: Describe,
        hardware: Hardware,
        *,
        budget: float | None = None,
        host_budget: float | None = None,
        sequence: int | None = None,
        failure_hours: float = FAILURE_HOURS,
        divide: Divide | None = None,
        short: Divide | None = None,
        degrees: Degrees = (1, 1, 1, 1),
        proof: Sizes | None = None,
        table: Callable[[Strategy], Table] | None = None,
    ) -> None:
        """`divide`: for a search with other degrees of the axes beside data parallelism; None: there is none. `short`:
        the same with a few blocks of the model, of each degree; `degrees`: those of `describe`; `proof`: as in
        `Sizes`; `table`: what the ranks of a pipeline do."""
        self.table = table
        self.describe = describe
        self.divide, self.short = divide, short
        self.hardware = hardware
        hosted = hardware.host_memory if host_budget is None else host_budget
        self._limits = Limited(hardware.memory if budget is None else budget, hosted, failure_hours)
        self.sequence = sequence
        self.sizes = Sizes(describe, sequence, _of_few(short, degrees), proof or self._undivided(degrees))
        self._stage_steps: dict[tuple[object, ...], Steps] = {}
        self._stage_units: dict[Strategy, list[tuple[Unit, ...]]] = {}
        self._units: dict[Strategy, tuple[Unit, ...]] = {}
        self._curable: dict[tuple[int, str], bool] = {}
        self._seconds: dict[tuple[object, ...], float] = {}
        # Has what the last search left out.
        self.left_out = LeftOut()

    def model(
        self, samples: int, compute: str, *, sequence: int | None = None, alone: bool = False, recompute: Ways = NONE
    ) -> Model:
        """The whole model, as `Sizes.model` has it."""
        return self.sizes.model(samples, compute, sequence=sequence, alone=alone, recompute=recompute)

    def plan(self, strategy: Strategy, *, sequence: int | None = None, alone: bool = False) -> Plan:
        """The plan of a strategy, with the model described at its own micro-batch."""
        ways = self._ways(strategy)
        model = self.model(strategy.micro, strategy.computed, sequence=sequence, alone=alone, recompute=ways)
        if model.stages:
            return self._pipeline(model, self._steps_of(model, strategy), strategy)
        step = steps_of(model, ways, compiled_loss=strategy.compiled_loss)
        return plan_of(model, step, self._here(strategy), self.hardware, **self._limits._asdict())

    def estimate(self, strategy: Strategy) -> Plan:
        """The same from the model at one and two samples. It has no commands, and of its moments the peak alone."""
        if strategy.pipeline > 1:
            model, steps = self._staged(strategy)
            units = self._units_of_stages(model, self._here(strategy))
            return self._pipeline(model, steps, strategy, units=units, brief=True)
        model, step = self._at(strategy)
        here = self._here(strategy)
        return plan_of(
            model, step, here, self.hardware, **self._limits._asdict(), units=self._units_of(here), brief=True
        )

    def _undivided(self, degrees: Degrees) -> Sizes | None:
        """Returns where it is found whether the blocks of the stages of a pipeline are alike: the model without one."""
        whole: Degrees = (*degrees[:3], 1)
        if degrees[3] == 1 or self.divide is None or self.short is None:
            return None
        described = self.divide(whole)
        return None if isinstance(described, str) else Sizes(described, self.sequence, _of_few(self.short, whole), None)

    def _staged(self, strategy: Strategy) -> tuple[Model, Steps]:
        """The model of a pipeline at one sample, and the steps of its stages at the micro-batch of the strategy."""
        given = strategy.micro, strategy.computed, self._ways(strategy)
        return self.sizes.stages_at(*given, compiled_loss=strategy.compiled_loss)

    def _steps_of(self, model: Model, strategy: Strategy) -> Steps:
        key = (id(model), self._ways(strategy), strategy.compiled_loss)  # models stay
        if key not in self._stage_steps:
            self._stage_steps[key] = stage_steps(model, key[1], compiled_loss=strategy.compiled_loss)
        return self._stage_steps[key]

    def _pipeline(self, model: Model, steps: Steps, strategy: Strategy, **given: Any) -> Plan:
        assert self.table is not None
        here = self._here(strategy)
        return pipeline_plan(model, steps, self.table(strategy), here, self.hardware, self._limits, **given)

    def _units_of_stages(self, model: Model, strategy: Strategy) -> list[tuple[Unit, ...]]:
        """The units of each stage, once for strategies with the same layouts."""
        key = replace(strategy, micro=1, accumulate=1, recompute=NONE)
        if key not in self._stage_units:
            self._stage_units[key] = [units_of(stage.model, key) for stage in model.stages]
        return self._stage_units[key]

    def floor(self, strategy: Strategy) -> Least:
        """No more than the least that a pipeline takes and holds. Raises `ValueError` where it cannot be planned."""
        here, stages = self._on_ranks(strategy)
        return self._with_margin(floor_of(stages, here, self.hardware), here)

    def least(self, strategy: Strategy) -> Least:
        """The least that a pipeline takes and holds. Raises `ValueError` where it cannot be planned."""
        assert self.table is not None
        table = self.table(strategy)
        here, stages = self._on_ranks(strategy)
        return self._with_margin(least_of(stages, table, here, self.hardware), here)

    def _on_ranks(self, strategy: Strategy) -> tuple[Strategy, list[StageStep]]:
        here = self._here(strategy)
        model, steps = self._staged(strategy)
        check_pipeline(model, here, self.hardware)
        return here, steps_on_ranks(model, steps, here, self._units_of_stages(model, here))

    def _with_margin(self, found: Least, strategy: Strategy) -> Least:
        device = self.hardware.reserved + found.device * (1 + self.hardware.fragmentation)
        device += self.hardware.communicators_nbytes(*strategy.axes)
        return found._replace(device=device * (1 + self.hardware.margin))

    def _may_fit(self, device: float, host: float) -> bool:
        return device <= self.budget and not 0 < (self._limits.host_budget or 0.0) < host

    @property
    def budget(self) -> float:
        """Returns the bytes of a device."""
        return float(self._limits.budget or 0.0)

    def _at(self, strategy: Strategy) -> tuple[Model, Step]:
        ways, compiled_loss = self._ways(strategy), strategy.compiled_loss
        return self.sizes.at(strategy.micro, strategy.computed, ways, compiled_loss=compiled_loss)

    def _ways(self, strategy: Strategy) -> Ways:
        """Where the host is the device, nothing goes to it."""
        return (strategy.with_activations(hosted=False) if self.hardware.blocking else strategy).recompute

    def _here(self, strategy: Strategy) -> Strategy:
        offload = strategy.offload and not self.hardware.blocking
        return replace(strategy, recompute=self._ways(strategy), offload=offload)

    def _units_of(self, strategy: Strategy) -> tuple[Unit, ...]:
        """The units, which differ by what their layouts depend on alone."""
        key = replace(strategy, micro=1, accumulate=min(strategy.accumulate, 2), recompute=NONE)
        if key not in self._units:
            self._units[key] = units_of(self._at(strategy)[0], key)
        return self._units[key]

    # ---- search ------------------------------------------------------------------------------------------------

    def search(
        self,
        asked: Strategy,
        *,
        meshes: bool = True,
        most: int | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> list[Change]:
        """Returns what fits, fastest first, `most` of it or all; of plans within one percent of each other, that with
        the fewest changes. Samples of a step stay the same. The host is used only if nothing fits without it: first for
        activations, then for shards and state, then for both. `meshes`: on every mesh, and not on three alone
        (`candidates`); and with other degrees (`degrees`), one axis at a time. `left_out` has those that are not legal
        or cannot be planned; `say` gets lines about the progress."""
        device = not self.hardware.blocking
        hosts = device and not asked.hosts_activations
        offloads = (False, True) if device and not asked.offload else (asked.offload,)
        planners: list[tuple[Planner, Strategy]] = [(self, asked)]
        self.left_out = LeftOut()
        if meshes:
            planners += self._divided(asked)
        for offload, moved in product(offloads, (False, True)[: 1 + hosts]):
            bounds: list[_Bound] = []
            for planner, strategy in planners:
                # Activations of divided layers are not planned on the host.
                hosted = (moved or asked.hosts_activations) and strategy.tensor == 1
                if moved and not hosted:
                    continue
                say(f"{_axes(strategy)}: the model")
                tried = candidates(strategy, self.hardware.node, meshes=meshes)
                if strategy is not asked:
                    tried = (each for each in tried if each.replicas == 1)
                try:
                    bounds += planner._bounds(tried, offload, hosted)
                except ValueError as error:
                    if planner is self:
                        raise
                    self.left_out.note(asked, strategy, str(error))
            found = _fastest(asked, bounds, most, say)
            for planner, strategy in planners:
                if planner is not self and (why := planner.left_out.why):
                    self.left_out.note(asked, strategy, why)
            if found:
                return found
        return []

    def _divided(self, asked: Strategy) -> Iterator[tuple[Planner, Strategy]]:
        """Yields what was asked for with another degree of one axis, and as many samples of all ranks; with a planner
        of a model divided so."""
        leave = self.left_out.leave
        for strategy in degrees(asked, self.hardware.node, leave) if self.divide is not None else ():
            assert self.divide is not None
            axes = degrees_of(strategy)
            described = self.divide(axes)
            if isinstance(described, str):
                self.left_out.note(asked, strategy, described)
            else:
                shared: dict[str, Any] = {
                    "sequence": self.sequence,
                    "short": self.short,
                    "degrees": axes,
                    "proof": self.sizes.proof,
                    "table": self.table,
                }
                yield Planner(described, self.hardware, **shared, **self._limits._asdict()), strategy

    def _bounds(self, tried: Iterable[Strategy], offload: bool, hosted: bool) -> Iterator[_Bound]:
        """Yields what may fit, and with another placement what that saves padding of."""
        for strategy in tried:
            ways = strategy.recompute
            assert isinstance(ways, str)
            one = replace(strategy, offload=offload, recompute=on_host(ways) if hosted else ways)
            if strategy.pipeline > 1:
                if (bound := self._bound(one, self.floor)) is not None:
                    yield bound._replace(closer=partial(self._bound, one, self.least))
                continue
            for even in (False, True):
                if even and (one.even or not self._is_curable(one)):
                    continue
                changed = replace(one, even=True) if even else one
                if self._may_fit(*self.least_nbytes(changed)):
                    yield _Bound(self.least_seconds(changed), changed, self)

    def _bound(self, strategy: Strategy, least: Callable[[Strategy], Least]) -> _Bound | None:
        """A pipeline, if it may fit."""
        closer, tried = least == self.least, self.left_out
        tried.undecided -= closer
        try:
            found = least(strategy)
        except ValueError as error:
            # Micro-batches that the schedule does not take, stages that cannot be planned.
            tried.refused = tried.refused or str(error)
            return None
        fits = self._may_fit(found.device, found.host)
        tried.is_planned = tried.is_planned or not fits or closer
        tried.undecided += fits and not closer
        return _Bound(found.seconds, strategy, self) if fits else None

    def _is_curable(self, strategy: Strategy) -> bool:
        """Whether another placement saves padding."""
        key = (strategy.shard, strategy.computed)
        if key not in self._curable:
            self._curable[key] = any(each.by_placement for each in padding_of(self._units_of(strategy)))
        return self._curable[key]

    def least_ranks(self, asked: Strategy, most: int = 1 << 20) -> Plan | None:
        """The plan with the fewest ranks that fits, of the same strategy and replicas; None if no number up to 128 and
        no power of two up to `most` does. More ranks do not always hold less each: padding differs, and one rank has no
        messages."""

        # Each shares a layer, a sequence and experts with as many as before.
        together = asked.pipeline * asked.replicas * lcm(asked.tensor * asked.context, asked.experts)

        def at(groups: int) -> Strategy | None:
            try:
                return replace(asked, ranks=groups * together, hosts=1)
            except ValueError:
                return None  # a part that so many ranks do not have

        def fits(groups: int) -> bool:
            strategy = at(groups)
            return strategy is not None and self.estimate(strategy).fits

        high = 1
        while not fits(high):
            high *= 2
            if high * together > most:
                high = 0
                break
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        smaller = range(self._least_groups(asked, together), high or 128 // together + 1)
        found = at(next((groups for groups in smaller if fits(groups)), high))
        return None if found is None else self.estimate(found)

    def _least_groups(self, asked: Strategy, together: int) -> int:
        """So many groups of `together` ranks have enough memory at least: in each, shards and state of all."""
        alone = replace(asked, ranks=together, reshard=bool(asked.reshard), hosts=1)
        (device, host), budget = self.least_nbytes(alone), self.budget
        if asked.offload:
            device, budget = host, self._limits.host_budget or float("inf")
            return max(ceil(device / budget), 1)
        rests = float(sum(g.memory.shard_nbytes + g.state_nbytes for u in self._units_of(alone) for g in u.groups))
        rests *= (1 + self.hardware.fragmentation) * (1 + self.hardware.margin)
        # What is there beside them does not depend on their number.
        return max(ceil(rests / max(budget - (device - rests), 1.0) * (1 - 1e-6)), 1)

    def least_nbytes(self, strategy: Strategy) -> tuple[float, float]:
        """Bytes that a rank has at least, on the device and on the host: of shards, state, buffers and batch, of the
        most activations, of what the device keeps for itself, and of the margin."""
        model, step = self._at(strategy)
        units = self._units_of(strategy)
        at_rest = float(sum(g.memory.shard_nbytes + g.state_nbytes for u in units for g in u.groups))
        counted = model.buffer_nbytes + step.batch_nbytes + max(span.peak for span in step.spans)
        counted += 0.0 if strategy.offload else at_rest
        device = self.hardware.reserved + counted * (1 + self.hardware.fragmentation)
        device += self.hardware.communicators_nbytes(*strategy.axes)
        # Sums of many bytes are rounded.
        return device * (1 + self.hardware.margin) * (1 - 1e-9), at_rest * strategy.offload

    def least_seconds(self, strategy: Strategy) -> float:
        """Seconds that a step takes at least: those of its kernels, and of messages of divided layers that nothing
        overlaps with."""
        strategy = self._here(strategy)
        model, step = self._at(strategy)
        dials = strategy.computed, strategy.compiled, strategy.compiled_loss, strategy.float8
        key = (strategy.micro, strategy.recompute, dials)
        if key not in self._seconds:
            units = self._units_of(strategy)
            clock = Clock(
                self.hardware, itemsize_of(units, strategy), compiled=strategy.compiled, float8=strategy.float8
            )
            self._seconds[key] = sum(clock.seconds(span.work) for span in step.spans) + sum(
                clock.alone(message, *strategy.group(message.axis)) for span in step.spans for message in span.messages
            )
        return self._seconds[key] * strategy.accumulate * (1 - 1e-9)


def _of_few(short: Divide | None, degrees: Degrees) -> Describe | None:
    """The model of these degrees with a few of its blocks; None if there is none."""
    found = None if short is None else short(degrees)
    return None if isinstance(found, str) else found


class _Bound(NamedTuple):
    """A strategy that may fit, what it takes at least, and whose it is. `closer`: finds the same with more work, None
    if the strategy does not fit."""

    seconds: float
    strategy: Strategy
    planner: Planner
    closer: Callable[[], _Bound | None] | None = None


def _fastest(asked: Strategy, bounds: list[_Bound], most: int | None, say: Callable[[str], None]) -> list[Change]:
    """The fastest of what fits."""
    found: list[Change] = []
    waiting = [(bound.seconds, number, bound) for number, bound in enumerate(bounds)]
    heapify(waiting)
    while waiting:
        seconds, number, bound = heappop(waiting)
        if most is not None and len(found) >= most:
            ranked = ranked_by_time(found)
            best = min(change.plan.seconds for change in found)
            # What is left takes as long at least. It cannot be the fastest, nor before the last of these.
            if seconds > best and _percents(seconds, best) > _percents(ranked[most - 1].plan.seconds, best):
                break
        say(f"{_axes(bound.strategy)}: {len(bounds) - len(waiting)} of {len(bounds)} tried, {len(found)} fit")
        if bound.closer is not None:
            if (closer := bound.closer()) is not None:
                heappush(waiting, (closer.seconds, number, closer))
            continue
        plan = bound.planner.estimate(bound.strategy)
        if plan.fits:
            found.append(_beside(asked, plan))
    return ranked_by_time(found)[:most] if found else []


def _axes(strategy: Strategy) -> str:
    there = zip(AXES, degrees_of(strategy), strict=True)
    return ", ".join(f"{name} {degree}" for name, degree in there if degree > 1) or "data parallelism"


def candidates(asked: Strategy, node: int, *, meshes: bool = True) -> Iterator[Strategy]:
    """Strategies with the same ranks and the same samples of a step. `meshes`: on every mesh; otherwise on that of
    `asked`, without replicas, and with the parameters in each node."""
    samples = asked.micro * asked.accumulate
    micros = [n for n in range(1, samples + 1) if samples % n == 0]
    # Of the ranks that have the same part of each layer so many are in a node.
    ranks, node = asked.ranks // asked.pipeline // asked.tensor, max(node // asked.tensor, 1)
    few = [node] if ranks % node == 0 else []
    shared = sharing(ranks, node) if meshes else few
    replicas = sorted({1, asked.replicas, *(ranks // n for n in shared)})
    if asked.experts > 1:
        replicas = [asked.replicas]  # the model has the experts of so many ranks
    for copies, recompute, micro in product(replicas, (NONE, SELECTIVE, WHOLE), micros):
        shard = ranks // copies
        if shard % asked.context or shard * asked.tensor % asked.experts:
            continue
        # Gradients of several micro-batches stay whole on every rank, unless each is reduced. A pipeline reduces once.
        sends = (False, True) if micro < samples else (asked.send_each,)
        sends, reshards = (sends, _reshards(shard, node)) if asked.pipeline == 1 else ((False,), [False, True])
        for reshard, each in product(reshards[: 1 if shard == 1 else None], sends):
            yield replace(
                asked,
                replicas=copies,
                reshard=reshard,
                recompute=recompute,
                micro=micro,
                accumulate=samples // micro,
                send_each=each,
            )


def degrees(
    asked: Strategy, node: int, leave: Callable[[str, int, str], None] = lambda axis, degree, why: None
) -> Iterator[Strategy]:
    """`asked` with another degree of one axis, inside of a node, and as many samples of a step of all ranks. `leave`
    gets those of which there is none, and why.

    >>> [(s.tensor, s.micro, s.accumulate) for s in degrees(Strategy(8, micro=2), 4) if s.tensor > 1]
    [(2, 2, 2), (4, 2, 4)]
    """
    samples = asked.micro * asked.accumulate
    own = degrees_of(asked)
    for place, most in enumerate((node, node, asked.ranks, asked.ranks)):
        for degree in (n for n in range(1, most + 1) if asked.ranks % n == 0 and n != own[place]):
            changed = [*own]
            changed[place] = degree
            tensor, context, experts, pipeline = changed
            alike = asked.tensor * asked.context * asked.pipeline
            every, left = divmod(samples * tensor * context * pipeline, alike)
            if left:
                problem = f"the {samples} samples of a rank become {samples * degree}/{own[place]} of a new one"
                leave(AXES[place], degree, f"{problem}; take a --batch that {own[place]} divides")
                continue
            micro = gcd(asked.micro, every)
            dials: dict[str, Any] = {"tensor": tensor, "context": context, "experts": experts, "pipeline": pipeline}
            if (pipeline > 1) is not (asked.pipeline > 1):
                dials |= {"reshard": pipeline == 1, "root_reshard": None if pipeline == 1 else False}
                dials |= {"schedule": "1F1B", "stages": 1, "send_each": False}
            else:
                dials["reshard"] = bool(asked.reshard)
            try:
                yield replace(asked, replicas=1, micro=micro, accumulate=every // micro, **dials)
            except ValueError as error:
                leave(AXES[place], degree, str(error))


def ranked_by_time(changes: list[Change]) -> list[Change]:
    """The fastest first; within one percent of each other, that with the fewest changes."""
    best = min(change.plan.seconds for change in changes)
    return sorted(
        changes,
        key=lambda c: (_percents(c.plan.seconds, best), c.count, c.plan.peak_nbytes, c.plan.seconds, c.says),
    )


def _percents(seconds: float, best: float) -> int:
    return round(seconds / best / 0.01)


def _beside(asked: Strategy, plan: Plan) -> Change:
    says = differences(asked, plan.strategy)
    return Change(plan, ", ".join(says) or "as asked for", len(says))


def sharing(ranks: int, node: int) -> list[int]:
    """How many ranks may share the parameters: a part of a node, or whole nodes. 1: every rank has all of them.

    >>> sharing(16, 8), sharing(24, 8), sharing(6, 8)
    ([1, 2, 4, 8, 16], [1, 2, 4, 8, 24], [1, 2, 3, 6])
    """
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    if ranks <= node or ranks % node:
        return divisors  # one node, or nodes that are not full
    return [n for n in divisors if (node % n == 0 if n < node else n % node == 0)]


def _reshards(shard: int, node: int) -> list[bool | int]:
    if shard == 1:
        return [True]
    kept: list[bool | int] = [node] if 1 < node < shard and shard % node == 0 else []
    return [True, False, *kept]


def differences(asked: Strategy, other: Strategy) -> list[str]:
    """Says in words what another strategy changes."""
    found = [
        f"{name} {getattr(other, axis)}" if getattr(other, axis) > 1 else f"no {name}"
        for axis, name in (("tensor", "TP"), ("context", "CP"), ("experts", "EP"), ("pipeline", "PP"))
        if getattr(other, axis) != getattr(asked, axis)
    ]
    if other.micro != asked.micro or other.accumulate != asked.accumulate:
        found.append(f"micro-batch {other.micro} x {other.accumulate}")
    if other.accumulate > 1 and other.send_each != asked.send_each:
        found.append("reduce each" if other.send_each else "reduce the last alone")
    ways = [each.with_activations(hosted=False).recompute for each in (other, asked)]
    if ways[0] != ways[1]:
        found.append("no recomputation" if ways[0] == NONE else f"recompute {ways[0]}")
    if other.hosts_activations != asked.hosts_activations:
        found.append("activations on the host" if other.hosts_activations else "activations on the device")
    if other.reshard != asked.reshard and other.shard > 1:
        says = {True: "reshard after forward", False: "keep parameters after forward (ZeRO-2)"}
        kept = f"reshard_after_forward={other.reshard}"
        found.append(says[other.reshard] if isinstance(other.reshard, bool) else kept)
    if other.replicas != asked.replicas:
        shape = f"HSDP {other.replicas} x {other.shard}" if other.shard > 1 else "replicate everything (DDP)"
        found.append(shape if other.replicas > 1 else "no replicas")
    if other.even and not asked.even:
        found.append("even placement (shard_placement_fn)")
    if other.offload != asked.offload:
        found.append("offload to the host" if other.offload else "no offload")
    return found
