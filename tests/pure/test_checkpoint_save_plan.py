"""Who writes what: plans that ranks compute by themselves, compared with what all of them hold; declarations that
differ; and the sums by which ranks see that they agree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.checkpoint import save_plan
from fullshard.checkpoint.errors import CheckpointError, CheckpointMismatch
from fullshard.checkpoint.plan import MODULUS, Box, Cut, TensorSpec, coverage_problem, whole
from fullshard.checkpoint.rules import Listed, Rule, on, rule_of
from fullshard.checkpoint.save_plan import (
    Own,
    Plan,
    arranged,
    balance_of_values,
    declare,
    merge,
    plan_of,
    share_of,
)

Values = list[tuple[tuple[str, ...], str]]


def sharded(name: str, shape: Sequence[int], rank: int, mesh: Sequence[int], cuts: Sequence[Cut | None]) -> Own:
    """As rank number `rank` of a mesh of all ranks holds it."""
    rule = rule_of(mesh, range(rule_size(mesh)), cuts)
    place = rule.place_of(rank)
    assert place is not None
    return Own((name,), "float32", tuple(shape), rule.box(shape, place[1]), rule, None)


def rule_size(mesh: Sequence[int]) -> int:
    total = 1
    for size in mesh:
        total *= size
    return total


def plain(name: str, shape: Sequence[int] = (3,), dtype: str = "float32") -> Own:
    return Own((name,), dtype, tuple(shape), whole(tuple(shape)), None, None)


def box(name: str, shape: Sequence[int], part: Box | None, dtype: str = "float32") -> Own:
    """A part of no rule."""
    return Own((name,), dtype, tuple(shape), part, None, None)


def merged(
    held: Sequence[Sequence[Own]], values: Sequence[Values] = (), first: Sequence[str] = (), apart: Sequence[str] = ()
) -> Plan:
    """The plan of ranks that hold `held`, of which equal ones declare once."""
    said: dict[str, tuple[list[int], Any]] = {}
    for rank, own in enumerate(held):
        mine = values[rank] if values else []
        message = json.loads(json.dumps(declare(own, mine, first, apart, len(held)).message()))
        said.setdefault(json.dumps(message), ([], message))[0].append(rank)
    return merge(list(said.values()), len(held), "saving here")


def written(plan: Plan, held: Sequence[Sequence[Own]]) -> dict[str, list[Box]]:
    """The boxes of each tensor that some rank writes."""
    found: dict[str, list[Box]] = {key: [] for key in plan.entries}
    for rank, own in enumerate(held):
        share = share_of(plan, own, rank)
        for indices in share.write.values():
            for index in indices:
                found[share.place[index].key].append(share.place[index].box)
    return found


# ---- where all ranks declare the same --------------------------------------------------------------------------------


@st.composite
def states(draw: st.DrawFn) -> tuple[int, list[list[Own]]]:
    """What each rank of a mesh of one or two axes holds: tensors in any placement, plain ones, empty ones."""
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    world = rule_size(mesh)
    held: list[list[Own]] = [[] for _ in range(world)]
    for number in range(draw(st.integers(0, 5))):
        shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=2))
        cuts = [draw(st.one_of(st.none(), st.integers(0, len(shape) - 1).map(Cut))) for _ in mesh]
        is_plain = draw(st.booleans())
        for rank in range(world):
            one = plain(f"t{number}", shape) if is_plain else sharded(f"t{number}", shape, rank, mesh, cuts)
            held[rank].append(one)
    return world, held


@given(states())
def test_every_element_is_written_once_and_all_ranks_have_one_plan(state: tuple[int, list[list[Own]]]) -> None:
    world, held = state
    declared = [declare(own, [], (), (), world) for own in held]
    assert len({one.digest for one in declared}) == 1 and all(one.is_regular for one in declared)
    plans = [plan_of(one) for one in declared]
    assert all(plan == plans[0] for plan in plans)
    for key, boxes in written(plans[0], held).items():
        assert coverage_problem(plans[0].entries[key].shape, boxes) is None, key
    # The first rank, given what all declare, says the same.
    assert merged(held).entries == plans[0].entries


@given(states())
def test_a_reader_finds_what_each_rank_wrote(state: tuple[int, list[list[Own]]]) -> None:
    world, held = state
    plan = plan_of(declare(held[0], [], (), (), world))
    found = {key: set(entry.parts()) for key, entry in plan.entries.items()}
    for rank, own in enumerate(held):
        share = share_of(plan, own, rank)
        for volume, indices in share.write.items():
            for index in indices:
                place = share.place[index]
                assert plan.entries[place.key].volume == volume
                found[place.key].remove((rank, place.box))
    assert not any(found.values())


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 5))
def test_replicas_share_the_tensors(sizes: list[int], world: int) -> None:
    """No rank has more than its share and one part."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(save_plan, "SHARED_NBYTES", 1)
        held = [[plain(f"t{i:02}", (size,), "uint8") for i, size in enumerate(sizes)] for _ in range(world)]
        plan = plan_of(declare(held[0], [], (), (), world))
        loads = [share_of(plan, own, rank).nbytes for rank, own in enumerate(held)]
    assert sum(loads) == sum(sizes)
    assert max(loads) <= sum(sizes) / world + max(sizes, default=0)


