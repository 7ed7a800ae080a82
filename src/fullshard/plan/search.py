"""Finds the strategies that fit, and the fastest of them: every combination of the dials is simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, lcm

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


# (ranks along `tp`, along `cp`, and over which experts are divided) -> the model as data of one of them, None where the
# model or the ranks do not allow these degrees
Divide = Callable[[tuple[int, int, int]], Describe | None]


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
        divide: Divide | None = None,
    ) -> None:
        """`divide`: for a search with other degrees of the axes beside data parallelism; None: there is none."""
        self.describe = describe
        self.divide = divide
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
        step = steps_of(model, ways, compiled_loss=strategy.compiled_loss)
        return self._planned(model, step, replace(strategy, recompute=ways))

    def estimate(self, strategy: Strategy) -> Plan:
        """The same from the model at one and two samples: every figure is taken to be linear in them."""
        ways = self._ways(strategy)
        one, two = (self.model(n, strategy.computed, recompute=ways) for n in (1, 2))
        steps = []
        for model in (one, two):
            key = (model.samples, strategy.computed, ways, strategy.compiled_loss)
            if key not in self._steps:
                self._steps[key] = steps_of(model, ways, compiled_loss=strategy.compiled_loss)
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
        (`candidates`), which takes a third of the time; and with other degrees (`degrees`), one axis at a time, with
        each recomputation and micro-batch."""
        device = not self.hardware.blocking
        hosts = device and not asked.hosts_activations
        offloads = (False, True) if device and not asked.offload else (asked.offload,)
        planners = [(self, asked), *(self._divided(asked) if meshes else ())]
        for offload, moved in product(offloads, (False, True)[: 1 + hosts]):
            found = []
            for planner, strategy in planners:
                # Activations of divided layers are not planned on the host.
                hosted = (moved or asked.hosts_activations) and strategy.tensor == 1
                if moved and not hosted:
                    continue
                tried = candidates(strategy, self.hardware.node, meshes=meshes)
                if strategy is not asked:
                    tried = (each for each in tried if (each.replicas, each.reshard) == (1, strategy.reshard))
                found += planner._fitting(asked, tried, offload, hosted)
            if found:
                return ranked_by_time(found)
        return []

    def _divided(self, asked: Strategy) -> Iterator[tuple[Planner, Strategy]]:
        """Yields what was asked for with another degree of one axis, and as many samples of all ranks; with a planner
        of a model divided so."""
        for strategy in degrees(asked, self.hardware.node) if self.divide is not None else ():
            assert self.divide is not None
            described = self.divide((strategy.tensor, strategy.context, strategy.experts))
            if described is not None:
                yield (
                    Planner(
                        described,
                        self.hardware,
                        budget=self.budget,
                        host_budget=self.host_budget,
                        sequence=self.sequence,
                        failure_hours=self.failure_hours,
                    ),
                    strategy,
                )

    def _fitting(self, asked: Strategy, tried: Iterable[Strategy], offload: bool, hosted: bool) -> list[Change]:
        found = []
        for strategy in tried:
            ways = strategy.recompute
            assert isinstance(ways, str)
            one = replace(strategy, offload=offload, recompute=on_host(ways) if hosted else ways)
            try:
                if self._cannot_fit(one):
                    continue
                plan = self.estimate(one)
            except ValueError:
                continue  # a degree that does not divide
            if plan.fits:
                found.append(_beside(asked, plan))
        if not found:
            return []
        found += [self._even(asked, change) for change in found if change.plan.curable]
        return ranked_by_time(found)

    def _even(self, asked: Strategy, change: Change) -> Change:
        """The same with the placement that a line about padding recommends. It has fewer bytes, so it fits."""
        return _beside(asked, self.estimate(replace(change.plan.strategy, even=True)))

    def least_ranks(self, asked: Strategy, most: int = 1 << 20) -> Plan | None:
        """The plan with the fewest ranks that fits, of the same strategy and replicas; None up to `most` ranks. Fewer
        ranks hold more each."""

        # Each shares a layer, a sequence and experts with as many as before.
        together = asked.replicas * lcm(asked.tensor * asked.context, asked.experts)

        def at(groups: int) -> Plan:
            return self.estimate(replace(asked, ranks=groups * together, hosts=1))

        high = 1
        while not at(high).fits:
            high *= 2
            if high * together > most:
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
    # Of the ranks that have the same part of each layer so many are in a node.
    ranks, node = asked.ranks // asked.tensor, max(node // asked.tensor, 1)
    few = [node] if ranks % node == 0 else []
    shared = sharing(ranks, node) if meshes else few
    replicas = sorted({1, asked.replicas, *(ranks // n for n in shared)})
    if asked.experts > 1:
        replicas = [asked.replicas]  # the model has the experts of so many ranks
    for copies, recompute, micro in product(replicas, (NONE, SELECTIVE, WHOLE), micros):
        shard = ranks // copies
        if shard % asked.context or shard * asked.tensor % asked.experts:
            continue
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


def degrees(asked: Strategy, node: int) -> Iterator[Strategy]:
    """`asked` with another degree of one axis, inside of a node, and as many samples of a step of all ranks; none where
    these cannot be divided so.

    >>> [(s.tensor, s.micro, s.accumulate) for s in degrees(Strategy(8, micro=2), 4) if s.context == s.experts == 1]
    [(2, 2, 2), (4, 2, 4)]
    """
    samples = asked.micro * asked.accumulate
    own = asked.tensor, asked.context, asked.experts
    for place, most in enumerate((node, node, asked.ranks)):
        for degree in (n for n in range(1, most + 1) if asked.ranks % n == 0 and n != own[place]):
            changed = [*own]
            changed[place] = degree
            tensor, context, experts = changed
            every, left = divmod(samples * tensor * context, asked.tensor * asked.context)
            if left:
                continue
            micro = gcd(asked.micro, every)
            try:
                yield replace(
                    asked,
                    replicas=1,
                    reshard=bool(asked.reshard),
                    tensor=tensor,
                    context=context,
                    experts=experts,
                    micro=micro,
                    accumulate=every // micro,
                )
            except ValueError:
                continue  # it does not divide the ranks


def ranked_by_time(changes: list[Change]) -> list[Change]:
    """The fastest first; within one percent of each other, that with the fewest changes."""
    best = min(change.plan.seconds for change in changes)
    return sorted(changes, key=lambda c: (round(c.plan.seconds / best / 0.01), c.count, c.plan.peak_nbytes))


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
    kept: list[bool | int] = [node] if node < shard and shard % node == 0 else []
    return [True, False, *kept]


def differences(asked: Strategy, other: Strategy) -> list[str]:
    """Says in words what another strategy changes."""
    found = [
        f"{name} {getattr(other, axis)}" if getattr(other, axis) > 1 else f"no {name}"
        for axis, name in (("tensor", "TP"), ("context", "CP"), ("experts", "EP"))
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
