"""What a pipeline takes and holds at least, beside its simulation; stages that others stand for; and the search over
pipelines beside simulating everything."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from fullshard.keys import ConfigError
from fullshard.migrate.parallelism import Parallelism
from fullshard.migrate.schedules import SCHEDULES
from fullshard.plan import Planner, Strategy
from fullshard.plan.account import KINDS, Simulated
from fullshard.plan.description import Model
from fullshard.plan.facts import Alike
from fullshard.plan.least import floor_of, least_of
from fullshard.plan.machine import Hardware
from fullshard.plan.pipeline import simulate_pipeline
from fullshard.plan.repeats import KEPT
from fullshard.plan.result import Limited, plan_of
from fullshard.plan.search import Degrees, Describe, candidates, degrees, differences
from fullshard.plan.sizes import Sizes, _are_equal
from fullshard.plan.spans import scaled, steps_of
from fullshard.plan.stages import pipeline_plan, stage_steps, steps_on_ranks
from fullshard.train.model import LlamaShape
from fullshard.train.planned import described_by, table_of
from fullshard.train.shapes import language_model
from tests.pure.test_plan import PLAIN

Found = list[tuple[str, float, float]]


class Described:
    """Describes a model of so many layers, also under pipelines; with `blocks` by a few of them, and by stages that
    stand for others."""

    def __init__(self, layers: int) -> None:
        # No degree of `tp` divides three heads and an odd width.
        self.program = language_model(LlamaShape(120, layers, 24, 3, 3, 63, 16, tie_embeddings=False), 16)
        self.alike: dict[object, Alike] = {}
        self.models: dict[tuple[object, ...], Model] = {}

    def by(self, ranks: int, schedule: str = "1F1B", each: int = 0, blocks: int = 0) -> Describe:
        more: dict[str, Any] = {} if ranks == 1 else {"pipeline_parallel_schedule": schedule}
        plan = Parallelism(pipeline_parallel_degree=ranks, pipeline_parallel_stages_per_rank=each, **more)

        def describe(samples: int, _: object, compute: str, alone: bool, ways: Any) -> Model:
            sizes: dict[str, Any] = {"samples": samples, "compute": compute, "alone": alone, "recompute": ways}
            key = (ranks, schedule, blocks, *sizes.values())
            if key not in self.models:
                given: dict[str, Any] = {"blocks": blocks, "alike": self.alike} if blocks else {}
                self.models[key] = described_by(plan, self.program, "model", ranks, **sizes, **given)
            return self.models[key]

        return describe

    def divide(self, found: Degrees, blocks: int = 0) -> Describe | str:
        tensor, context, experts, pipeline = found
        return "not here" if tensor * context * experts > 1 or pipeline > 4 else self.by(pipeline, blocks=blocks)


def hardware_of(draw: random.Random) -> Hardware:
    return replace(
        PLAIN,
        flops2=10 ** draw.uniform(5, 9),
        flops4=10 ** draw.uniform(5, 9),
        bandwidth=10 ** draw.uniform(5, 9),
        node=draw.choice([1, 2, 8]),
        intra_node=10 ** draw.uniform(4, 9),
        inter_node=10 ** draw.uniform(3, 9),
        latency=draw.choice([0.0, 1e-3]),
        contention=draw.choice([0.0, 0.1]),
        launch=draw.choice([0.0, 1e-4, 1e-2]),
        blocking=draw.random() < 0.2,
        backend=draw.choice(["nccl", "gloo"]),
    )


def _without_gradients(ranks: list[Simulated]) -> float:
    """The most of what a least knows of a schedule that computes gradients of weights apart."""
    known = [number for number, kind in enumerate(KINDS) if "gradients" not in kind]
    return max(sum(rank.peak.nbytes[number] for number in known) for rank in ranks)


@pytest.mark.sample(3)
@pytest.mark.hang_after(300)
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_pipeline_takes_or_holds_less_than_its_least(name: str) -> None:
    schedule, draw = SCHEDULES[name], random.Random(name)
    each = schedule.stages or 2
    describe = Described(4).by(2, name, 0 if schedule.stages else each)
    close, floors = [], []
    for number in range(24):
        computed = ["", "bfloat16"][number % 2]
        model = describe(draw.choice([1, 2]), None, computed, False, "none")
        strategy = Strategy(
            ranks=2 * draw.choice([1, 2, 4]),
            pipeline=2,
            schedule=name,
            stages=each,
            accumulate=4 * draw.choice([1, 2, 3]),
            micro=model.samples,
            compute=computed,
            reduce=draw.choice(["", "float32"]),
            reshard=not schedule.splits and draw.random() < 0.4,
            root_reshard=False,
            recompute="none" if schedule.splits else draw.choice(["none", "whole", "selective"]),
            offload=draw.random() < 0.2,
            optimizer=draw.choice(["adamw", "sgd", "none"]),
            prefetch_depth=draw.choice([0, 1, 2]),
        )
        if strategy.shard > 1 and draw.random() < 0.3:
            strategy = replace(strategy, replicas=2)
        hardware = hardware_of(draw)
        strategy = replace(strategy, backend=hardware.backend)
        stages = steps_on_ranks(model, stage_steps(model, strategy.recompute), strategy)
        table = table_of(strategy)
        least = least_of(stages, table, strategy, hardware)
        ranks = simulate_pipeline(stages, table, strategy, hardware)
        seconds, most = max(rank.seconds for rank in ranks), max(rank.peak.total for rank in ranks)
        assert 0 < least.seconds <= seconds, strategy
        assert 0 < least.device <= most, strategy
        assert least.host <= max(sum(nbytes for _, nbytes in rank.on_host) for rank in ranks)
        floor = floor_of(stages, strategy, hardware)
        assert 0 < floor.seconds <= least.seconds and 0 < floor.device <= least.device, strategy
        assert floor.host <= least.host
        close.append((least.seconds / seconds, least.device / (_without_gradients(ranks) if schedule.splits else most)))
        floors.append((floor.seconds / least.seconds, floor.device / least.device))
    # A least of nothing would be right, too: half of them are not far away.
    assert sorted(seconds for seconds, _ in close)[12] > 0.7 and sorted(most for _, most in close)[12] > 0.7
    # Without a table only such schedules are known well, and of all the time.
    near = 0.95 if schedule.stages == 1 else 0.2
    assert sorted(seconds for seconds, _ in floors)[12] > 0.7 and sorted(most for _, most in floors)[12] > near


@pytest.mark.parametrize(("flops", "launch", "blocking"), [(3e6, 1e-6, False), (1e12, 1e-2, False), (1e12, 1e-2, True)])
def test_passes_compute_and_launch_beside_gathers(flops: float, launch: float, blocking: bool) -> None:
    """Gathers take about as long as products, or as launches: beside a device, and of a host that computes."""
    model = Described(4).by(2)(1, None, "", False, "none")
    strategy = Strategy(4, pipeline=2, accumulate=8, reshard=True, root_reshard=False, prefetch_depth=0)
    given: dict[str, Any] = {"bandwidth": 1e12, "intra_node": 1e5, "node": 8}
    hardware = replace(PLAIN, flops4=flops, launch=launch, blocking=blocking, **given)
    stages, table = steps_on_ranks(model, stage_steps(model, "none"), strategy), table_of(strategy)
    found = simulate_pipeline(stages, table, strategy, hardware)[0].seconds
    least, floor = least_of(stages, table, strategy, hardware), floor_of(stages, strategy, hardware)
    assert 0.75 * found < floor.seconds <= least.seconds <= found


@pytest.mark.sample(2)
@pytest.mark.hang_after(300)
@pytest.mark.parametrize("ranks", [2, 4, 5, 8, 12])
def test_stages_that_others_stand_for_are_those_described(ranks: int) -> None:
    """Of 12 blocks: more than six in a stage, fewer, one, and a stage without any."""
    described = Described(12)
    proof = Sizes(described.by(1), None, described.by(1, blocks=KEPT), None)
    few = Sizes(described.by(ranks), None, described.by(ranks, blocks=KEPT), proof)
    for way in ("none", "selective", "whole"):
        model, steps = few.stages(2, "bfloat16", way)
        assert not few._models, "all stages were described"
        whole = described.by(ranks)(2, None, "bfloat16", False, "none")
        assert steps == stage_steps(whole, way)
        assert replace(model, stages=()) == replace(whole, stages=())
        for one, other in zip(model.stages, whole.stages, strict=True):
            assert one[2:] == other[2:] and _are_equal((one.model, steps[0][0]), (other.model, steps[0][0]))


def naively(described: Described, hardware: Hardware, budget: float, asked: Strategy) -> Found:
    """All that fits without the host: each strategy simulated whole, with all moments."""
    found = []
    for strategy in [asked, *degrees(asked, hardware.node)]:
        describe = described.divide((strategy.tensor, strategy.context, strategy.experts, strategy.pipeline))
        for each in () if isinstance(describe, str) else candidates(strategy, hardware.node):
            if strategy is not asked and each.replicas > 1:
                continue
            assert not isinstance(describe, str) and isinstance(each.recompute, str)
            models = [describe(n, None, "", False, "none") for n in (1, 2)]
            if each.pipeline > 1:
                one, two = (stage_steps(model, each.recompute) for model in models)
                steps = tuple((scaled(a, b, each.micro), None) for (a, _), (b, _) in zip(one, two, strict=True))
                try:
                    table = table_of(each)
                except ConfigError:
                    continue
                plans = [pipeline_plan(models[0], steps, table, each, hardware, Limited(budget))]
            else:
                step = scaled(steps_of(models[0], each.recompute), steps_of(models[1], each.recompute), each.micro)
                plans = [plan_of(models[0], step, each, hardware, budget=budget)]
                if plans[0].curable:
                    plans.append(plan_of(models[0], step, replace(each, even=True), hardware, budget=budget))
            for plan in (plan for plan in plans if plan.fits):
                says = differences(asked, plan.strategy)
                found.append((plan.seconds, len(says), plan.peak_nbytes, ", ".join(says) or "as asked for"))
    best = min(found)[0]
    found.sort(key=lambda f: (round(f[0] / best / 0.01), f[1], f[2], f[0], f[3]))
    return [(says, seconds, nbytes) for seconds, _, nbytes, says in found]


@pytest.mark.sample(1, full=4)
@pytest.mark.hang_after(300)
@pytest.mark.parametrize("seed", range(8))
def test_the_search_over_pipelines_finds_what_simulating_all_finds(seed: int) -> None:
    draw = random.Random(seed)
    described = Described(10)
    hardware = hardware_of(draw)
    asked = Strategy(4, pipeline=draw.choice([1, 2]), micro=1, accumulate=draw.choice([2, 4]), backend=hardware.backend)
    if asked.pipeline > 1:
        asked = replace(asked, reshard=False, root_reshard=False)
    own = described.by(asked.pipeline)
    given: dict[str, Any] = {
        "divide": described.divide,
        "short": lambda found: described.divide(found, KEPT),
        "degrees": (1, 1, 1, asked.pipeline),
        "table": table_of,
    }
    peak = Planner(own, hardware, **given).estimate(asked).peak_nbytes
    budget = peak * draw.choice([1.0, 1.3, 2.0])
    expected = naively(described, hardware, budget, asked)
    assert any("PP" in says for says, *_ in expected) or asked.pipeline > 1
    for most in (None, 3):
        found = Planner(own, hardware, budget=budget, **given).search(asked, most=most)
        assert [change.says for change in found] == [says for says, *_ in expected[:most]]
        for change, (_, seconds, nbytes) in zip(found, expected, strict=False):
            assert (change.plan.seconds, change.plan.peak_nbytes) == pytest.approx((seconds, nbytes), rel=1e-12)
