"""The planner without torch: tapes made by hand, clocks, the rule of thumb, profiles, the search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from fullshard.plan import Plan, Planner, Strategy, find_hardware, plan_of, rough, units_of
from fullshard.plan.account import KINDS, Bytes, Simulated, Traffic
from fullshard.plan.clock import AXES, Clock
from fullshard.plan.description import OUTSIDE, Kind, Line, Model, Parameter, Tape, UnitShape
from fullshard.plan.machine import PROFILES, Hardware
from fullshard.plan.moments import Place, largest
from fullshard.plan.padding import padding_of
from fullshard.plan.page import page, svg
from fullshard.plan.questions import QUESTIONS, explain
from fullshard.plan.recomputation import ALTERNATE, NONE, SELECTIVE, WHOLE, keeping
from fullshard.plan.result import gigabytes, table
from fullshard.plan.search import Change, candidates
from fullshard.plan.simulation import simulate
from fullshard.plan.spans import Span, Step, Work, scaled, steps_of
from fullshard.plan.strategy import OPTIMIZERS, Limits

# A byte is a byte and a second a second: nothing is added.
PLAIN = replace(
    PROFILES["h100-80g"],
    name="plain",
    backend="late",  # without an estimate of communicators
    memory=1e6,
    flops2=100.0,
    flops4=100.0,
    bandwidth=1e12,
    matmul=1.0,
    attention=1.0,
    stream=1.0,
    launch=0.0,
    intra_node=100.0,
    latency=0.0,
    hop=0.0,
    reserved=0.0,
    fragmentation=0.0,
    contention=0.0,
    time_error=0.0,
    memory_error=0.0,
    margin=0.0,
    fused=1.0,
    float8=0.0,
)


def _model(samples: int = 1, depth: int = 2, rows: int = 1000) -> Model:
    """`depth` blocks of one weight each. A block makes 40 bytes that a matrix product made and 60 others, of which the
    last 10 are its output; per sample. Backward frees them and makes the gradient."""
    lines: list[Line] = [Line(Kind.ENTER, 0, 0)]
    inputs, outputs = [frozenset[int]()], [frozenset[int]()]
    gradients = {}
    for block in range(depth):
        use, first = block + 1, 10 * block
        lines += [
            Line(Kind.ENTER, use, use),
            Line(Kind.ALLOCATE, use, first, 40 * samples),
            Line(Kind.OP, use, 100 * samples, 0, "aten.mm"),
            Line(Kind.ALLOCATE, use, first + 1, 50 * samples),
            Line(Kind.OP, use, 0, 0, "aten.gelu"),
            Line(Kind.ALLOCATE, use, first + 2, 10 * samples),
            Line(Kind.OP, use, 0, 0, "aten.add"),
            Line(Kind.EXIT, use),
        ]
        inputs.append(frozenset({first - 8} if block else ()))
        outputs.append(frozenset({first + 2}))
    lines += [Line(Kind.EXIT, 0), Line(Kind.LOSS, OUTSIDE), Line(Kind.BACKWARD, 0)]
    for block in reversed(range(depth)):
        use, first = block + 1, 10 * block
        gradient = 1000 + block
        gradients[gradient] = use
        lines += [
            Line(Kind.BACKWARD, use),
            Line(Kind.FREE, use, first + 2),
            Line(Kind.ALLOCATE, use, gradient, rows * 8 * 4),
            Line(Kind.OP, use, 200 * samples, 0, "aten.mm"),
            Line(Kind.FREE, use, first + 1),
            Line(Kind.FREE, use, first),
            Line(Kind.GRADS_READY, OUTSIDE, use),
            Line(Kind.BACKWARD_END, use),
        ]
    lines.append(Line(Kind.BACKWARD_END, 0))
    tape = Tape(tuple(lines), gradients, tuple(inputs), tuple(outputs), 0)
    units = [UnitShape("", "Model", ())]
    units += [UnitShape(f"{i}", "Block", (Parameter(f"{i}.weight", (rows, 8), "float32"),)) for i in range(depth)]
    return Model("by hand", tuple(units), tape, 0, samples, samples)


def _activations(step: Step) -> tuple[float, float]:
    """The most, and at the end of the forward."""
    at_loss = next(i for i, span in enumerate(step.spans) if span.event is not None and span.event.kind == "loss")
    return max(span.peak for span in step.spans), step.spans[at_loss - 1].end


def test_recomputation_frees_all_but_what_has_to_stay() -> None:
    model = _model()
    # Two blocks of 100; with recomputation their outputs alone, and one block while its backward runs. The last
    # operation of a block makes nothing that backward reads.
    assert _activations(steps_of(model, NONE)) == (200, 200)
    assert _activations(steps_of(model, WHOLE))[1] == 20
    assert _activations(steps_of(model, SELECTIVE))[1] == 20 + 2 * 40
    # When the gradient comes, the output of the block is gone.
    assert max(s.peak for s in steps_of(model, WHOLE).spans if s.recomputes) == 10 + 90
    work = [steps_of(model, way).work for way in (NONE, SELECTIVE, WHOLE)]
    assert [w.matmul for w in work] == [600, 600, 800], "a forward again is a third more"
    assert [w.kernels for w in work] == [8, 10, 12]


def test_the_first_forward_holds_what_is_not_kept_until_its_last_read() -> None:
    model = _model()
    # Of the first block: the second operation reads what the first one made, the third what the second one made.
    known = replace(model, tape=replace(model.tape, last_read={0: 1, 1: 2}))

    def forward(model: Model, way: str) -> tuple[float, float]:
        return next(
            (s.peak, s.end) for s in steps_of(model, way).spans if s.event and s.event[:2] == ("pre_forward", 1)
        )

    assert forward(model, WHOLE) == (100, 100), "all until the forward ends"
    assert forward(known, WHOLE) == (90, 10)
    assert forward(known, SELECTIVE) == (100, 50) and forward(known, NONE) == (100, 100)
    again = [[s.peak for s in steps_of(m, WHOLE).spans if s.recomputes] for m in (model, known)]
    assert again[0] == again[1], "autograd holds what comes again"


def test_kept_results_are_named_or_are_those_of_products() -> None:
    model = _model()
    held = {way: _activations(steps_of(model, way))[1] for way in (SELECTIVE, ALTERNATE, keeping(["aten.mm"]), WHOLE)}
    assert held[SELECTIVE] == held[ALTERNATE] == held["keep:aten.mm"] > held[WHOLE]
    assert steps_of(model, keeping(["aten.bmm"])) == steps_of(model, WHOLE)


def test_inputs_on_the_host_leave_the_device_and_come_back() -> None:
    model = _model(depth=3)
    known = replace(model, tape=replace(model.tape, last_read={2: 3, 12: 6, 22: 9}))
    whole, hosted = (steps_of(known, way) for way in (WHOLE, "whole+host"))
    # The outputs of the first and of the second block are inputs; that of the last one is nobody's.
    assert [_activations(step)[1] for step in (whole, hosted)] == [30, 10]
    assert hosted.hosted == 20 and whole.hosted == 0
    copied = hosted.work
    assert (copied.copied, copied.copies) == (40, 4) and copied._replace(copied=0, copies=0, kernels=0) == (
        whole.work._replace(kernels=0)
    )
    # Nothing of it is left after the backward.
    assert hosted.spans[-1].end == whole.spans[-1].end == 0
    with pytest.raises(ValueError, match="recompute: expected one of"):
        steps_of(model, "half+host")


def test_a_batch_that_a_unit_is_given_is_copied_to_the_host_and_stays() -> None:
    model = _model(depth=3)
    known = replace(model, tape=replace(model.tape, last_read={2: 3, 12: 6, 22: 9}))
    inputs = list(known.tape.inputs)
    inputs[1] = frozenset({-2})
    given = replace(known, tape=replace(known.tape, inputs=tuple(inputs), staying={-2: 7}))
    before, hosted = (steps_of(m, "whole+host") for m in (known, given))
    assert (hosted.hosted, hosted.work.copied) == (before.hosted + 7, before.work.copied + 14)
    assert _activations(hosted)[1] == _activations(before)[1], "the caller holds the batch"
    # In backward its copy is on the device, beside it.
    ends = [[s.end for s in step.spans if s.event and s.event[:2] == ("pre_backward", 1)] for step in (before, hosted)]
    assert ends[1] == [nbytes + 7 for nbytes in ends[0]] and hosted.spans[-1].end == 0


def test_a_kept_result_that_is_the_next_input_stays_on_the_device() -> None:
    model = _model(depth=3)
    known = replace(model, tape=replace(model.tape, last_read={2: 3, 12: 6, 22: 9}))
    assert _activations(steps_of(known, "keep:aten.add+host"))[1] == 30
    assert steps_of(known, "keep:aten.add+host").hosted == 20


def test_copies_of_activations_take_time_and_are_named() -> None:
    model = _model(depth=3)
    hosted = steps_of(model, "whole+host")
    strategy, hardware = Strategy(ranks=1, recompute="whole+host"), replace(PLAIN, host=10.0)
    plain = plan_of(model, steps_of(model, WHOLE), replace(strategy, recompute=WHOLE), hardware)
    plan = plan_of(model, hosted, strategy, hardware)
    assert plan.seconds == plain.seconds + 40 / 10.0
    assert {wait.what for wait in plan.simulated.exposed} == {"copies of activations"}
    found = plan.as_json()
    assert found["host_bytes"] == {"activations": 20} and found["bytes_sent"]["host"] == 40
    assert found["messages"]["host"] == 4
    assert (found["strategy"]["recompute"], found["strategy"]["offload_activations"]) == ("whole", True)
    assert "on the host, of this rank: peak 20 B of 250.00 GB" in table(plan) and "activations on the host" in table(
        plan
    )
    assert any("page-locked" in text for text in found["assumptions"])


def test_the_hosts_memory_has_a_peak_of_its_own() -> None:
    model, one = _model(depth=3), 8000 * 4
    weights = 3 * one

    def on_host(model: Model, **dials: Any) -> dict[str, int]:
        strategy = Strategy(ranks=1, offload=True, **dials)
        found = plan_of(model, steps_of(model, strategy.recompute), strategy, PLAIN).as_json()
        assert found["host_peak_bytes"] == sum(found["host_bytes"].values())
        return dict(found["host_bytes"])

    at_rest = {"parameters": weights, "optimizer": 2 * weights + 3 * 4}
    # Most is there when the optimizer steps, on the host: no activation is left.
    found = on_host(model, recompute="whole+host")
    assert found == at_rest | {"gradients of shards": weights, "optimizer step": 3 * one}
    # Activations leave as gradients come.
    found = on_host(_model(20_000, depth=3), recompute="whole+host", optimizer="none")
    assert found == {"parameters": weights, "activations": 2 * 200_000}
    # Gradients of an earlier micro-batch are there beside those that will be added.
    found = on_host(model, optimizer="none", accumulate=2, send_each=True)
    assert found == {"parameters": weights, "gradients of shards": 2 * weights}


def test_nothing_fits_that_the_host_cannot_hold() -> None:
    asked = Strategy(ranks=2)
    planner = _planner()
    on_device = min(change.plan.peak_nbytes for change in planner.search(asked))
    offloaded = planner.plan(replace(asked, offload=True))
    needed = offloaded.host_peak_nbytes
    assert offloaded.peak_nbytes < on_device and needed > 0

    def with_host(host: float) -> Planner:
        return Planner(planner.describe, replace(PLAIN, host_memory=host), budget=on_device - 1)

    enough, small = with_host(needed), with_host(needed - 1)
    assert enough.plan(offloaded.strategy).fits and not small.plan(offloaded.strategy).fits
    assert enough.search(asked) and not small.search(asked)
    assert Planner(planner.describe, PLAIN, budget=on_device - 1, host_budget=needed - 1).search(asked) == []
    (answer,) = [line for line in explain("offload", small, asked) if "shards and state on the host" in line]
    assert "does not fit" in answer and "on the host" in answer
    said = small.plan(offloaded.strategy)
    assert said.as_json()["fits"] is False and said.as_json()["host_budget_bytes"] == needed - 1
    assert said.peak_nbytes < said.budget and "does not fit: peak" in table(said)
    assert table(said).splitlines()[3].endswith(" on the host 304.08 kB of 304.08 kB"), table(said)
    assert any("equal share for each device of a node" in text for text in said.as_json()["assumptions"])


def test_a_host_of_unknown_size_holds_everything_and_the_plan_says_so() -> None:
    model = _model()
    plan = plan_of(model, steps_of(model), Strategy(offload=True), replace(PLAIN, host_memory=0.0))
    found = plan.as_json()
    assert found["fits"] and found["host_budget_bytes"] is None and found["host_peak_bytes"] > 0
    assert any("host's memory is not known" in text for text in found["assumptions"])
    assert "(how much it has is not known)" in table(plan)
    assert {name for name, hardware in PROFILES.items() if not hardware.host_memory} == {"mi300x-192g", "cpu"}


def test_where_the_host_is_the_device_nothing_is_moved_to_it() -> None:
    asked = Strategy(ranks=2, offload=True)
    planner = Planner(_planner().describe, replace(PLAIN, blocking=True), budget=1e6)
    plan = planner.plan(asked)
    assert plan.host_terms == () and not plan.strategy.offload
    assert plan.peak_nbytes == planner.plan(Strategy(ranks=2)).peak_nbytes
    tight = Planner(planner.describe, planner.hardware, budget=1000)
    assert tight.search(Strategy(ranks=2)) == tight.search(asked) == []


def test_one_rank_has_its_reduced_gradients_on_the_host() -> None:
    model = _model(depth=4)
    for dials in ({}, {"compute": "bfloat16", "reduce": "float32"}):
        strategy = Strategy(offload=True, optimizer="none", **dials)  # type: ignore[arg-type]
        found = simulate(units_of(model, strategy), steps_of(model), strategy, PLAIN)
        last = dict(zip(KINDS, found.moments[-1].nbytes, strict=True))
        assert last["gradients of shards"] == 0 and dict(found.on_host)["gradients of shards"] == 4 * 8000 * 4
        most = max(dict(zip(KINDS, m.nbytes, strict=True))["gradients of shards"] for m in found.moments)
        assert most <= 3 * 8000 * 4, "two are on their way at once"


def test_results_of_one_rank_are_put_together_for_the_host_where_they_are_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tensors that autograd made. Those that were cast are parts of one buffer (`comm.choice.LocalReduce`)."""
    most, add = [0.0], Bytes.add

    def noting(self: Bytes, kind: str, name: str, nbytes: float) -> None:
        add(self, kind, name, nbytes)
        if not self.there.get(("parameters", "0")):  # those of the device
            most[0] = max(most[0], self.kinds["gradients of shards"])

    monkeypatch.setattr(Bytes, "add", noting)
    model = _model(depth=4)
    halves = tuple(Parameter(f"{part}.weight", (500, 8), "float32") for part in ("up", "down"))
    made = replace(model, units=tuple(replace(u, parameters=halves) if u.parameters else u for u in model.units))
    for dials, copies in (({}, 1), ({"compute": "bfloat16", "reduce": "float32"}, 0)):
        most[0], strategy = 0.0, Strategy(offload=True, optimizer="none", **dials)  # type: ignore[arg-type]
        simulate(units_of(made, strategy), steps_of(made), strategy, PLAIN)
        assert most[0] == (3 + copies) * 8000 * 4, "two are on their way, and one is made"


