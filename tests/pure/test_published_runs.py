"""The published runs that plans are compared with: which half a line is in, and what the dated document has of it."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.as_published import hidden_seconds, reserved_nbytes, with_sums_in_place
from benchmarks.plan_truth import (
    FILE,
    FITTED,
    FLASH_1,
    HELD_OUT,
    LATER,
    failed,
    half_of,
    has_axes,
    name_of,
    published,
    strategy_of,
    unasked,
)
from benchmarks.segments import GATHER, Segments, reserved_by_fsdp1
from fullshard.plan import Strategy, find_hardware
from fullshard.plan.account import KINDS
from fullshard.plan.description import MESSAGE, OUTSIDE, Kind, Line
from fullshard.plan.machine import PROFILES
from fullshard.plan.result import plan_of
from fullshard.plan.spans import steps_of
from tests.pure.test_plan import PLAIN, _model

DOCUMENT = FILE.with_name("plan_truth_2026-11-28.md").read_text()
AXES = FILE.with_name("plan_truth_axes_2026-11-28.md").read_text()
RUNS = published()


def test_each_line_has_a_source_a_name_of_its_own_and_a_legal_strategy() -> None:
    sources = tomllib.loads(FILE.read_text())["sources"]
    assert {run["source"] for run in [*(run for run, _ in RUNS), *unasked(), *failed()]} == set(sources)
    assert len({name_of(run) for run, _ in RUNS}) == len(RUNS) >= 60
    for run, _ in RUNS:
        assert strategy_of(run).ranks == run["devices"] and find_hardware(run["hardware"]).time_error > 0


@pytest.mark.parametrize("key", ["tokens_per_second", "reserved_gib", "active_gib"])
def test_the_half_of_a_line_does_not_depend_on_what_came_out(key: str) -> None:
    for run, half in RUNS:
        assert half_of({**run, key: 1}) == half
    halves = [half for _, half in RUNS]
    assert min(halves.count(FITTED), halves.count(HELD_OUT)) >= 20 and halves.count(LATER) >= 10
    # What is known of a run decides.
    first: dict[str, Any] = next(run for run, half in RUNS if half != LATER and "half" not in run)
    assert {half_of({**first, "micro": n}) for n in range(8)} == {FITTED, HELD_OUT}


def test_the_document_has_every_line_and_its_half() -> None:
    for run, half in RUNS:
        document = AXES if has_axes(run) else DOCUMENT
        assert f"| {name_of(run)} | {half} | {run['tokens_per_second']:,} |" in document, name_of(run)
    assert all(each["line"] in AXES for each in unasked())


def test_lines_over_axes_fitted_nothing() -> None:
    assert {half for run, half in RUNS if has_axes(run)} == {LATER}
    assert sum(has_axes(run) for run, _ in RUNS) >= 20


# Causal, heads of width 128, 8,192 tokens, forward and backward, TFLOP/s of an H100: Dao-AILab/flash-attention#1791,
# and figures 5 and 6 of arXiv:2407.08608 (its backward without a mask). Backward has 2.5 times the operations.
FLASH_2 = ((284.1, 287.1), (333.0, 318.0))
# The largest products alone, of the peak: stas00/ml-engineering, compute/accelerator/README.md.
LARGEST = {"a100-80g": 0.869, "h200-141g": 0.803, "b200-180g": 0.776, "mi300x-192g": 0.601}


def test_attention_has_the_rate_of_torch_s_kernel() -> None:
    least, most = (3.5 / (1 / forward + 2.5 / backward) / 989 for forward, backward in FLASH_2)
    for name in ("h100-80g", "h100-96g", "h200-141g"):
        assert least < PROFILES[name].attention < most
    assert PROFILES["a100-80g"].attention == 0.50, "the lower end of what arXiv:2307.08691 states"
    # That of lines of before it, which alone are compared with it.
    for name, share in FLASH_1.items():
        assert share < PROFILES[name].attention
    old = {run["source"] for run, _ in RUNS if run.get("attention") == "flash-1"}
    assert old == {"foundry"}
    assert {run["source"] for run, _ in RUNS if run.get("attention") == "cudnn"} == {"bridge"}


def test_products_of_a_gpu_without_fitted_lines_reach_what_an_a100_s_do_of_the_largest() -> None:
    own = PROFILES["a100-80g"].matmul / LARGEST["a100-80g"]
    for name, share in LARGEST.items():
        assert PROFILES[name].matmul == pytest.approx(share * own, abs=0.006), name


def test_a_line_whose_conditions_were_corrected_stays_in_its_half() -> None:
    corrected = [(run, half) for run, half in RUNS if "half" in run]
    assert len(corrected) == 4
    wrong = {"foundry": {"accumulate": 1}, "titan-165": {"hardware": "h100-80g"}}
    for run, half in corrected:
        first = {key: value for key, value in run.items() if key != "half"} | wrong[run["source"]]
        assert half_of(first) == half


def _within(document: str, begins: str) -> float:
    """Within which share nine of ten lines are, by the first row of a summary that begins so."""
    row = next(line for line in document.splitlines() if line.startswith(begins))
    return float(row.split(" | ")[-2].removesuffix("%")) / 100


@pytest.mark.parametrize("name", ["h100-80g", "h100-96g", "a100-80g", "h200-141g", "b200-180g"])
def test_an_answer_states_the_error_that_its_hardware_has(name: str) -> None:
    hardware = PROFILES[name]
    of_speed = _within(DOCUMENT, f"| {name} | held out and later |")
    assert of_speed <= hardware.time_error <= of_speed + 0.10
    # Others have no line with memory: theirs is that of all.
    own = name if name in ("h100-96g", "h200-141g") else "all"
    memory = DOCUMENT[DOCUMENT.index("| memory | lines |") :]
    of_memory = _within(memory, f"| {own} |")
    assert of_memory <= hardware.memory_error <= of_memory + 0.05 and hardware.margin <= hardware.memory_error


def test_no_plan_of_a_run_without_room_fits() -> None:
    rows = DOCUMENT[DOCUMENT.index("| published as out of memory |") :].splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [name_of(run) for run in failed()]
    assert len(rows) >= 2 and all(row.endswith("| no |") for row in rows)


# Two blocks of 8,000 elements in float32 over two ranks; messages have 16 bytes of their own.
SHARDS, WHOLE, ACTIVATIONS = 2 * 16_000, 2 * 32_000, 190


def test_outputs_on_streams_of_their_own_stay_reserved() -> None:
    model = _model()
    plan = plan_of(model, steps_of(model), Strategy(ranks=2), PLAIN, budget=1e9)
    beyond = reserved_nbytes(plan) - plan.simulated.peak.total
    # At the peak no gradient of a shard is there, and no output of an all-gather beside the parameters.
    assert beyond == pytest.approx(SHARDS + WHOLE, abs=4 * 16)
    short = plan_of(model, steps_of(model), Strategy(ranks=2), PLAIN, budget=2e5)
    assert reserved_nbytes(short) == 2e5, "not more than the device has"
    # This library has them on the stream of compute.
    assert plan.allocator_nbytes == plan.simulated.peak.total


def test_sums_in_place_hold_one_gradient_beside_them() -> None:
    model = _model()
    plan = plan_of(model, steps_of(model), Strategy(ranks=2, accumulate=3), PLAIN, budget=1e9)
    found = with_sums_in_place(plan).simulated.peak
    states, held, gradient = 3 * SHARDS, WHOLE, WHOLE / 2
    assert found.total == pytest.approx(states + held + WHOLE + gradient + ACTIVATIONS, abs=16)
    assert found.total < plan.simulated.peak.total


def test_sums_in_place_hold_one_gradient_of_a_shard() -> None:
    model = _model(depth=6)
    plan = plan_of(model, steps_of(model), Strategy(ranks=2, accumulate=3, send_each=True), PLAIN, budget=1e9)
    place = KINDS.index("gradients of shards")
    found = with_sums_in_place(plan).simulated.peak.nbytes[place]
    # SHARDS are of two blocks of six. This library has three blocks' twice when the peak comes.
    assert found == 3 * SHARDS + 6 * 16 < plan.simulated.peak.nbytes[place]


def test_segments_give_no_memory_of_one_stream_to_another() -> None:
    mib = 1 << 20
    memory = Segments()
    memory.allocate("a", 30 * mib)
    memory.free(["a"])
    memory.allocate("b", 30 * mib, GATHER)
    assert memory.reserved == 60 * mib
    # A free block is divided if more than 1 MiB is left, and is one again.
    memory.allocate("c", 12 * mib)
    memory.allocate("d", 18 * mib)
    assert memory.reserved == 60 * mib
    memory.free(["c", "d"])
    memory.allocate("e", 30 * mib)
    assert memory.reserved == 60 * mib
    # Of segments of 20 MiB, of 2 MiB, and of whole 2 MiB.
    memory.allocate("f", 3 * mib)
    memory.allocate("g", 1000)
    memory.allocate("h", 11 * mib)
    assert memory.reserved == (60 + 20 + 2 + 0) * mib
    memory.allocate("i", 7 * mib)
    assert memory.reserved == (60 + 20 + 2 + 20) * mib


def test_what_fsdp1_reserves_has_its_streams() -> None:
    # Two blocks of 8e6 elements over two ranks, whose gradients are made in float32: 32 MiB.
    model = _model(rows=1_000_000)
    strategy = Strategy(ranks=2, compute="bfloat16", reduce="float32")
    found = reserved_by_fsdp1(plan_of(model, steps_of(model), strategy, PLAIN, budget=1e12), model)
    # Their states come into the memory of the first step's gradients, which the second one needs again.
    compute = 2 * 16 + 2 * (32 + 2 * 16) + 2
    # A cast of a shard; both blocks; a gradient in float32, the sums of both blocks and what is added to one.
    assert found == (compute + 20 + 2 * 16 + 32 + 3 * 16) << 20


def _op(name: str, amount: int = 0, use: int = 1) -> Line:
    return Line(Kind.OP, use, amount, 0, name)


def test_asynchronous_tp_hides_parts_of_messages_beside_parts_of_products() -> None:
    gather, scatter = f"{MESSAGE}all_gather_into_tensor", f"{MESSAGE}reduce_scatter_tensor"
    forward = [
        *(Line(Kind.ENTER, 0, 0), _op(gather, 800, use=0), _op("aten.mm", 10, use=0), Line(Kind.ENTER, 1, 1)),
        *(_op(gather, 800), _op("aten.mm", 2), _op("aten.silu"), _op("aten.mm", 2)),
        *(_op(scatter, 800), Line(Kind.EXIT, 1), Line(Kind.EXIT, 0), Line(Kind.LOSS, OUTSIDE)),
    ]
    backward = [
        *(Line(Kind.BACKWARD, 0), Line(Kind.BACKWARD, 1), _op(gather, 800), _op("aten.mm", 9), _op("aten.mm", 9)),
        *(_op("aten.add"), _op("aten.cat"), _op(scatter, 800), Line(Kind.BACKWARD_END, 0)),
    ]
    model = _model(depth=1)
    model = replace(model, tape=replace(model.tape, lines=(*forward, *backward)))
    hardware = replace(PLAIN, intra_node=100.0, bandwidth=1000.0, stream=1.0, flops2=1.0, flops4=1.0, matmul=1.0)
    hardware = replace(hardware, latency=0.0, node=8)
    plan = plan_of(_model(), steps_of(_model()), Strategy(ranks=4), hardware)
    plan = replace(plan, strategy=Strategy(ranks=4, tensor=4, compute="bfloat16"))
    # Each message takes 6 s. Its last three parts are beside three of four parts of the products; a gather copies 200
    # bytes, a scatter adds 800 into 200.
    first = 6 - (6 - 3 / 4 * 4) - 0.4
    made = 6 - (6 - 3 / 4 * 2) - 1.0
    # In backward one of both products reads it, and is longer. A sum is not paired, and the root is not compiled.
    read = 6 - 0.4
    assert hidden_seconds(plan, model) == pytest.approx(first + made + read)