def test_small_tensors_that_all_ranks_have_are_in_one_file() -> None:
    """Counters of an optimizer would otherwise be a few bytes in each file, and each rank would read all files."""
    plan = plan_of(declare([plain(f"t{i}") for i in range(100)], [], (), (), 4096))
    assert {entry.replica for entry in plan.entries.values()} == {0}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2), st.booleans()), max_size=20), st.integers(1, 40))
def test_files_are_bounded_and_those_apart_are_apart(tensors: list[tuple[int, int, bool]], limit: int) -> None:
    """A file has at most the limit, or one part; tensors that are apart are in files of their own."""
    rules = [on((0,)), on((0, 1)), rule_of((2,), (0, 1), [Cut(0)])]
    wanted = [
        (TensorSpec((f"t{n:02}",), "uint8", (size,)), rules[which], apart, False)
        for n, (size, which, apart) in enumerate(tensors)
    ]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(save_plan, "FILE_NBYTES", limit)
        monkeypatch.setattr(save_plan, "SHARED_NBYTES", 1)
        entries = arranged(wanted)
    assert list(entries) == sorted(spec.key for spec, *_ in wanted)
    volumes: dict[int, set[bool]] = {}
    files: dict[tuple[int, int], list[int]] = {}
    for spec, _, apart, _ in wanted:
        entry = entries[spec.key]
        if spec.nbytes:
            volumes.setdefault(entry.volume, set()).add(apart)
        for rank, part in entry.parts():
            files.setdefault((rank, entry.volume), []).append(part.numel)
    assert all(len(kinds) == 1 for kinds in volumes.values())
    assert all(sum(sizes) <= limit or len(sizes) == 1 for sizes in files.values()), files


def test_a_plan_comes_back_from_json() -> None:
    held = [[box("w", (4,), Box((0,), (3,))), plain("b")], [box("w", (4,), Box((3,), (1,)))]]
    values: list[Values] = [[(("n",), "1")], [(("m",), "2")]]
    plan = merged(held, values, ["b"])
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())), 2)
    assert again == plan and again.id == plan.id
    assert plan.values == {"m": (("m",), [(1,)]), "n": (("n",), [(0,)])} and plan.first == {"b"}


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "cut", "mesh", "apart", "first", "value", "world"])
def test_another_layout_has_another_digest(change: str) -> None:
    def digest(change: str = "") -> str:
        name, dtype = "v" if change == "name" else "w", "bfloat16" if change == "dtype" else "float32"
        shape = (4, 5) if change == "shape" else (4, 4)
        ranks = (0, 2) if change == "mesh" else (0, 1)
        rule = rule_of((2,), ranks, [Cut(int(change == "cut"))])
        own = [Own((name,), dtype, shape, rule.box(shape, 0), rule, None)]
        values: Values = [((change if change == "value" else "n",), "1")]
        flags = (("*",) if change == "first" else (), (name,) if change == "apart" else ())
        return declare(own, values, *flags, 5 if change == "world" else 4).digest

    assert digest() == digest() and digest() != digest(change)


def test_the_contents_of_values_are_not_of_the_layout() -> None:
    one, other = (declare([], [(("step",), text)], (), (), 2) for text in "12")
    assert one.digest == other.digest


# ---- a plan that is not of this layout -------------------------------------------------------------------------------


