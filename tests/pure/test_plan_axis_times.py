"""Times along `tp`, `cp` and `ep`, counted by hand: bytes by bandwidth, and a latency for each message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fullshard.plan import Planner, Strategy, units_of
from fullshard.plan.account import Simulated
from fullshard.plan.clock import whole_nbytes
from fullshard.plan.description import MESSAGE, OUTSIDE, WAIT, Kind, Line, Model, Parameter, Tape, UnitShape
from fullshard.plan.machine import Hardware
from fullshard.plan.search import Change, Degrees, Describe, degrees
from fullshard.plan.simulation import simulate
from fullshard.plan.spans import Message, Work, scaled, steps_of
from tests.pure.test_plan import PLAIN

# 100 bytes a second in a node of 8 and 10 beyond it; a message takes a second, and half of one more for a node.
NODES = replace(PLAIN, node=8, intra_node=100.0, inter_node=10.0, latency=1.0, hop=0.5)


def model_of(*forward: tuple[str, int], samples: int = 1, brought: tuple[tuple[str, int], ...] = ()) -> Model:
    """One block, whose forward has these operations (name, operations or bytes); its backward is free."""
    ops = [Line(Kind.OP, 1, count if name.endswith(WAIT) else count * samples, 0, name) for name, count in forward]
    lines = [
        *(Line(Kind.ENTER, 0, 0), Line(Kind.ENTER, 1, 1), *ops, Line(Kind.EXIT, 1), Line(Kind.EXIT, 0)),
        *(Line(Kind.LOSS, OUTSIDE), Line(Kind.BACKWARD, 0), Line(Kind.BACKWARD, 1), Line(Kind.BACKWARD_END, 1)),
        Line(Kind.BACKWARD_END, 0),
    ]
    nothing = frozenset[int]()
    tape = Tape(tuple(lines), {}, (nothing, nothing), (nothing, nothing), brought=brought)
    units = (UnitShape("", "Model", ()), UnitShape("0", "Block", (Parameter("0.weight", (8, 8), "float32", False),)))
    return Model("by hand", units, tape, 0, samples, samples)


def planned(model: Model, strategy: Strategy, hardware: Hardware = NODES) -> Simulated:
    return simulate(units_of(model, strategy), steps_of(model), replace(strategy, optimizer="none"), hardware)


def sent(axis: str, operation: str) -> str:
    return MESSAGE + (operation if axis == "tp" else f"{axis}:{operation}")


# 16 ranks, 8 of a node. What leaves a rank of an all-to-all is known; of others the whole tensor.
@pytest.mark.parametrize(
    ("strategy", "axis", "operation", "nbytes", "seconds"),
    [
        # Seven eighths of 800 by 100, and a message.
        (Strategy(8, tensor=8), "tp", "all_gather_into_tensor", 800, 7 + 1),
        (Strategy(8, tensor=8), "tp", "reduce_scatter_tensor", 800, 7 + 1),
        (Strategy(8, tensor=8), "tp", "all_reduce", 800, 2 * (7 + 1)),
        (Strategy(8, tensor=8), "tp", "all_gather of tokens", 100, 7 + 1),
        # Two nodes: a ring has the NICs of all eight, 80; a stage for each node.
        (Strategy(16, tensor=16), "tp", "all_gather_into_tensor", 1600, 1500 / 80 + 1 + 2 * 0.5),
        (Strategy(8, context=4), "cp", "all_to_all", 300, 3 + 1),
        # Sequences over nodes, because layers are inside of them: half of 400 leaves the node by the rank's own NIC.
        (Strategy(16, tensor=4, context=4), "cp", "all_to_all", 300, 200 / 10 + 1 + 2 * 0.5),
        (Strategy(8, experts=8), "ep", "all_to_all of tokens", 700, 7 + 1),
        (Strategy(16, experts=16), "ep", "all_to_all of tokens", 1500, 800 / 10 + 1 + 2 * 0.5),
    ],
)
def test_a_message_takes_its_bytes_by_the_bandwidth_and_a_latency(
    strategy: Strategy, axis: str, operation: str, nbytes: int, seconds: float
) -> None:
    model = model_of((sent(axis, operation), nbytes), ("aten.mm", 200))
    # The parameters' own messages, and what ranks of `tp` compare of a batch.
    rest = planned(model_of(("aten.mm", 200)), strategy)
    found = planned(model, strategy)
    assert found.seconds - rest.seconds == pytest.approx(seconds)
    assert found.along[axis] - rest.along.get(axis, 0.0) == pytest.approx(seconds)
    assert found.exposed_seconds - rest.exposed_seconds == pytest.approx(seconds), "nothing runs beside it"
    assert found.compute == rest.compute == 2


@pytest.mark.parametrize(("attention", "step"), [(100, 4 + 1), (400, 4 + 4)], ids=["longer", "shorter"])
def test_a_ring_runs_beside_attention(attention: int, step: float) -> None:
    """300 bytes go to the next rank in 4 seconds, beside the first attention; then comes another of one second or as
    long."""
    ring = sent("cp", "ring"), 300
    first, second = ("aten._attention", attention), ("aten._attention", attention)
    model = model_of(ring, first, (sent("cp", WAIT), 0), second)
    found = planned(model, Strategy(2, context=2), replace(NODES, intra_node=100.0))
    gathered = planned(model_of(), Strategy(2, context=2)).seconds
    # What brings the parameters is over before the forward.
    assert found.seconds - gathered == pytest.approx(step)
    assert found.exposed_seconds - gathered == pytest.approx(max(4 - attention / 100, 0))


def test_each_wait_is_for_its_own_message_of_a_ring() -> None:
    """Two are under way; what waits for the first does not wait for the second."""
    two = [(sent("cp", "ring"), 300), (sent("cp", "ring"), 300)]
    alone = planned(model_of(), Strategy(2, context=2)).seconds
    first = planned(model_of(*two, (sent("cp", WAIT), 1)), Strategy(2, context=2)).seconds - alone
    both = planned(model_of(*two, (sent("cp", WAIT), 0)), Strategy(2, context=2)).seconds - alone
    assert (first, both) == (pytest.approx(4), pytest.approx(8))


def test_a_ring_over_nodes_has_one_nic_of_each_rank() -> None:
    assert NODES.collective("send", 2, 1, 300) == 3 + 1
    assert NODES.collective("send", 2, 8, 300) == 30 + 1 + 0.5


def test_sums_of_gradients_over_tp_are_messages_of_their_own() -> None:
    strategy = Strategy(8, tensor=8)
    # 100 float32 each: 2 x 7/8 x 400 by 100, and twice a latency.
    more = planned(model_of(brought=(("all_reduce", 100), ("all_reduce", 100))), strategy)
    assert more.seconds - planned(model_of(), strategy).seconds == pytest.approx(2 * (7 + 2))


def test_the_last_of_several_micro_batches_is_as_long_as_the_first() -> None:
    model = model_of((sent("tp", "all_reduce"), 800))
    one, five = (planned(model, Strategy(8, tensor=8, accumulate=n)) for n in (1, 5))
    assert five.along["tp"] == pytest.approx(5 * one.along["tp"])
    assert five.exposed_seconds == pytest.approx(5 * one.exposed_seconds)


def test_messages_are_linear_in_the_micro_batch() -> None:
    at = [steps_of(model_of((sent("tp", "all_reduce"), 800), ("aten.mm", 100), samples=n)) for n in (1, 2, 6)]
    assert scaled(at[0], at[1], 6).spans == at[2].spans


def test_shards_replicas_and_experts_are_as_far_apart_as_the_ranks_between_them() -> None:
    assert Strategy(64, 2, tensor=4).stride(8) == 4  # layers are between shards
    assert Strategy(64, tensor=4, experts=8).stride(8) == 8  # 64 / 8 ranks have each expert
    assert [Strategy(64, tensor=4, context=2).group(axis) for axis in ("tp", "cp")] == [(4, 1), (2, 4)]


def test_more_bandwidth_is_never_slower_and_less_latency_neither() -> None:
    model = model_of((sent("tp", "all_reduce"), 900), (sent("cp", "all_to_all"), 500), ("aten.mm", 100))
    strategy = Strategy(32, 2, tensor=4, context=2)
    before = planned(model, strategy).seconds
    for field, value in (("intra_node", 200.0), ("inter_node", 20.0), ("latency", 0.5), ("hop", 0.1), ("node", 16)):
        assert planned(model, strategy, replace(NODES, **{field: value})).seconds <= before, field


def test_layers_shared_inside_of_a_node_are_faster_than_over_nodes() -> None:
    model = model_of((sent("tp", "all_gather_into_tensor"), 8000))
    inside, over = (planned(model, Strategy(8, tensor=8), replace(NODES, node=n)).seconds for n in (8, 4))
    assert inside < over


def test_bytes_of_a_message_are_those_of_its_collective() -> None:
    assert whole_nbytes(Message(Work(), "ep", "all_to_all of tokens", 700.0), 8) == ("all-to-all", 800.0)
    assert whole_nbytes(Message(Work(), "tp", "all_to_all_single", 800.0), 8) == ("all-to-all", 800.0)


# ---- search ----------------------------------------------------------------------------------------------------------


def test_other_degrees_have_the_same_samples_of_all_ranks_and_stay_in_a_node() -> None:
    asked = Strategy(16, tensor=2, micro=2, accumulate=3)
    found = list(degrees(asked, node=8))
    assert {s.tensor for s in found} == {1, 2, 4, 8} and max(s.context for s in found) == 8
    for s in found:
        share = s.ranks // s.tensor // s.context // s.pipeline
        assert s.micro * s.accumulate * share == 6 * 8, s
        assert [s.tensor != 2, s.context != 1, s.experts != 1, s.pipeline != 1].count(True) == 1, "one axis at a time"
    # Seven samples of two ranks that share a layer cannot be those of four that do not.
    others = degrees(Strategy(8, tensor=4, micro=3), node=8)
    assert all(s.tensor != 1 for s in others if s.context == s.pipeline == 1)


def searched(legal: dict[tuple[int, int, int], int], hardware: Hardware, **given: float) -> list[Change]:
    """What fits of 4 ranks, where the legal degrees have so many operations of a sample."""

    def described(work: int) -> Describe:
        return lambda samples, *_: model_of(("aten.mm", work), samples=samples)

    def divide(asked: Degrees) -> Describe | str:
        return described(legal[asked[:3]]) if asked[3] == 1 and asked[:3] in legal else f"not legal: {asked}"

    planner = Planner(described(1000), hardware, divide=divide, **given)  # type: ignore[arg-type]
    return planner.search(Strategy(4, optimizer="none", compute="float32"))


def test_the_search_tries_legal_degrees_alone_and_names_them() -> None:
    # Of four samples that two ranks have, each has half of the operations of a sample; of `cp` it would be a quarter.
    found = searched({(2, 1, 1): 100}, PLAIN)
    assert found[0].says.startswith("TP 2") and found[0].plan.strategy.tensor == 2
    assert {s.plan.strategy.tensor for s in found} == {1, 2}
    assert {s.plan.strategy.context for s in found} == {s.plan.strategy.experts for s in found} == {1}
    # Where it is not faster, what was asked for comes first, and each answer has its memory and its margin.
    slower = searched({(2, 1, 1): 1000}, PLAIN)
    assert slower[0].says == "as asked for" or slower[0].plan.strategy.tensor == 1
    assert all(s.plan.fits and s.plan.spare_nbytes >= s.plan.margin_nbytes for s in found)


def test_what_the_search_leaves_out_has_a_reason() -> None:
    """Degrees that the model does not have, that leave no whole number of samples, and that cannot be planned."""

    def described(samples: int, *_: object) -> Model:
        return model_of(("aten.mm", 100), samples=samples)

    def fails(samples: int, *_: object) -> Model:
        raise ValueError("a step raised an error: 3\nheads")

    def divide(asked: Degrees) -> Describe | str:
        return {(2, 1, 1, 1): described, (4, 1, 1, 1): fails}.get(asked, f"found no {asked[1:]}")

    asked = Strategy(12, tensor=2, micro=3, optimizer="none", compute="float32")
    planner = Planner(described, replace(PLAIN, node=4), divide=divide)
    assert planner.search(asked)
    assert planner.left_out.rows() == [
        ("TP", (1, 3), "the 3 samples of a rank become 3/2 of a new one; take a --batch that 2 divides"),
        ("TP", (4,), "a step raised an error: 3 heads"),
        ("CP", (2, 3), "found no (2, 1, 1)"),
        ("CP", (4,), "context: expected a number that divides the 6 ranks that share the parameters, found 4"),
        ("EP", (2, 3, 4, 6, 12), "found no (1, 2, 1)"),
        ("PP", (2, 3, 6), "found no (1, 1, 2)"),
        ("PP", (4, 12), "tensor: expected a number that divides the 3 ranks, found 2"),
    ]
    planner.search(asked, meshes=False)
    assert not planner.left_out.rows()


def test_among_equally_fast_plans_that_with_the_fewest_changes_is_first() -> None:
    found = searched({(2, 1, 1): 1000 // 2}, replace(PLAIN, intra_node=1e12, inter_node=1e12))
    assert [change.count for change in found] == sorted(change.count for change in found)
    assert found[0].says == "as asked for"
