"""What a run says about the machine of its plan: each number of a machine is that of its own phase."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from fullshard.plan import Plan, Strategy, plan_of
from fullshard.plan.comparison import Measured, adjusted, measured_by, phases_of
from fullshard.plan.machine import Hardware
from fullshard.plan.spans import steps_of
from tests.pure.test_plan import PLAIN, _model

# Two blocks of 32 kB, 3 s of products, messages that are waited for, and an optimizer that takes time, too.
MACHINE = replace(PLAIN, bandwidth=4e5, intra_node=2e4, blocking=True, contention=0.3)
STRATEGY = Strategy(ranks=2, backend="late", prefetch_depth=0)


def _plan(hardware: Hardware, strategy: Strategy = STRATEGY) -> Plan:
    model = _model()
    return plan_of(model, steps_of(model, strategy.recompute), strategy, hardware)


def _run(hardware: Hardware, strategy: Strategy = STRATEGY, slower: float = 1.0) -> Measured:
    """A run on `hardware`, whose recorded steps were slower than others."""
    plan = _plan(hardware, strategy)
    phases = {name: seconds * slower for name, seconds in phases_of(plan).items()}
    return Measured(plan.seconds, None, None, 9, phases)


def _different(one: Hardware, other: Hardware) -> dict[str, float]:
    return {f.name: getattr(other, f.name) for f in fields(Hardware) if getattr(one, f.name) != getattr(other, f.name)}


@pytest.mark.parametrize("slower", [1.0, 1.2])
@pytest.mark.parametrize(
    ("planted", "says"),
    [
        ({"matmul": 0.4, "attention": 0.4, "stream": 0.4, "step": 1.0}, "compute: "),
        ({"intra_node": 5e3, "inter_node": PLAIN.inter_node / 4}, "bandwidth of messages: "),
        ({"intra_node": 5e4, "inter_node": PLAIN.inter_node * 2.5}, "bandwidth of messages: "),
        ({"exchanging": 0.25, "scattering": 0.25, "summing": 0.25}, "reductions: "),
        ({"step": 0.2}, "optimizer's step: "),
        ({"step": 5.0}, "optimizer's step: "),
    ],
    ids=str,
)
def test_each_number_is_found_by_its_own_phase(planted: dict[str, float], says: str, slower: float) -> None:
    run = _run(replace(MACHINE, **planted), slower=slower)
    found, said = adjusted(_plan(MACHINE), run)
    assert len(said) == 1 and said[0].startswith(says)
    assert _plan(found).seconds == pytest.approx(run.seconds, rel=0.01)
    assert _different(MACHINE, found) == pytest.approx(planted, rel=0.05)


def test_all_numbers_are_found_together() -> None:
    planted: dict[str, Any] = {"matmul": 0.5, "attention": 0.5, "stream": 0.5, "step": 0.3}
    planted |= dict.fromkeys(("exchanging", "scattering", "summing"), 0.4)
    planted |= {"intra_node": 8e3, "inter_node": PLAIN.inter_node * 0.4}
    run = _run(replace(MACHINE, **planted))
    found, said = adjusted(_plan(MACHINE), run)
    assert [line.partition(":")[0] for line in said] == [
        "compute",
        "bandwidth of messages",
        "reductions",
        "optimizer's step",
    ]
    assert _different(MACHINE, found) == pytest.approx(planted, rel=0.15)
    assert _plan(found).seconds == pytest.approx(run.seconds, rel=0.02)


def test_launches_and_latencies_differ_where_these_are_most_of_a_part() -> None:
    machine = replace(MACHINE, flops2=1e9, flops4=1e9, launch=0.1, intra_node=1e9, latency=0.5)
    for planted, says in (({"launch": 0.3}, "launches: "), ({"latency": 1.5}, "latency: ")):
        found, said = adjusted(_plan(machine), _run(replace(machine, **planted)))
        assert len(said) == 1 and said[0].startswith(says)
        assert _different(machine, found) == pytest.approx(planted, rel=0.02)


def test_a_machine_that_was_right_stays() -> None:
    found, said = adjusted(_plan(MACHINE), _run(MACHINE, slower=1.1))
    assert (found, said) == (MACHINE, [])


def test_without_phases_compute_differs_and_a_line_says_why() -> None:
    run = _run(replace(MACHINE, step=0.2))._replace(phases={})
    found, said = adjusted(_plan(MACHINE), run)
    assert _plan(found).seconds == pytest.approx(run.seconds, rel=0.01)
    assert said == ["compute: phases were not measured, and the step alone does not say what differs"]


def test_steps_that_begin_a_run_or_continue_it_are_left_out() -> None:
    records = [{"step": n, "seconds": 9.0 if n in (1, 4) else 1.0, "memory_bytes": 5} for n in range(1, 6)]
    assert measured_by(records, {1, 4})[::3] == (1.0, 3)
    assert measured_by(records[:1])[::3] == (9.0, 1)
    assert measured_by(records[3:], {1, 4})[::3] == (1.0, 1)


def test_shares_of_a_machine_give_times_by_hand() -> None:
    """16-bit operations, attention, the optimizer and reductions have shares of their own."""
    plain = _plan(PLAIN)
    # 8,000 numbers of this rank, of 28 bytes; the counters of steps are less than a thousandth.
    assert plain.simulated.optimizer_seconds == pytest.approx(28 * 8000 / 1e12, rel=1e-3)
    machine = replace(PLAIN, step=0.5, step_launch=2.0)
    # Each of two parameters is launched once.
    assert _plan(machine).simulated.optimizer_seconds == pytest.approx(4 + 28 * 8000 / 0.5e12)
    share = 16000  # a rank sends half of 32 kB
    assert PLAIN.collective("all-gather", 2, 1, 2 * share) == 160 == PLAIN.collective("all-to-all", 2, 1, 2 * share)
    shared = replace(PLAIN, exchanging=0.5, scattering=0.25, summing=0.2)
    assert shared.collective("all-gather", 2, 1, 2 * share) == 160 and shared.collective("send", 2, 1, 100) == 1
    for kind, seconds in (("all-to-all", 320), ("reduce-scatter", 640), ("all-reduce", 1600)):
        assert shared.collective(kind, 2, 1, 2 * share) == pytest.approx(seconds)
    both = replace(PLAIN, stream2=0.5, attention2=0.25)
    assert [both.memory_rate(size) for size in (2, 4)] == [0.5e12, 1e12]
    assert [both.attention_flops(size) for size in (2, 4)] == [25, 100]
    assert [PLAIN.memory_rate(2), PLAIN.attention_flops(2)] == [1e12, 100]


def test_the_planted_machine_has_all_phases() -> None:
    """The planted machine has waits of both kinds, and an optimizer whose time counts."""
    known = phases_of(_plan(MACHINE))
    assert all(seconds > 0.03 * _plan(MACHINE).seconds for name, seconds in known.items() if "other" not in name)
