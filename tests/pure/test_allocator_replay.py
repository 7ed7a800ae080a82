"""The replay of torch's caching allocator with which published reserved memory is compared."""

from __future__ import annotations

import pytest

from benchmarks.allocator import Segment, replayed, without_temporaries
from fullshard.plan import Plan, Strategy
from fullshard.plan.description import OUTSIDE, Kind, Line
from fullshard.plan.result import plan_of
from tests.pure.test_plan import PLAIN, _model, steps_of

MIB = 1 << 20


def test_a_request_gets_the_smallest_hole_or_the_end() -> None:
    segment, reserved = Segment(MIB + 512), []

    def allocate(key: str, mib: float) -> None:
        segment.allocate(key, int(mib * MIB))
        reserved.append(segment.reserved / MIB)

    allocate("a", 10)
    allocate("b", 4)
    allocate("c", 10)
    segment.free("b")
    allocate("d", 6)  # more than the hole of 4
    allocate("e", 2)  # in that hole
    allocate("f", 2)  # in its rest
    segment.free("a")
    segment.free("e")
    allocate("g", 12)  # both together
    segment.free("d")
    allocate("h", 8)  # the free end grows by 2
    assert reserved == [10, 14, 24, 30, 30, 30, 30, 32]


def test_a_rest_of_a_mebibyte_is_lost() -> None:
    segment = Segment(MIB + 512)
    for key, mib in (("a", 4), ("b", 4)):
        segment.allocate(key, mib * MIB)
    segment.free("a")
    segment.allocate("c", 3 * MIB)
    segment.allocate("d", MIB)
    assert segment.reserved == 9 * MIB
    small = Segment(512)
    for key, nbytes in (("a", 1000), ("b", 1)):
        small.allocate(key, nbytes)
    small.free("a")
    small.allocate("c", 1)
    small.allocate("d", 1)
    assert small.reserved == 3 * 512, "of small ones none is"


# Two blocks of 8 million elements in float32 over two ranks: a shard has half of the bytes of full parameters.
WHOLE = 32e6


def _plan(accumulate: int = 1) -> Plan:
    model = _model(rows=1_000_000)
    return plan_of(model, steps_of(model), Strategy(ranks=2, accumulate=accumulate), PLAIN, budget=1e12)


def test_the_second_step_finds_the_state_of_the_optimizer() -> None:
    plan = _plan()
    # Both shards, the full parameters of a block, its gradient, and what is sent.
    assert replayed(plan, plan.model, steps=1) == pytest.approx(WHOLE + 3 * WHOLE, abs=1e4)
    # The state has twice the bytes of the shards; it lies where full parameters and gradients were.
    second = replayed(plan, plan.model)
    assert second == pytest.approx(WHOLE + 2 * WHOLE + 3 * WHOLE, abs=1e4)
    assert replayed(plan, plan.model, steps=4) == second, "a further step has the same"
    with pytest.raises(ValueError, match="one micro-batch"):
        replayed(_plan(accumulate=2), plan.model)


def test_fused_kernels_make_no_temporaries() -> None:
    def allocate(number: int, use: int = 1) -> Line:
        return Line(Kind.ALLOCATE, use, number, 8)

    def free(number: int, use: int = 1) -> Line:
        return Line(Kind.FREE, use, number)

    product, pointwise = Line(Kind.OP, 1, 5, 8, "aten.mm"), Line(Kind.OP, 1, 0, 8, "aten.mul")
    kept = [
        Line(Kind.ENTER, 1, 1),
        *(allocate(0), product),
        *(allocate(2), pointwise),  # a product reads it
        *(product, free(2), free(0)),
        Line(Kind.EXIT, 1),
        *(allocate(3, OUTSIDE), pointwise, free(3, OUTSIDE)),  # the loss is not of a unit
    ]
    gone = [allocate(1), pointwise, free(1)]
    assert without_temporaries([*kept[:3], *gone, *kept[3:]]) == [*kept[:3], pointwise, *kept[3:]]
