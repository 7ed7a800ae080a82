"""Times of pipelines: tables of torch's own schedules, run action by action, beside what their papers say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from fullshard.plan.pipeline import BACKWARD, FORWARD, Action, Costs, one_f_one_b, read_table, run_table

# A backward is twice a forward, in two halves.
EVEN = Costs(1.0, 1.0, 1.0)


class Stage:
    """What torch's schedules read of a stage."""

    def __init__(self, index: int, rank: int, ranks: int, stages: int) -> None:
        self.stage_index, self.group_rank, self.group_size, self.num_stages = index, rank, ranks, stages
        self.is_first, self.is_last, self.has_backward = index == 0, index == stages - 1, False
        self.device, self.group, self.submod, self.stage_index_to_group_rank = "cpu", None, None, {}


def table_of(name: str, ranks: int, micros: int, each: int = 1) -> Any:
    """The table of torch's schedule of that name, with `each` stages on a rank; of 1F1B the library's own."""
    kind = getattr(schedules, f"Schedule{name}")
    stages = ranks * each
    own = [Stage(rank, 0, ranks, stages) for rank in range(0, stages, ranks)]
    if name == "1F1B":
        return one_f_one_b(ranks, micros)
    if each == 1:
        made = kind(own[0], micros, loss_fn=lambda *_: None)
        order = made._get_pipeline_order()
    else:
        if name == "ZBVZeroBubble":
            own = [Stage(0, 0, ranks, stages), Stage(stages - 1, 0, ranks, stages)]
        made = kind(own, micros, loss_fn=lambda *_: None)
        order = made.pipeline_order
    return read_table([[str(action) if action else "" for action in order[rank]] for rank in range(ranks)])


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("ranks", "micros"), [(2, 2), (4, 4), (4, 12), (8, 32)])
def test_one_stage_on_each_rank_wastes_p_minus_1_of_m(name: str, ranks: int, micros: int) -> None:
    ran = run_table(table_of(name, ranks, micros), EVEN)
    assert ran.busy == (3.0 * micros,) * ranks
    assert ran.bubble == pytest.approx((ranks - 1) / micros)


@pytest.mark.parametrize(("ranks", "micros", "each"), [(2, 4, 2), (4, 8, 2), (4, 8, 4), (8, 16, 2)])
def test_interleaved_stages_waste_less_by_their_number(ranks: int, micros: int, each: int) -> None:
    # A stage is a part of what a rank has.
    part = Costs(*(seconds / each for seconds in (1.0, 1.0, 1.0)))
    ran = run_table(table_of("Interleaved1F1B", ranks, micros, each), part)
    assert ran.busy == pytest.approx((3.0 * micros,) * ranks)
    assert ran.bubble == pytest.approx((ranks - 1) / (micros * each))


@pytest.mark.parametrize(("ranks", "micros"), [(2, 4), (4, 8), (4, 16)])
def test_halves_of_backward_fill_what_others_waste(ranks: int, micros: int) -> None:
    part = Costs(0.5, 0.5, 0.5)
    interleaved, halves, v = (
        run_table(table_of(name, ranks, micros, 2), part)
        for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
    )
    assert interleaved.busy == halves.busy == v.busy
    assert v.seconds <= halves.seconds <= interleaved.seconds and v.seconds < interleaved.seconds
    # No rank can begin before the first ranks' forwards have come to it, nor the last end before its own work.
    assert v.seconds >= max(v.busy)


def test_two_ranks_and_two_micro_batches_by_hand() -> None:
    """Rank 0: F0 1, F1 2; B0 waits for rank 1: F0 2, B0 4; so B0 6; B1 of rank 1: F1 5, B1 7; so 9."""
    assert run_table(table_of("1F1B", 2, 2), EVEN).seconds == 9
    # Each of the messages on that way adds its time: forward, backward of 0, backward of 1.
    slow = run_table(table_of("1F1B", 2, 2), replace(EVEN, message=0.25))
    assert slow.seconds == 9 + 2 * 0.25


def test_a_stage_with_more_to_do_holds_up_the_others() -> None:
    costs = {stage: EVEN for stage in range(4)} | {2: Costs(2.0, 2.0, 2.0)}
    ran = run_table(table_of("1F1B", 4, 12), costs)
    assert ran.seconds >= 2 * 3 * 12 and max(ran.busy) == ran.busy[2] == 2 * 3 * 12
    # One that has less never makes it slower.
    assert run_table(table_of("1F1B", 4, 12), costs | {0: Costs(0.5, 0.5, 0.5)}).seconds <= ran.seconds


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_slower_messages_never_end_sooner(name: str) -> None:
    table = table_of(name, 4, 8)
    ends = [run_table(table, replace(EVEN, message=seconds)).seconds for seconds in (0.0, 0.1, 0.5, 2.0)]
    assert ends == sorted(ends) and ends[0] < ends[-1]


def test_tables_that_do_not_end_and_unknown_actions_are_refused() -> None:
    backward_first = [[Action(BACKWARD, 0, 0), Action(FORWARD, 0, 0)]]
    with pytest.raises(ValueError, match="found ranks that wait: 0B0"):
        run_table(backward_first, EVEN)
    with pytest.raises(ValueError, match="expected an action such as 0F0"):
        read_table([["0X0"]])