def test_optimizers_that_were_not_counted_are_named_as_assumptions() -> None:
    model = _model()
    for name, optimizer in OPTIMIZERS.items():
        plan = plan_of(model, steps_of(model), Strategy(optimizer=name), PLAIN)
        (said,) = [text for text in plan.as_json()["assumptions"] if "optimizer is torch's" in text or name in text]
        assert ("was not run here" in said) == (not optimizer.counted)


def test_units_may_be_recomputed_one_by_one() -> None:
    model = _model()
    assert _activations(steps_of(model, [NONE, WHOLE, NONE]))[1] == 10 + 100
    with pytest.raises(ValueError, match="expected one of none, selective, alternate, whole, found 'half'"):
        steps_of(model, "half")


def test_other_sizes_of_the_micro_batch_are_linear() -> None:
    step = scaled(steps_of(_model(1)), steps_of(_model(2)), 7)
    exact = steps_of(_model(7))
    assert [(s.peak, s.end, s.work) for s in step.spans] == [(s.peak, s.end, s.work) for s in exact.spans]
    with pytest.raises(ValueError, match="two sizes"):
        scaled(steps_of(_model(1)), steps_of(_model(1)), 2)


@pytest.mark.parametrize("ranks", [1, 2, 8, 1000])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_tape_without_activations_is_the_empty_tape(ranks: int, reshard: bool) -> None:
    """What `report` simulates, and what the planner does with all activations taken away."""
    model = _model(depth=4, rows=8000)
    strategy = Strategy(ranks=ranks, reshard=reshard, optimizer="none")
    units = units_of(model, strategy)
    step = steps_of(model)
    bare = replace(step, spans=tuple(replace(s, peak=0.0, end=0.0, loss=0.0) for s in step.spans))
    found = simulate(units, bare, strategy, PLAIN).peak
    empty = largest(units, [Place(-1), *(Place(0) for _ in units[1:])], Limits(send_buffers=1))
    assert (found.phase, found.total) == (empty.phase, sum(nbytes for *_, nbytes in empty.terms))


