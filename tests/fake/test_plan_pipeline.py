"""Times of pipelines: tables of torch's own schedules, simulated, beside what is counted with pencil and paper.

Also what `fullshard plan` says of a pipeline.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fullshard import Program
from fullshard.cli import main
from fullshard.migrate.schedule_tables import rows_of
from fullshard.migrate.schedules import SCHEDULES, stages_of
from fullshard.plan import Strategy
from fullshard.plan.account import KINDS, Simulated
from fullshard.plan.description import Parameter, UnitShape
from fullshard.plan.pipeline import Action, StageStep, Table, read_table, shown, simulate_pipeline
from fullshard.plan.spans import Event, Span, Step, Work
from fullshard.plan.strategy import Unit, units_of
from fullshard.train.model import LlamaShape
from fullshard.train.shapes import language_model
from tests.pure.test_plan import PLAIN, _model

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_pipeline.toml"
# Messages take no time, and 100 operations a second.
FREE = replace(PLAIN, intra_node=1e30)


def stage(number: int, seconds: float = 1.0, message: float = 0.0) -> StageStep:
    """A stage without parameters whose forward takes `seconds`, and each half of its backward too."""
    span = Span(None, Work(matmul=100 * seconds), 0.0, 0.0)
    backward = replace(span, event=Event("loss", -1), work=Work(matmul=200 * seconds))
    halves = [replace(span, event=Event(kind, -1)) for kind in ("loss", "weights")]
    units = (Unit(UnitShape("", "Stage", (), None, number), (), True, 0),)
    whole, apart = (Step((span, *rest), (), 0.0, 1.0) for rest in ([backward], halves))
    return StageStep(units, whole, apart, message if number else 0.0, message, 0.0, 0.0)


def table_of(name: str, ranks: int, micros: int, each: int = 1) -> Table:
    return read_table(rows_of(SCHEDULES[name], ranks, each, micros))


def run(table: Table, micros: int, stages: list[StageStep], hardware: Any = FREE) -> list[Simulated]:
    strategy = Strategy(len(table), pipeline=len(table), accumulate=micros, optimizer="none")
    return simulate_pipeline(stages, table, strategy, hardware)


def simulated(name: str, ranks: int, micros: int, each: int = 1, **sizes: float) -> list[Simulated]:
    stages = [stage(number, 1.0 / each, **sizes) for number in range(ranks * each)]
    return run(table_of(name, ranks, micros, each), micros, stages)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("ranks", "micros"), [(2, 2), (4, 4), (4, 12), (8, 32)])
def test_one_stage_on_each_rank_waits_for_p_minus_1_of_m(name: str, ranks: int, micros: int) -> None:
    for found in simulated(name, ranks, micros):
        assert found.compute == pytest.approx(3.0 * micros)
        assert found.bubble / found.compute == pytest.approx((ranks - 1) / micros)
        assert found.seconds == pytest.approx(found.compute + found.bubble) and found.exposed_seconds == found.bubble


@pytest.mark.parametrize(("ranks", "micros", "each"), [(2, 4, 2), (4, 8, 2), (4, 8, 4), (8, 16, 2)])
def test_interleaved_stages_wait_less_by_their_number(ranks: int, micros: int, each: int) -> None:
    for found in simulated("Interleaved1F1B", ranks, micros, each):
        assert found.bubble / found.compute == pytest.approx((ranks - 1) / (micros * each))


@pytest.mark.parametrize(("ranks", "micros"), [(2, 4), (4, 8), (4, 16)])
def test_halves_of_backward_fill_what_others_wait_for(ranks: int, micros: int) -> None:
    each = [simulated(name, ranks, micros, 2) for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")]
    interleaved, halves, v = (max(found.seconds for found in ranks) for ranks in each)
    assert all(found.compute == pytest.approx(3.0 * micros) for ranks in each for found in ranks)
    assert v <= halves <= interleaved and v < interleaved
    # The way of the first micro-batch to the last rank and back is what is left of zero bubbles in a V.
    assert v == pytest.approx(3 * micros + (ranks - 1) / 2)


def test_two_ranks_and_two_micro_batches_with_pencil_and_paper() -> None:
    """Rank 0: F0 1, F1 2; B0 waits for rank 1: F0 2, B0 4; so B0 6; B1 of rank 1: F1 5, B1 7; so 9. A message takes a
    quarter of a second: the forward's, and those of both backwards, of which the first is there before the second."""
    assert simulated("1F1B", 2, 2)[0].seconds == 9
    stages = [stage(number, message=25.0) for number in range(2)]
    slow = run(table_of("1F1B", 2, 2), 2, stages, replace(PLAIN, intra_node=100.0))
    assert slow[0].along == slow[1].along == {"pp": 0.5}
    # Rank 1: F0 1.25 to 2.25, B0 to 4.25; its message before F1, to 4.5; F1 to 5.5, B1 to 7.5, there at 7.75.
    assert [found.seconds for found in slow] == [9.75, 9.75]


