"""Which strategy fits, and which of those is the fastest: every combination of the dials is simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from .description import Model
from .machine import Hardware
from .recomputation import NONE, SELECTIVE, WHOLE
from .result import FAILURE_HOURS, Plan, plan_of
from .spans import Step, scaled, steps_of
from .strategy import Strategy

# (samples, sequence length or None, compute dtype, whether the model is one unit) -> the model as data
Describe = Callable[[int, int | None, str, bool], Model]


@dataclass(frozen=True)
class Change:
    """A strategy that was tried: its plan, and how it differs from the one that was asked for."""

    plan: Plan
    says: str
    count: int


class Planner:
    """Plans of one model on one hardware. Models are described once for each size; other sizes of the micro-batch come
    from two of them."""

    def __init__(
        self,
        describe: Describe,
        hardware: Hardware,
        *,
        budget: float | None = None,
        sequence: int | None = None,
        failure_hours: float = FAILURE_HOURS,
    ) -> None:
        self.describe = describe
        self.hardware = hardware
        self.budget = hardware.memory if budget is None else budget
        self.sequence = sequence
        self.failure_hours = failure_hours
        self._models: dict[tuple[int, int | None, str, bool], Model] = {}
        self._steps: dict[tuple[object, ...], Step] = {}

    def model(self, samples: int, compute: str, *, sequence: int | None = None, alone: bool = False) -> Model:
        key = (samples, sequence or self.sequence, compute, alone)
        if key not in self._models:
            self._models[key] = self.describe(*key)
        return self._models[key]

    def plan(self, strategy: Strategy, *, sequence: int | None = None, alone: bool = False) -> Plan:
        """The plan of a strategy, with the model described at its own micro-batch."""
        model = self.model(strategy.micro, strategy.compute, sequence=sequence, alone=alone)
        ways = strategy.recompute if isinstance(strategy.recompute, str) else list(strategy.recompute)
        return self._planned(model, steps_of(model, ways), strategy)

    def estimate(self, strategy: Strategy) -> Plan:
        """The same from the model at one and two samples: every figure is taken to be linear in them."""
        one, two = (self.model(n, strategy.compute) for n in (1, 2))
        steps = []
        for model in (one, two):
            key = (model.samples, strategy.compute, strategy.recompute)
            if key not in self._steps:
                ways = strategy.recompute if isinstance(strategy.recompute, str) else list(strategy.recompute)
                self._steps[key] = steps_of(model, ways)
            steps.append(self._steps[key])
        return self._planned(one, scaled(steps[0], steps[1], strategy.micro), strategy)

    def _planned(self, model: Model, step: Step, strategy: Strategy) -> Plan:
        return plan_of(model, step, strategy, self.hardware, budget=self.budget, failure_hours=self.failure_hours)

    # ---- search ------------------------------------------------------------------------------------------------

    def search(self, asked: Strategy) -> list[Change]:
        """Everything that fits, the fastest first; among plans within one percent of each other, that with the fewest
        changes. Samples of a step stay the same. With offload only if nothing fits without."""
        for offload in (False, True) if not asked.offload else (True,):
            found = self._fitting(asked, offload)
            if found:
                return found
        return []

    def _fitting(self, asked: Strategy, offload: bool) -> list[Change]:
        found = []
        for strategy in candidates(asked, self.hardware.node):
            try:
                plan = self.estimate(replace(strategy, offload=offload))
            except ValueError:
                continue  # a degree that does not divide
            if plan.fits:
                says = differences(asked, plan.strategy)
                found.append(Change(plan, ", ".join(says) or "as asked for", len(says)))
        if not found:
            return []
        best = min(change.plan.seconds for change in found)
        return sorted(found, key=lambda c: (round(c.plan.seconds / best / 0.01), c.count, c.plan.peak_nbytes))


def candidates(asked: Strategy, node: int) -> Iterator[Strategy]:
    """Strategies with the same ranks and the same samples of a step."""
    samples = asked.micro * asked.accumulate
    micros = [n for n in range(1, samples + 1) if samples % n == 0]
    replicas = sorted({1, asked.replicas, *(n for n in _replicas(asked.ranks, node))})
    for copies, recompute, micro in product(replicas, (NONE, SELECTIVE, WHOLE), micros):
        shard = asked.ranks // copies
        # Gradients of several micro-batches stay whole on every rank, unless each is reduced.
        for reshard, each in product(_reshards(shard, node), (False, True) if micro < samples else (asked.send_each,)):
            yield replace(
                asked,
                replicas=copies,
                reshard=reshard,
                recompute=recompute,
                micro=micro,
                accumulate=samples // micro,
                send_each=each,
            )


def _replicas(ranks: int, node: int) -> Iterable[int]:
    """A node, and eight nodes, that share."""
    return [ranks // n for n in (node, 8 * node) if n < ranks and ranks % n == 0]


def _reshards(shard: int, node: int) -> list[bool | int]:
    if shard == 1:
        return [True]
    kept: list[bool | int] = [node] if node < shard and shard % node == 0 else []
    return [True, False, *kept]


def differences(asked: Strategy, other: Strategy) -> list[str]:
    """What another strategy changes, in words."""
    found = []
    if other.micro != asked.micro or other.accumulate != asked.accumulate:
        found.append(f"micro-batch {other.micro} x {other.accumulate}")
    if other.accumulate > 1 and other.send_each != asked.send_each:
        found.append("reduce each" if other.send_each else "reduce the last alone")
    if other.recompute != asked.recompute:
        found.append("no recomputation" if other.recompute == NONE else f"recompute {other.recompute}")
    if other.reshard != asked.reshard:
        says = {True: "reshard after forward", False: "keep parameters after forward (ZeRO-2)"}
        kept = f"reshard_after_forward={other.reshard}"
        found.append(says[other.reshard] if isinstance(other.reshard, bool) else kept)
    if other.replicas != asked.replicas:
        found.append(f"HSDP {other.replicas} x {other.shard}" if other.replicas > 1 else "no replicas")
    if other.offload != asked.offload:
        found.append("offload to the host" if other.offload else "no offload")
    return found