# ---- time ------------------------------------------------------------------------------------------------------------


def _clock(hardware: Hardware = PLAIN) -> Clock:
    clock = Clock(hardware, 4)
    clock.begin(Simulated(traffic={axis: Traffic() for axis in AXES}))
    return clock


def test_a_message_that_arrives_during_compute_costs_nothing() -> None:
    clock = _clock()
    early, late = (clock.send("shard", 2, 1, nbytes, 1) for nbytes in (400, 1600))
    assert (early, late) == (2, 10), "half of each travels, one after the other"
    clock.compute(Work(matmul=500))
    clock.wait(early, "a", "all-gather")
    assert (clock.now, clock.found.exposed) == (5, [])
    clock.wait(late, "b", "all-gather")
    assert clock.now == 10 and clock.found.exposed_seconds == 5


def test_attention_has_a_share_of_the_peak_of_its_own() -> None:
    clock = _clock(replace(PLAIN, matmul=0.5, attention=0.25))
    clock.compute(Work(matmul=100, attention=100))
    assert clock.now == 2 + 4


def test_compute_is_slower_beside_messages() -> None:
    clock = _clock(replace(PLAIN, contention=0.5))
    clock.send("shard", 2, 1, 400, 1)  # two seconds
    clock.compute(Work(matmul=1000))
    assert clock.now == 10 + 0.5 * 2