def test_a_stale_plan_is_found_by_what_a_rank_holds() -> None:
    """Whatever its digest says: other boxes of the same size, other dims, a tensor that is new or gone."""
    world = 2
    own = [[sharded("w", (4, 4), rank, (2,), [Cut(0)])] for rank in range(world)]
    columns = plan_of(declare([sharded("w", (4, 4), 0, (2,), [Cut(1)])], [], (), (), world))
    with pytest.raises(CheckpointError, match=r"w: expected this rank to hold \[0:4, 0:2\] .* found \[0:2, 0:4\]"):
        share_of(columns, own[0], 0)
    plan = plan_of(declare(own[0], [], (), (), world))
    with pytest.raises(CheckpointError, match=r"w: expected this rank to hold \[2:4, 0:4\] .* found \[0:2, 0:4\]"):
        share_of(plan, own[0], 1)
    with pytest.raises(CheckpointError, match="new: expected this rank to hold nothing"):
        share_of(plan, [*own[0], plain("new")], 0)
    with pytest.raises(CheckpointError, match="w: expected float32"):
        share_of(plan, [own[0][0]._replace(dtype="int32")], 0)
    assert share_of(plan, own[0], 0).nbytes == 32


# ---- ranks that declare differently ----------------------------------------------------------------------------------


def test_parts_and_replicas_and_keys_of_one_rank_are_one_plan() -> None:
    held = [[box("w", (4,), Box((0,), (2,))), plain("b")], [box("w", (4,), Box((2,), (2,))), plain("b"), plain("own")]]
    values: list[Values] = [[(("step",), "5")], [(("s2",), "6")]]
    plan = merged(held, values)
    assert sorted(plan.entries) == ["b", "own", "w"]
    assert plan.entries["b"].rule == on((0, 1)) and plan.entries["own"].rule == on((1,))
    assert plan.entries["w"].parts() == [(0, Box((0,), (2,))), (1, Box((2,), (2,)))]
    assert plan.values == {"s2": (("s2",), [(1,)]), "step": (("step",), [(0,)])}
    assert {key: len(boxes) for key, boxes in written(plan, held).items()} == {"b": 1, "own": 1, "w": 2}


def test_stages_have_tensors_of_their_own_by_rules() -> None:
    """A pipeline of two stages of two ranks: nothing is listed."""
    held = []
    for rank in range(4):
        rule = rule_of((2,), (rank // 2 * 2, rank // 2 * 2 + 1), [Cut(0)])
        held.append([Own((f"stage{rank // 2}",), "float32", (4,), rule.box((4,), rank % 2), rule, None), plain("b")])
    plan = merged(held)
    assert plan.entries["stage1"].rule == Rule((2,), (Cut(0),), (2, 3)) and plan.entries["b"].rule == on(range(4))
    assert len(written(plan, held)["stage1"]) == 2


def test_a_tensor_on_a_mesh_of_other_ranks_is_declared_by_all_alike() -> None:
    rule = rule_of((2,), (1, 2), [Cut(0)])
    held = [
        [Own(("w",), "float32", (4,), None if not rank else rule.box((4,), rank - 1), rule, None)] for rank in range(3)
    ]
    assert len({declare(own, [], (), (), 3).digest for own in held}) == 1
    plan = plan_of(declare(held[0], [], (), (), 3))
    assert [share_of(plan, own, rank).nbytes for rank, own in enumerate(held)] == [0, 8, 8]


def test_a_rule_that_not_all_of_its_ranks_declare_is_what_is_there() -> None:
    mesh = [[sharded("w", (4,), rank, (2, 2), [None, Cut(0)])] for rank in range(4)]
    held = [*mesh[:3], [plain("x")]]
    plan = merged(held)
    assert isinstance(plan.entries["w"].rule, Listed)
    assert [held.ranks for held in plan.entries["w"].rule.parts] == [(0, 2), (1,)]
    with pytest.raises(CheckpointMismatch, match="2 of 4 elements are in no part"):
        merged([mesh[0], [plain("x")], mesh[2], [plain("x")]])


HALVES = [box("w", (4,), Box((0,), (2,))), box("w", (4,), Box((2,), (2,)))]


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ([[HALVES[0]], []], "2 of 4 elements are in no part"),
        ([[HALVES[0]], [box("w", (4,), Box((1,), (3,)))]], "overlap"),
        ([[HALVES[0]], [box("w", (4,), Box((2,), (2,)), "float16")]], "float32 (4,) on rank 0, float16"),
        ([[HALVES[0]], [box("w", (5,), Box((2,), (3,)))]], "(5,) on rank 1"),
        ([[plain("b", (2,))], [plain("b", (3,))]], "float32 (2,) on rank 0, float32 (3,) on rank 1"),
        (
            [[plain("a.b")], [plain("x")._replace(path=("a", "b"))]],
            "at ['a.b'] on rank 0, at ['a', 'b'] on rank 1",
        ),
        (
            [[sharded("w", (4,), 0, (2,), [Cut(0)])], [plain("w", (4,))]],
            "overlap",
        ),
    ],
)
def test_ranks_that_do_not_fit_are_named(held: list[list[Own]], says: str) -> None:
    with pytest.raises(CheckpointMismatch) as caught:
        merged(held)
    assert says in str(caught.value) and "saving here" in str(caught.value)