def test_no_optimizer_begins_before_the_last_rank_is_done() -> None:
    """As above rank 1 is done after 7 seconds, and rank 0 after 9. AdamW reads and writes 10 elements of rank 1 in
    float32, their two states and a count of steps, and reads their gradients: 2 * 124 + 40 bytes."""
    strategy = Strategy(2, pipeline=2, accumulate=2)
    matrix = Parameter("weight", (10,), "float32")
    shape = UnitShape("", "Stage", (matrix,), None, 1)
    units = units_of(replace(_model(), units=(shape,)), strategy)
    stages = [stage(0), stage(1)._replace(units=units)]
    found = simulate_pipeline(stages, table_of("1F1B", 2, 2), strategy, replace(FREE, bandwidth=72.0))
    assert [one.optimizer_seconds for one in found] == [0.0, 4.0]
    assert [one.seconds for one in found] == [13.0, 13.0]


def test_a_stage_with_more_to_do_holds_up_the_others() -> None:
    slow = [stage(number, 2.0 if number == 2 else 1.0) for number in range(4)]
    found = run(table_of("1F1B", 4, 12), 12, slow)
    assert found[2].compute == 2 * 3 * 12 and found[2].bubble < found[1].bubble
    assert found[2].seconds >= found[2].compute


@pytest.mark.parametrize(("name", "most"), [("1F1B", [4, 3, 2, 1]), ("GPipe", [8, 8, 8, 8])])
def test_micro_batches_in_flight_are_those_of_the_schedule(name: str, most: list[int]) -> None:
    """Each forward leaves 10 bytes for its backward; received are 7 bytes forward and as many backward for each."""
    stages = []
    for number in range(4):
        one = stage(number, message=7.0)
        forward, backward = one.step.spans
        spans = (replace(forward, peak=10.0, end=10.0), replace(backward, peak=10.0, end=0.0))
        stages.append(one._replace(step=replace(one.step, spans=spans)))
    found = run(table_of(name, 4, 8), 8, stages)
    for number, (rank, count) in enumerate(zip(found, most, strict=True)):
        there = dict(zip(KINDS, rank.peak.nbytes, strict=True))
        assert there["activations"] == 10.0 * count
        assert there["stage buffers"] >= 8 * 7.0 * ((number > 0) + (number < 3))


# ---- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micros"), [(2, 4), (4, 8)])
def test_each_micro_batch_goes_through_each_stage_once(name: str, ranks: int, micros: int) -> None:
    schedule = SCHEDULES[name]
    each = schedule.stages or 2
    table = table_of(name, ranks, micros, each)
    for rank, row in enumerate(table):
        counts = Counter((action.kind, action.stage) for action in row)
        own = stages_of(rank, ranks, each, schedule)
        assert {action.stage for action in row} == {*own}
        for number in own:
            assert counts["F", number] == counts["B", number] + counts["W", number] == micros
            assert counts["I", number] == counts["W", number] and counts["REDUCE_GRAD", number] == 1
            place = {(action.kind, action.micro): i for i, action in enumerate(row) if action.stage == number}
            after = [place.get(("B", micro), place.get(("I", micro), -1)) for micro in range(micros)]
            assert all(place["F", micro] < after[micro] for micro in range(micros))
            for kind, other in (("SEND_F", number + 1), ("SEND_B", number - 1)):
                leaves = 0 <= other < ranks * each and other not in own
                assert counts[kind, number] == (micros if leaves else 0)
    assert any(action.kind == "I" for row in table for action in row) is schedule.splits


def test_tables_that_do_not_end_and_unknown_actions_are_refused() -> None:
    first = ((Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0)))
    with pytest.raises(ValueError, match="found ranks that wait: 0B0, 1F0"):
        run(first, 1, [stage(0), stage(1)])
    for word in ("0X0", "0F", "0REDUCE_GRAD1"):
        with pytest.raises(ValueError, match="expected an action such as 0F0"):
            read_table([[word]])
    assert shown(Action("SEND_B", 1, 2)) == "1SEND_B2"


# ---- the command -----------------------------------------------------------------------------------------------------


def small() -> Program:
    return language_model(LlamaShape(120, 4, 32, 4, 2, 64, 16, tie_embeddings=False), 16)


def tied() -> Program:
    return language_model(LlamaShape(120, 4, 32, 4, 2, 64, 16, tie_embeddings=True), 16)


def without_loss_fn() -> Program:
    return replace(small(), loss_fn=None)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments, "--hardware", "cpu"])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.slow