def test_a_device_waits_for_a_slow_host() -> None:
    clock = _clock(replace(PLAIN, launch=1.0))
    clock.compute(Work(matmul=100, kernels=4))
    assert (clock.now, clock.found.host_bound) == (4, 3)
    # A CPU computes and launches in turn.
    clock = _clock(replace(PLAIN, launch=1.0, blocking=True))
    clock.compute(Work(matmul=100, kernels=4))
    assert clock.now == 5


NODES = replace(PLAIN, node=8, intra_node=100.0, inter_node=10.0, latency=1.0, hop=0.5)


def test_a_ring_between_nodes_has_the_nics_of_all_devices_that_it_passes() -> None:
    around = 1 + 4 * 0.5
    assert NODES.collective("all-gather", 8, 1, 800) == 700 / 100 + 1
    # Four nodes of eight: eight NICs of 10, and no more than inside of a node.
    assert NODES.collective("reduce-scatter", 32, 1, 3200) == 3100 / 80 + around
    assert replace(NODES, intra_node=30.0).collective("all-gather", 32, 1, 3200) == 3100 / 30 + around
    # Replicas of groups of eight: one in each node, and seven other groups beside it on the other NICs.
    assert NODES.collective("all-gather", 4, 8, 400) == 300 / 10 + around
    assert NODES.collective("all-gather", 2, 4, 200) == 100 / 100 + 1