def test_values_that_do_not_fit_are_named() -> None:
    def says(held: Sequence[Sequence[Own]], *values: Values) -> str:
        with pytest.raises(CheckpointMismatch) as caught:
            merged(held, values)
        return str(caught.value)

    assert "s: one value on rank 0, another on rank 1" in says([[], []], [(("s",), "1")], [(("s",), "2")])
    assert "w: a value on rank 0, a tensor on rank 1" in says([[], HALVES], [(("w",), "1")], [])
    assert "w: a tensor on rank 0, a value on rank 1" in says([[plain("w")], []], [], [(("w",), "1")])


def test_all_that_does_not_fit_is_in_one_error() -> None:
    with pytest.raises(CheckpointMismatch) as caught:
        merged([[HALVES[0]], []], [[(("s",), "1")], [(("s",), "2")]])
    assert len(caught.value.problems) == 2


def test_groups_of_parameters_may_differ_and_come_from_one_rank_of_each_stage() -> None:
    path = ("optimizer", "param_groups")
    values: list[Values] = [[(path, digest)] for digest in "aabba"]
    plan = merged([[]] * 5, values)
    assert plan.values == {"optimizer.param_groups": (path, [(0, 1, 4), (2, 3)])}
    assert merged([[]] * 5, values, ["optimizer.*"]).values["optimizer.param_groups"][1] == [(0, 1, 4)]


def test_the_first_is_taken_where_it_is_asked_for() -> None:
    assert merged([[], []], [[(("a", "s"), "1")], [(("a", "s"), "2")]], ["a.*"]).values["a.s"][1] == [(0,)]
    held = [[plain("w", (1 << 25,))] for _ in range(2)]
    for first, compared in (((), [1, 1]), (["w"], [0, 0])):
        plan = plan_of(declare(held[0], [], first, (), 2))
        shares = [share_of(plan, own, rank) for rank, own in enumerate(held)]
        assert [len(share.replicated) for share in shares] == compared
        if first:
            assert [share.nbytes > 0 for share in shares] == [True, False]


# ---- sums ------------------------------------------------------------------------------------------------------------


def total(plan: Plan, values: Sequence[Values]) -> int:
    digests = [{".".join(path): digest for path, digest in mine} for mine in values]
    return sum(balance_of_values(plan, rank, mine) for rank, mine in enumerate(digests)) % MODULUS


@given(st.integers(1, 9), st.data())
def test_values_that_differ_on_any_rank_leave_a_sum(world: int, data: st.DataObject) -> None:
    values: list[Values] = [[(("a",), "1"), (("b",), "2")] for _ in range(world)]
    plan = plan_of(declare([], values[0], (), (), world))
    assert total(plan, values) == 0
    odd = data.draw(st.sets(st.integers(0, world - 1), max_size=world - 1))
    for rank in odd:
        values[rank] = [(("a",), "1"), (("b",), data.draw(st.sampled_from(["3", "4"])))]
    assert (total(plan, values) == 0) == (len({str(mine) for mine in values}) == 1)


def test_values_are_compared_among_those_that_have_them() -> None:
    """Of a pipeline each stage has groups of its own, whose learning rate changes with each step."""
    path = ("optimizer", "param_groups")
    plan = merged([[]] * 4, [[(path, "aabb"[rank]), (("step",), "1")] for rank in range(4)])
    assert total(plan, [[(path, "ccdd"[rank]), (("step",), "2")] for rank in range(4)]) == 0
    assert total(plan, [[(path, "ccde"[rank]), (("step",), "2")] for rank in range(4)]) != 0
    assert total(plan, [[(path, "ccdd"[rank]), (("step",), "2223"[rank])] for rank in range(4)]) != 0


def test_values_of_which_the_first_is_taken_may_differ() -> None:
    values: list[Values] = [[(("a",), str(rank))] for rank in range(3)]
    assert total(plan_of(declare([], values[0], ["a"], (), 3)), values) == 0
