"""Finds the strategies that fit, and the fastest of them: every combination of the dials is simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from .description import Model
from .machine import Hardware
from .recomputation import ALL_ON_HOST, NONE, SELECTIVE, WHOLE, on_host
from .result import FAILURE_HOURS, Plan, plan_of
from .spans import Step, scaled, steps_of
from .strategy import Strategy, units_of

Ways = str | tuple[str, ...]
# (samples, sequence length or None, compute dtype, whether the model is one unit, ways of recomputation that the tape
# has to know) -> the model as data
Describe = Callable[[int, int | None, str, bool, Ways], Model]


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
        host_budget: float | None = None,
        sequence: int | None = None,
        failure_hours: float = FAILURE_HOURS,
    ) -> None:
        self.describe = describe
        self.hardware = hardware
        self.budget = hardware.memory if budget is None else budget
        self.host_budget = hardware.host_memory if host_budget is None else host_budget
        self.sequence = sequence
        self.failure_hours = failure_hours
        self._models: dict[tuple[int, int | None, str, bool, Ways], Model] = {}
        self._steps: dict[tuple[object, ...], Step] = {}

    def model(
        self,
        samples: int,
        compute: str,
        *,
        sequence: int | None = None,
        alone: bool = False,
        recompute: Ways = NONE,
    ) -> Model:
        """`recompute`: of a strategy; the model differs where everything is on the host."""
        ways = (recompute,) if isinstance(recompute, str) else recompute
        key = (samples, sequence or self.sequence, compute, alone, recompute if ALL_ON_HOST in ways else NONE)
        if key not in self._models:
            self._models[key] = self.describe(*key)
        return self._models[key]

    def plan(self, strategy: Strategy, *, sequence: int | None = None, alone: bool = False) -> Plan:
        """The plan of a strategy, with the model described at its own micro-batch."""
        ways = self._ways(strategy)
        model = self.model(strategy.micro, strategy.computed, sequence=sequence, alone=alone, recompute=ways)
        return self._planned(model, steps_of(model, ways), replace(strategy, recompute=ways))

    def estimate(self, strategy: Strategy) -> Plan:
        """The same from the model at one and two samples: every figure is taken to be linear in them."""
        ways = self._ways(strategy)
        one, two = (self.model(n, strategy.computed, recompute=ways) for n in (1, 2))
        steps = []
        for model in (one, two):
            key = (model.samples, strategy.computed, ways)
            if key not in self._steps:
                self._steps[key] = steps_of(model, ways)
            steps.append(self._steps[key])
        return self._planned(one, scaled(steps[0], steps[1], strategy.micro), replace(strategy, recompute=ways))

    def _ways(self, strategy: Strategy) -> Ways:
        """Where the host is the device, nothing goes to it."""
        return (strategy.with_activations(hosted=False) if self.hardware.blocking else strategy).recompute

    def _planned(self, model: Model, step: Step, strategy: Strategy) -> Plan:
        strategy = replace(strategy, offload=strategy.offload and not self.hardware.blocking)
        limits = {"budget": self.budget, "host_budget": self.host_budget, "failure_hours": self.failure_hours}
        return plan_of(model, step, strategy, self.hardware, **limits)

    # ---- search ------------------------------------------------------------------------------------------------

    def search(self, asked: Strategy, *, meshes: bool = True) -> list[Change]:
        """Everything that fits, the fastest first; among plans within one percent of each other, that with the fewest
        changes. Samples of a step stay the same. The host is used only if nothing fits without it: first for
        activations, then for shards and state, then for both. `meshes`: on every mesh, and not on three alone
        (`candidates`), which takes a third of the time."""
        device = not self.hardware.blocking
        hosts = device and not asked.hosts_activations
        offloads = (False, True) if device and not asked.offload else (asked.offload,)
        for offload, moved in product(offloads, (False, True)[: 1 + hosts]):
            found = self._fitting(asked, offload, moved or asked.hosts_activations, meshes)
            if found:
                return found
        return []

    def _fitting(self, asked: Strategy, offload: bool, hosted: bool, meshes: bool) -> list[Change]:
        found = []
        for strategy in candidates(asked, self.hardware.node, meshes=meshes):
            ways = strategy.recompute
            assert isinstance(ways, str)
            tried = replace(strategy, offload=offload, recompute=on_host(ways) if hosted else ways)
            try:
                if self._cannot_fit(tried):
                    continue
                plan = self.estimate(tried)
            except ValueError:
                continue  # a degree that does not divide
            if plan.fits:
                says = differences(asked, plan.strategy)
                found.append(Change(plan, ", ".join(says) or "as asked for", len(says)))
        if not found:
            return []
        found += [self._even(asked, change) for change in found if change.plan.curable]
        best = min(change.plan.seconds for change in found)
        return sorted(found, key=lambda c: (round(c.plan.seconds / best / 0.01), c.count, c.plan.peak_nbytes))

    def _even(self, asked: Strategy, change: Change) -> Change:
        """The same with the placement that a line about padding recommends. It has fewer bytes, so it fits."""
        plan = self.estimate(replace(change.plan.strategy, even=True))
        says = differences(asked, plan.strategy)
        return Change(plan, ", ".join(says), len(says))

    def least_ranks(self, asked: Strategy, most: int = 1 << 20) -> Plan | None:
        """The plan with the fewest ranks that fits, of the same strategy and replicas; None up to `most` ranks. Fewer
        ranks hold more each."""

        def at(groups: int) -> Plan:
            return self.estimate(replace(asked, ranks=groups * asked.replicas))

        high = 1
        while not at(high).fits:
            high *= 2
            if high * asked.replicas > most:
                return None
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if at(middle).fits else (middle, high)
        return at(high)

    def least_nbytes(self, strategy: Strategy) -> tuple[float, float]:
        """Bytes that a rank has at least, on the device and on the host: of shards, state and buffers, and what the
        device keeps for itself."""
        model = self.model(1, strategy.computed)
        at_rest = sum(g.memory.shard_nbytes + g.state_nbytes for u in units_of(model, strategy) for g in u.groups)
        device = model.buffer_nbytes + self.hardware.reserved
        return (device, at_rest) if strategy.offload else (device + at_rest, 0.0)

    def _cannot_fit(self, strategy: Strategy) -> bool:
        device, host = self.least_nbytes(strategy)
        return device > self.budget or (0 < self.host_budget < host)


def candidates(asked: Strategy, node: int, *, meshes: bool = True) -> Iterator[Strategy]:
    """Strategies with the same ranks and the same samples of a step. `meshes`: on every mesh; otherwise on that of
    `asked`, without replicas, and with the parameters in each node."""
    samples = asked.micro * asked.accumulate
    micros = [n for n in range(1, samples + 1) if samples % n == 0]
    few = [node] if asked.ranks % node == 0 else []
    shared = sharing(asked.ranks, node) if meshes else few
    replicas = sorted({1, asked.replicas, *(asked.ranks // n for n in shared)})
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
    kept: list[bool | int] = [node] if node < shard and shard % node == 0 else []
    return [True, False, *kept]


def differences(asked: Strategy, other: Strategy) -> list[str]:
    """Says in words what another strategy changes."""
    found = []
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