def test_the_largest_stage_is_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    def with_(*arguments: str) -> dict[str, Any]:
        code, out, _ = planned(
            capsys, f"{__name__}:small", "--ranks", "4", "--pipeline-parallel", "2", "--json", *arguments
        )
        assert code == 0
        found: dict[str, Any] = json.loads(out)
        return found

    found = with_("--batch", "4")
    ranks = found["pipeline"]
    assert [rank["stages"] for rank in ranks] == [[0], [1]]
    assert found["peak_bytes"] == max(rank["peak_bytes"] for rank in ranks) > min(rank["peak_bytes"] for rank in ranks)
    # The embedding is in the first stage, the head in the last, and nothing is in both.
    whole = 2 * 120 * 32 + 32 + 4 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 64)
    assert sum(rank["parameters"] for rank in ranks) == whole == found["parameters"]
    # Four micro-batches of 16 tokens of width 32 in float32, to the next stage and back.
    sent = [{m["operation"]: (m["messages"], m["bytes"]) for m in rank["stage_messages"]} for rank in ranks]
    assert sent[0]["send of activations"] == sent[1]["send of gradients"] == (4, 4 * 16 * 32 * 4)
    assert "send of gradients" not in sent[0] and "send of activations" not in sent[1]
    # Parameters are gathered once in a step, and gradients reduced once, whatever the number of micro-batches.
    assert [rank["messages"] for rank in with_("--batch", "8")["pipeline"]] == [rank["messages"] for rank in ranks]
    again = with_("--batch", "4", "--reshard", "always")
    assert again["messages"]["shard"] > found["messages"]["shard"]


@pytest.mark.slow
def test_text_and_a_budget_between_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (f"{__name__}:small", "--ranks", "2", "--pipeline-parallel", "2", "--batch", "4")
    ranks = json.loads(planned(capsys, *arguments, "--json")[1])["pipeline"]
    low, high = sorted(rank["peak_bytes"] for rank in ranks)
    code, out, _ = planned(capsys, *arguments, "--budget", f"{(low + high) / 2e9}")
    assert code == 1 and "stage 1: layers.2" in out
    assert "pipeline: 2 ranks, 1F1B, 4 micro-batches; the largest rank (*) is the plan above" in out


def test_a_config_of_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (str(EXAMPLE), "--ranks", "4")
    found = json.loads(planned(capsys, *arguments, "--json")[1])
    assert found["strategy"]["pipeline"] == 2 and found["strategy"]["accumulate"] == 4
    assert found["strategy"]["reshard_after_forward"] is False and len(found["pipeline"]) == 2


def three_heads() -> Program:
    """Nothing but a pipeline divides its layers over two or four ranks."""
    return language_model(LlamaShape(120, 4, 48, 3, 3, 64, 16, tie_embeddings=False), 16)


@pytest.mark.slow
def test_the_search_tries_pipelines(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (f"{__name__}:three_heads", "--ranks", "4", "--batch", "4")
    piped = ("--pipeline-parallel", "4", "--batch", "16", "--recompute", "whole")
    enough = json.loads(planned(capsys, *arguments, *piped, "--json")[1])["peak_bytes"]
    found = planned(capsys, *arguments, "--budget", str(enough / 1e9), "--search")[1].partition("fastest first")[2]
    assert "PP 4, micro-batch 1 x 16, recompute whole" in found


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("entry", "arguments", "said"),
    [
        ("small", ("--pipeline-parallel", "3", "--ranks", "8"), "are 6 of 8 ranks; nearest legal plan"),
        ("small", ("--pipeline-parallel", "8", "--ranks", "8"), "expected a layer for each stage"),
        ("small", ("--pipeline-parallel", "2"), "1F1B needs at least as many as there are stages, 2"),
        ("small", ("--pipeline-parallel", "2", "--batch", "2", "--pipeline-schedule", "1f2b"), "expected one of 1F1B"),
        ("small", ("--pipeline-schedule", "GPipe"), "has no effect with pipeline_parallel_degree = 1"),
        ("small", ("--pipeline-parallel", "2", "--batch", "4", "--hosts", "2"), "expected data parallelism alone"),
        (
            "small",
            ("--pipeline-parallel", "2", "--batch", "4", "--pipeline-schedule", "ZBVZeroBubble", "--reshard", "always"),
            "reshard: expected never with ZBVZeroBubble",
        ),
        (
            "small",
            ("--pipeline-parallel", "2", "--batch", "4", "--pipeline-schedule", "DualPipeV", "--recompute", "whole"),
            "recompute: expected none beside a schedule that computes gradients of weights apart",
        ),
        ("tied", ("--pipeline-parallel", "2", "--batch", "4"), "does not count a parameter that stages share"),
        ("without_loss_fn", ("--pipeline-parallel", "2", "--batch", "4"), "expected Program(loss_fn=...)"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], entry: str, arguments: tuple[str, ...], said: str) -> None:
    code, _, error = planned(capsys, f"{__name__}:{entry}", "--ranks", "4", *arguments)
    assert code == 2 and said in error and error.count("\n") == 1, error