def test_an_all_reduce_goes_around_twice_or_up_and_down_a_tree() -> None:
    assert NODES.collective("all-reduce", 32, 1, 3200) == 2 * 3100 / 80 + 2 * (1 + 2 * 0.5)
    assert NODES.collective("all-reduce", 8, 1, 800) == 2 * 700 / 100 + 2


def test_an_all_to_all_sends_by_the_own_nic_what_leaves_the_node() -> None:
    assert NODES.collective("all-to-all", 32, 1, 3200) == 2400 / 10 + 1 + 4 * 0.5
    assert NODES.collective("all-to-all", 8, 1, 800) == 700 / 100 + 1


def test_bus_bandwidths_of_the_profiles_are_within_those_that_were_published() -> None:
    for name in ("h100-80g", "a100-80g"):
        hardware = PROFILES[name]
        seconds = hardware.collective("all-reduce", 256, 1, 8e9)
        bus = 2 * 8e9 * 255 / 256 / seconds / 1e9
        assert (200 <= bus <= 340) if name == "h100-80g" else bus < 8 * 25


def test_replicas_of_nodes_send_as_much_between_nodes_as_one_group_of_all() -> None:
    """An all-reduce of an eighth over each NIC takes as long as the same bytes over all."""
    alone, shared = (NODES.collective("all-reduce", 4, stride, nbytes) for stride, nbytes in ((8, 1e4), (8, 8e4)))
    assert alone < shared and NODES.collective("all-reduce", 32, 1, 8e4) < 1.5 * shared


def test_prefetch_hides_gathers_and_none_does_not() -> None:
    model = _model(depth=4)
    ahead, late = (
        simulate(units_of(model, s), steps_of(model), s, PLAIN)
        for s in (Strategy(ranks=2), Strategy(ranks=2, prefetch_depth=0))
    )
    assert ahead.seconds < late.seconds
    assert ahead.traffic["shard"] == late.traffic["shard"]
    assert ahead.compute == late.compute


def test_the_interval_of_checkpoints() -> None:
    """Young: sqrt(2 d M). Daly is below it by about d, above it by a third of sqrt(d / 2M) of it."""
    model, strategy = _model(), Strategy(ranks=4)
    slow = replace(PLAIN, storage=10.0)
    plan = plan_of(model, steps_of(model), strategy, slow, failure_hours=1000)
    found = plan.checkpoints
    state = 2 * (8000 * 4 * 3) / 4 + 2 * 4  # two weights, two moments each, a count of steps
    assert found.save == state / 10 and found.between_failures == 1000 * 3600 / 4
    assert found.young == sqrt(2 * found.save * found.between_failures)
    part = found.save / (2 * found.between_failures)
    assert found.daly == found.young * (1 + sqrt(part) / 3 + part / 9) - found.save
    often = plan_of(model, steps_of(model), strategy, slow, failure_hours=0.1).checkpoints
    assert often.daly == often.between_failures, "it fails before it is saved twice"


# ---- the rule of thumb -----------------------------------------------------------------------------------------------


def test_the_remedy_of_the_guide_does_not_fit_either() -> None:
    text = "\n".join(rough.lines(rough.EXAMPLE, 16, 2048, 80e9) + rough.remedy(rough.EXAMPLE, 16, 80e9))
    for expected in (
        "70B / 8 x 2 bytes x 5 = 87.5 GB",
        "total        112.5 GB of 80 GB: does not fit",
        "batch 8      87.5 + 10 + 5 = 102.5 GB: does not fit in 80 GB either",
        "fit from 10 devices on",  # 70e9 / n * 10 + 5e9 < 80e9
    ):
        assert expected in text


def test_the_rule_for_another_model_is_in_proportion() -> None:
    assert rough.rough_of(int(70e9), 8, 16, 2048) == rough.EXAMPLE
    assert rough.rough_of(int(35e9), 8, 8, 2048).activations == 5e9


# ---- hardware --------------------------------------------------------------------------------------------------------


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "a100-80g"\ninter_node = 5e9\nnode = 4\nlatency = 0\n')
    found = find_hardware(str(file))
    assert found == replace(PROFILES["a100-80g"], name="mine", inter_node=5e9, node=4, latency=0.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("internode = 1", "internode: there is no such field of a hardware profile; nearest valid: inter_node"),
        ("node = 2.5", "node = 2.5: expected a whole number above 0"),
        ("bandwidth = 0", "bandwidth = 0: expected a number above 0"),
        ("memory = inf", "memory = inf: expected a number above 0"),
        ("host_memory = nan", "host_memory = nan: expected a number above 0"),
        ("host_memory = -1", "host_memory = -1: expected a number above 0"),
        ('bandwidth = "fast"', "expected a number above 0"),
        ('base = "b100"', "hardware 'b100': expected one of"),
        ("node = ", "not valid TOML"),
    ],
)
def test_mistakes_in_a_profile_are_one_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        find_hardware(str(file))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_unknown_hardware_names_the_nearest() -> None:
    assert find_hardware("A100").name == "a100-80g"
    with pytest.raises(ValueError, match="nearest valid: h100-80g"):
        find_hardware("h100-8")
    with pytest.raises(ValueError, match="cannot read the hardware profile"):
        find_hardware("nowhere.toml")


