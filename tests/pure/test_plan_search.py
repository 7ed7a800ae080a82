"""The search beside one that simulates everything in detail, and the fewest ranks beside all smaller ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from fullshard.plan import Planner, Strategy, plan_of
from fullshard.plan.description import MESSAGE, Kind, Line, Model
from fullshard.plan.machine import Hardware
from fullshard.plan.recomputation import on_host
from fullshard.plan.search import Change, Degrees, Describe, candidates, degrees, differences
from fullshard.plan.spans import scaled, steps_of
from tests.pure.test_plan import PLAIN, _model

Divided = Callable[[Degrees], Describe | str]
Found = list[tuple[str, float, float]]


def naively(described: Describe, divide: Divided, hardware: Hardware, budget: float, asked: Strategy) -> Found:
    """All that fits: each strategy simulated from its own two models, nothing left out and nothing shared."""
    device, own = not hardware.blocking, (asked.tensor, asked.context, asked.experts, asked.pipeline)
    for offload in (False, True) if device and not asked.offload else (asked.offload,):
        for moved in (False, True) if device and not asked.hosts_activations else (False,):
            found: list[tuple[float, int, float, str]] = []
            for strategy in [asked, *degrees(asked, hardware.node)]:
                axes = strategy.tensor, strategy.context, strategy.experts, strategy.pipeline
                describe = described if axes == own else divide(axes)
                hosted = moved and strategy.tensor == 1
                if isinstance(describe, str) or hosted != moved:
                    continue
                for each in candidates(strategy, hardware.node):
                    if strategy is not asked and each.replicas > 1:
                        continue
                    assert isinstance(each.recompute, str)
                    way = on_host(each.recompute) if hosted else each.recompute
                    models = [describe(n, None, "", False, way) for n in (1, 2)]
                    step = scaled(steps_of(models[0], way), steps_of(models[1], way), each.micro)
                    one = replace(each, offload=offload, recompute=way)
                    plan = plan_of(models[0], step, one, hardware, budget=budget)
                    even = replace(one, even=True)
                    plans = [plan, plan_of(models[0], step, even, hardware, budget=budget)] if plan.curable else [plan]
                    for plan in (plan for plan in plans if plan.fits):
                        says = differences(asked, plan.strategy)
                        found.append((plan.seconds, len(says), plan.peak_nbytes, ", ".join(says) or "as asked for"))
            if found:
                best = min(found)[0]
                found.sort(key=lambda f: (round(f[0] / best / 0.01), f[1], f[2], f[0], f[3]))
                return [(says, seconds, nbytes) for seconds, _, nbytes, says in found]
    return []


def shown(found: list[Change]) -> Found:
    return [(change.says, change.plan.seconds, change.plan.peak_nbytes) for change in found]


def _cases(seed: int) -> tuple[Describe, Divided, Hardware, float, Strategy]:
    """A model whose sizes, a machine whose speeds, and a budget that are drawn."""
    draw = random.Random(seed)
    rows, depth = draw.choice([129, 1000, 4096]), draw.randint(2, 3)
    work, wide = 10 ** draw.uniform(-1, 3), draw.choice([1, 10, 1000])

    def described(share: int, message: bool) -> Describe:
        def describe(samples: int, *_: object) -> Model:
            model = _model(samples * wide, depth, rows)
            lines = [
                line._replace(a=int(line.a * work / share)) if line.kind is Kind.OP else line
                for line in model.tape.lines
            ]
            if message:
                lines.insert(2, Line(Kind.OP, 1, 4 * samples * wide, 0, f"{MESSAGE}all_reduce"))
            tape = replace(model.tape, lines=tuple(lines), last_read={})
            return replace(model, tape=tape, samples=samples, tokens=samples)

        return describe

    legal = {(2, 1, 1, 1): 2, (4, 1, 1, 1): 4, (1, 2, 1, 1): 2} if draw.random() < 0.7 else {}
    hardware = replace(
        PLAIN,
        node=draw.choice([4, 8]),
        intra_node=10 ** draw.uniform(2, 6),
        inter_node=10 ** draw.uniform(1, 5),
        latency=draw.choice([0.0, 0.1, 10.0]),
        contention=draw.choice([0.0, 0.1]),
        launch=draw.choice([0.0, 0.01]),
        margin=draw.choice([0.0, 0.05]),
        reserved=draw.choice([0.0, 1e4]),
        fragmentation=draw.choice([0.0, 0.04]),
        blocking=draw.random() < 0.2,
    )
    asked = Strategy(draw.choice([2, 4, 8]), micro=draw.choice([1, 2]), accumulate=draw.choice([1, 2]))
    whole = plan_of(m := described(1, False)(1, None, "", False, ""), steps_of(m), asked, hardware).peak_nbytes

    def divide(axes: Degrees) -> Describe | str:
        return described(legal[axes], True) if axes in legal else "not legal"

    return described(1, False), divide, hardware, whole * draw.choice([0.1, 0.5, 0.9, 1.1, 2, 100]), asked


@pytest.mark.sample(1)
@pytest.mark.hang_after(400)
@pytest.mark.parametrize("seed", range(60))
def test_the_search_finds_what_a_search_through_everything_finds(seed: int) -> None:
    described, divide, hardware, budget, asked = _cases(seed)
    expected = naively(described, divide, hardware, budget, asked)
    for most in (None, 1, 3, 10):
        planner = Planner(described, hardware, budget=budget, divide=divide)
        assert shown(planner.search(asked, most=most)) == expected[:most], most


def test_what_cannot_be_among_the_first_is_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole recomputation computes a third more. Where messages are free it is not tried if others fit."""
    planner = Planner(lambda samples, *_: _model(samples, depth=4), replace(PLAIN, intra_node=1e12), budget=1e9)
    tried: list[Strategy] = []
    estimate = planner.estimate
    monkeypatch.setattr(planner, "estimate", lambda strategy: tried.append(strategy) or estimate(strategy))
    said: list[str] = []
    found = planner.search(Strategy(4, micro=4), most=3, say=said.append)
    assert len(found) == 3 and {each.recompute for each in tried} == {"none", "selective"}
    of = int(said[-1].split(" of ")[1].split()[0])
    assert 3 <= len(tried) < of and said[-1].startswith(f"data parallelism: {len(tried)} of {of} tried")


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", [1000, 129, 17])
def test_fewer_ranks_than_the_fewest_do_not_fit(rows: int) -> None:
    """Rows that ranks do not share evenly: more ranks may hold more each, so a bisection alone would miss some."""
    asked = Strategy(8)
    hardware = replace(PLAIN, latency=0.0, margin=0.05)
    for share in (0.02, 0.1, 0.3, 0.45, 0.6, 0.8, 1.1):
        one = Planner(lambda samples, *_: _model(samples, depth=6, rows=rows), hardware, budget=1e12)
        planner = Planner(one.describe, hardware, budget=share * one.estimate(Strategy(1)).peak_nbytes)
        fitting = [n for n in range(1, 65) if planner.estimate(replace(asked, ranks=n)).fits]
        found = planner.least_ranks(asked, most=64)
        assert (None if found is None else found.strategy.ranks) == (fitting[0] if fitting else None), share
        assert found is None or (found.fits and found.margin_nbytes <= found.spare_nbytes)


def test_the_least_seconds_are_those_of_the_dials() -> None:
    """One planner for compiled steps and others: each bound is below its own plan, and fusing takes less."""

    def described(samples: int, *_: object) -> Model:
        model = _model(samples)
        lines = [line._replace(b=int(1e13)) if line.name == "aten.gelu" else line for line in model.tape.lines]
        return replace(model, tape=replace(model.tape, lines=tuple(lines)))

    planner = Planner(described, replace(PLAIN, fused=0.25))
    plain, compiled = Strategy(2), Strategy(2, compiled=True)
    least = [planner.least_seconds(each) for each in (plain, compiled)]
    taken = [planner.estimate(each).seconds for each in (plain, compiled)]
    assert least[1] < least[0] <= taken[0] and least[1] <= taken[1] < taken[0]