# ---- strategies and search -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ranks": 4, "replicas": 3}, "replicas: expected a number that divides the 4 ranks, found 3"),
        ({"ranks": 4, "reshard": 3}, "reshard: expected a number above 1 that divides the 4 ranks"),
        ({"ranks": 0}, "ranks: expected at least 1, found 0"),
        ({"optimizer": "lion"}, "optimizer: expected one of adamw"),
        ({"recompute": "some"}, "recompute: expected one of"),
    ],
)
def test_contradictory_strategies_are_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError) as error:
        Strategy(**given)  # type: ignore[arg-type]
    assert says in str(error.value)


def _planner(budget: float = 1e6, describe: Callable[..., Model] | None = None) -> Planner:
    def described(samples: int, sequence: int | None, compute: str, alone: bool, recompute: object) -> Model:
        return _model(samples, depth=4)

    return Planner(describe or described, PLAIN, budget=budget)


def test_the_search_finds_what_fits_and_the_fastest_first() -> None:
    asked = Strategy(ranks=2, micro=8, accumulate=1)
    everything = _planner().search(asked)
    plans = [change.plan for change in everything]
    assert all(plan.fits for plan in plans)
    # Within a percent, fewer changes go first.
    assert plans[0].seconds <= min(plan.seconds for plan in plans) * 1.011
    assert {plan.strategy.micro * plan.strategy.accumulate for plan in plans} == {8}
    assert {plan.strategy.recompute for plan in plans} == {NONE, SELECTIVE, WHOLE}
    needed = _planner().plan(asked).peak_nbytes
    tight = _planner(budget=needed - 1).search(asked)
    assert tight and all(change.count > 0 and change.plan.peak_nbytes < needed for change in tight)


def test_offload_is_tried_when_nothing_else_fits() -> None:
    asked = Strategy(ranks=2)
    least = min(change.plan.peak_nbytes for change in _planner().search(asked))
    found = _planner(budget=least - 1).search(asked)
    assert found and all(change.plan.strategy.offload for change in found)
    assert _planner(budget=1000).search(asked) == []


def test_activations_go_to_the_host_when_nothing_fits_without() -> None:
    def described(samples: int, sequence: int | None, compute: str, alone: bool, recompute: object) -> Model:
        model = _model(1000 * samples, depth=4, rows=10)  # activations are far more than weights
        return replace(model, samples=samples, tokens=samples)

    def least(changes: Sequence[Change]) -> float:
        return min(change.plan.peak_nbytes for change in changes)

    asked, planner = Strategy(ranks=2), _planner(describe=described)
    on_device = least(planner.search(asked))
    hosted = _planner(on_device - 1, described).search(asked)
    assert hosted and all(c.plan.strategy.hosts_activations for c in hosted)
    assert not any(c.plan.strategy.offload for c in hosted) and "activations on the host" in hosted[0].says
    # Where the host is the device there is nothing to move.
    cpu = Planner(planner.describe, replace(PLAIN, blocking=True), budget=on_device - 1)
    assert not any(c.plan.strategy.hosts_activations for c in cpu.search(asked))
    assert not cpu.plan(replace(asked, recompute="none+host")).strategy.hosts_activations


def test_the_search_tries_all_shapes_that_respect_a_node_and_plain_replication() -> None:
    asked = Strategy(ranks=48)
    tried = {(c.replicas, c.shard) for c in candidates(asked, 8)}
    assert tried == {(48, 1), (24, 2), (12, 4), (6, 8), (3, 16), (2, 24), (1, 48)}
    says = {c.plan.strategy.shard: c.says for c in _planner().search(Strategy(ranks=16))}
    assert "replicate everything (DDP)" in says[1] and "HSDP 4 x 4" in says[4]
    # Without --search three of them are tried.
    assert {(c.replicas, c.shard) for c in candidates(replace(asked, replicas=3), 8, meshes=False)} == {
        *[(1, 48), (3, 16), (6, 8)]
    }
    few = {c.plan.strategy.shard for c in _planner().search(Strategy(ranks=16), meshes=False)}
    assert few == {8, 16} and few < set(says)
    # A shape that is asked for stays among them.
    assert (16, 3) in {(c.replicas, c.shard) for c in candidates(replace(asked, replicas=16), 8)}


def test_a_shape_whose_state_does_not_fit_is_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = _planner(budget=200_000)
    simulated: list[int] = []
    estimate = planner.estimate
    monkeypatch.setattr(planner, "estimate", lambda s: simulated.append(s.shard) or estimate(s))
    found = planner.search(Strategy(ranks=16))
    # Four weights of 32,000 bytes with two moments: 384,000 bytes for one rank, 192,000 for each of two.
    assert found and 1 not in simulated and 2 in simulated
    assert planner.least_nbytes(Strategy(ranks=16, replicas=16))[0] > planner.budget
    # The bound is below every plan, so that it leaves none out that fits.
    for change in found:
        assert planner.least_nbytes(change.plan.strategy)[0] <= change.plan.peak_nbytes


def test_every_question_has_an_answer() -> None:
    planner = _planner()
    for question in QUESTIONS:
        answer = explain(question, planner, Strategy(ranks=16, micro=2, replicas=2))
        assert len(answer) > 1 and answer[0].endswith("?"), question
    with pytest.raises(ValueError, match="--explain cost: expected one of peak"):
        explain("cost", planner, Strategy())


def test_the_largest_micro_batch_fits_and_the_next_does_not() -> None:
    planner = _planner(budget=600_000)
    answer = explain("batch", planner, Strategy(ranks=2))
    best = int(answer[1].split("micro-batch ")[1].split()[0])
    plans = [planner.estimate(Strategy(ranks=2, micro=n)) for n in (best, best + 1)]
    assert [plan.fits for plan in plans] == [True, False]


# ---- what is printed -------------------------------------------------------------------------------------------------


def test_terms_are_the_peak_and_the_rest_is_named() -> None:
    model = _model()
    hardware = replace(PLAIN, reserved=1000.0, fragmentation=0.1)
    plan = plan_of(model, steps_of(model), Strategy(ranks=2), hardware)
    found = plan.as_json()
    assert abs(sum(found["terms"].values()) - found["peak_bytes"]) <= len(found["terms"])
    assert found["terms"]["reserved by the device"] == 1000
    counted = sum(found["terms"].get(kind, 0) for kind in KINDS)
    assert abs(found["terms"]["allowance for fragmentation"] - counted / 10) <= len(KINDS)
    assert found["peak_bytes"] > counted and len(found["largest"]) == 5
    assert found["bytes_sent"]["shard"] == plan.simulated.traffic["shard"].nbytes
    assert found["assumptions"] and found["fits"] is True


def test_the_table_has_the_bytes_of_each_phase_and_no_long_line() -> None:
    model = _model(depth=4)
    plan = plan_of(model, steps_of(model), Strategy(ranks=2), PLAIN)
    lines = table(plan).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("most in"))
    phases = plan.phases()
    assert lines[head].split()[2:] == list(phases)
    rows = {line[:20].strip(): line[20:].split() for line in lines[head + 1 : lines.index("", head)]}
    kinds = [kind for kind, *row in zip(KINDS, *phases.values(), strict=True) if any(row)]
    assert [*rows] == [*kinds, "together"] and "optimizer step" in rows and "kept parts" not in rows
    together = iter(rows["together"])
    assert [f"{nbytes} {unit}" for nbytes, unit in zip(together, together, strict=True)] == [
        gigabytes(sum(row)) for row in phases.values()
    ]
    assert max(map(len, lines)) < 140


def test_padding_has_a_cure() -> None:
    shape = UnitShape("0", "Linear", (Parameter("0.weight", (9, 4096), "float32"),))
    model = replace(_model(), units=(UnitShape("", "Model", ()), shape))
    (found,) = padding_of(units_of(model, Strategy(ranks=8)))
    assert found.nbytes == 7 * 4096 * 4 and "Shard(1)" in found.cure
    odd = replace(shape, parameters=(Parameter("0.weight", (9, 4097), "float32"),))
    (found,) = padding_of(units_of(replace(model, units=(model.units[0], odd)), Strategy(ranks=8)))
    assert found.cure == "16 rows instead of 9"
    assert padding_of(units_of(model, Strategy(ranks=1))) == ()


def test_the_picture_has_every_kind_and_the_page_needs_nothing_else() -> None:
    model = _model()
    plan = plan_of(model, steps_of(model), Strategy(ranks=2), PLAIN, budget=1e5)
    picture, text = svg(plan), page(plan)
    there = {kind for kind, nbytes in zip(KINDS, map(max, zip(*_moments(plan.simulated))), strict=True) if nbytes}  # noqa: B905
    assert {kind for kind in KINDS if f"<title>{kind}</title>" in picture} == there
    assert ('class="budget"' in picture) == (plan.budget <= 1.4 * plan.peak_nbytes)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "") and "<script" not in text
    assert picture in text and "does not fit" in text


def test_the_picture_has_the_peak_for_as_long_as_its_span_takes() -> None:
    model = _model(1000, rows=10)
    plan = plan_of(model, steps_of(model), Strategy(ranks=1), PLAIN)
    moments, peak = plan.simulated.moments, plan.simulated.peak
    place = moments.index(peak)
    assert peak.total == max(moment.total for moment in moments)
    assert moments[place + 1].seconds > peak.seconds, "a band without a width is not seen"
    assert [moment.seconds for moment in moments] == sorted(moment.seconds for moment in moments)


def _moments(found: Simulated) -> Sequence[tuple[float, ...]]:
    return [moment.nbytes for moment in found.moments]


def test_spans_are_values() -> None:
    assert Span(None, Work(), 1.0, 0.0) == Span(None, Work(), 1.0, 0.0)


# ---- margins, placement, the fewest ranks ----------------------------------------------------------------------------


def test_a_plan_fits_with_its_margin_and_says_what_is_spare() -> None:
    model, sure = _model(), plan_of(_model(), steps_of(_model()), Strategy(ranks=2), PLAIN)
    needed = sure.peak_nbytes
    hardware = replace(PLAIN, margin=0.05, memory_error=0.15, time_error=0.2)

    def plan(budget: float) -> Plan:
        return plan_of(model, steps_of(model), Strategy(ranks=2), hardware, budget=budget)

    near, enough = plan(needed * 1.04), plan(needed * 1.06)
    assert not near.fits and enough.fits and sure.fits
    assert "to spare are less than the margin of 5%" in table(near)
    assert f"fits, with {gigabytes(enough.spare_nbytes)} to spare, margin 5%; error of such plans 15%" in table(enough)
    assert "error of such plans 20%" in table(enough) and "error of" not in table(sure)
    # What short memory costs no plan counts.
    assert "\nat most " in table(near) and "error of" not in table(near) and "at most" not in table(enough)
    found = enough.as_json()
    assert found["spare_bytes"] == int(enough.budget - needed) and found["margin_bytes"] == int(0.05 * needed)
    # Reserved memory is more than what is in use, as long as there is room.
    roomy = replace(hardware, fragmentation=0.2)
    used = enough.simulated.peak.total
    found = [
        plan_of(model, steps_of(model), Strategy(ranks=2), roomy, budget=b).allocator_nbytes for b in (1e9, 1.1 * used)
    ]
    assert found == [1.2 * used, 1.1 * used]


def _uneven() -> Planner:
    """Four blocks whose rows eight ranks do not share evenly; their columns they do."""

    def described(samples: int, sequence: int | None, compute: str, alone: bool, recompute: object) -> Model:
        model = _model(samples, depth=4)
        wide = tuple(
            replace(u, parameters=tuple(replace(p, shape=(129, 4096)) for p in u.parameters)) for u in model.units
        )
        return replace(model, units=wide)

    return Planner(described, PLAIN, budget=1e9)


def test_the_search_tries_the_placement_that_the_line_about_padding_recommends() -> None:
    asked = Strategy(ranks=8)
    plan = _uneven().plan(asked)
    assert plan.curable and "Shard(1)" in plan.padding[0].cure
    found = _uneven().search(asked)
    even = [change for change in found if change.plan.strategy.even]
    assert even and all("even placement" in change.says for change in even)
    assert not any(change.plan.padding for change in even if change.plan.strategy.replicas == 1)
    same = _uneven().plan(replace(asked, even=True))
    assert same.peak_nbytes < plan.peak_nbytes and same.simulated.traffic["shard"].nbytes < (
        plan.simulated.traffic["shard"].nbytes
    )
    assert not any(change.plan.strategy.even for change in _planner().search(asked))


def test_the_fewest_ranks_are_no_power_of_two() -> None:
    asked = Strategy(ranks=8, replicas=1)
    planner = _planner()
    budget = planner.plan(replace(asked, ranks=5)).peak_nbytes
    tight = _planner(budget=budget)
    found = tight.least_ranks(asked)
    assert found is not None and found.strategy.ranks == 5
    assert not tight.plan(replace(asked, ranks=4)).fits
    assert _planner(budget=1000).least_ranks(asked) is None


def test_shards_have_a_dtype_of_their_own() -> None:
    model = _model()
    wide, narrow = (
        plan_of(model, steps_of(model), Strategy(ranks=2, compute="bfloat16", storage=s), PLAIN)
        for s in ("", "bfloat16")
    )
    terms = [dict(zip(KINDS, plan.simulated.moments[0].nbytes, strict=True)) for plan in (wide, narrow)]
    assert terms[1]["parameters"] == terms[0]["parameters"] / 2
    assert narrow.as_json()["strategy"]["storage_dtype"] == "bfloat16"


def test_compiled_units_write_less_and_products_in_float8_are_faster() -> None:
    hardware = replace(
        PLAIN, matmul=1.0, flops2=100.0, flops4=100.0, bandwidth=10.0, stream=1.0, fused=0.25, float8=2.0
    )
    work = Work(matmul=400.0, nbytes=40.0)
    seconds = [
        Clock(hardware, 2, compiled=compiled, float8=float8).seconds(work)
        for compiled, float8 in ((False, False), (True, False), (True, True))
    ]
    assert seconds == [4 + 4, 4 + 1, 2 + 1]
    model = _model()
    moving = [line._replace(b=1e9) if line.name == "aten.gelu" else line for line in model.tape.lines]
    model = replace(model, tape=replace(model.tape, lines=tuple(moving)))
    plans = [plan_of(model, steps_of(model), Strategy(ranks=2, compiled=c), hardware) for c in (True, False)]
    assert plans[0].seconds < plans[1].seconds / 2 and "compiled" in table(plans[0])
    with pytest.raises(ValueError, match="float8: expected a device"):
        plan_of(model, steps_of(model), Strategy(ranks=2, float8=True), replace(hardware, float8=0.0))


def test_a_margin_is_not_more_than_the_error() -> None:
    for hardware in PROFILES.values():
        assert (hardware.margin > 0) == (hardware.backend == "nccl") and hardware.margin <= hardware.memory_error
