"""Rules by which tensors are cut, compared with lists of what every rank holds, which are made one rank at a time."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.checkpoint.plan import Box, Cut, coverage_problem, local_box, overlap
from fullshard.checkpoint.rules import (
    Held,
    Listed,
    Rule,
    boxes_of,
    compact,
    expanded,
    from_json,
    joined,
    listed,
    on,
    rule_of,
    to_json,
)

Case = tuple[tuple[int, ...], list[int], list[int], list[Cut | None]]  # shape, mesh, its ranks, what each axis cuts


@st.composite
def meshes(draw: st.DrawFn) -> Case:
    """Meshes of one to three axes on any ranks, axes that replicate, a dim that two axes cut in either order, dims
    smaller than the axis, and without elements."""
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dims = st.one_of(st.none(), st.integers(0, len(shape) - 1).map(Cut))
    cuts: list[Cut | None] = [draw(dims) for _ in mesh]
    if len(mesh) == 2 and cuts[0] and cuts[1] and cuts[0].dim == cuts[1].dim and draw(st.booleans()):
        cuts[0] = Cut(cuts[0].dim, pieces=mesh[1])
    ranks = draw(st.permutations(range(math.prod(mesh) + 3)))[: math.prod(mesh)]
    return shape, mesh, list(ranks), cuts


def every_rank(case: Case) -> dict[int, Box]:
    """What each rank holds."""
    shape, mesh, ranks, cuts = case
    coordinates = itertools.product(*map(range, mesh))
    return {rank: local_box(shape, mesh, at, cuts) for rank, at in zip(ranks, coordinates, strict=True)}


@given(meshes())
def test_a_rule_says_what_each_rank_holds(case: Case) -> None:
    shape, mesh, ranks, cuts = case
    rule, held = rule_of(mesh, ranks, cuts), every_rank(case)
    assert sorted(rule.ranks) == sorted(ranks) and rule.flaw(max(ranks) + 1) is None
    for rank, box in held.items():
        place = rule.place_of(rank)
        assert place is not None
        replica, part = place
        assert rule.box(shape, part) == box and rule.writer(part, replica) == rank
        assert rule.holders(part)[replica] == rank
        if box.numel:
            assert set(rule.holders(part)) == {other for other, its in held.items() if its == box}
    assert rule.place_of(99) is None
    assert rule.largest(shape) == max(box.numel for box in held.values())
    assert coverage_problem(shape, [box for _, box in boxes_of(rule, shape)]) is None


@pytest.mark.sample(1)
@given(meshes(), st.data())
def test_the_parts_in_a_box_are_found_without_the_others(case: Case, data: st.DataObject) -> None:
    shape, mesh, ranks, cuts = case
    offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
    wanted = Box(offsets, tuple(data.draw(st.integers(0, n - o)) for o, n in zip(offsets, shape, strict=True)))
    rule = rule_of(mesh, ranks, cuts)
    for one in (rule, listed(list(every_rank(case).items()))):
        all_parts = [(part, one.box(shape, part)) for part in range(one.num_parts)]
        assert one.overlapping(shape, wanted) == [(part, box) for part, box in all_parts if overlap(box, wanted)]


def test_a_part_of_ten_thousand_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = rule_of((10_000,), range(10_000), [Cut(0)])
    monkeypatch.setattr(Rule, "box", None)
    assert rule.overlapping((100_000, 8), Box((50_005, 2), (10, 3))) == [
        (5000, Box((50_000, 0), (10, 8))),
        (5001, Box((50_010, 0), (10, 8))),
    ]


@given(meshes())
def test_what_is_listed_is_what_ranks_hold(case: Case) -> None:
    shape = case[0]
    held = every_rank(case)
    found = listed(list(held.items()))
    for rank, box in held.items():
        place = found.place_of(rank)
        assert (place is None) == (not box.numel)
        if place is not None:
            assert found.box(shape, place[1]) == box and rank in found.holders(place[1])
    assert found.problem(shape, 99) is None or not math.prod(shape)


@given(meshes())
def test_rules_come_back_from_json(case: Case) -> None:
    shape, mesh, ranks, cuts = case
    for rule in (rule_of(mesh, ranks, cuts), listed(list(every_rank(case).items()))):
        assert from_json(json.loads(json.dumps(to_json(rule))), 99) == rule


@given(st.lists(st.integers(1, 5), min_size=0, max_size=3), st.data())
def test_ranks_of_a_mesh_are_arithmetic(sizes: list[int], data: st.DataObject) -> None:
    """Also those of a part of a mesh, and in transposed order: a few numbers, whatever the mesh's size is."""
    order = data.draw(st.permutations(range(len(sizes))))
    strides = [math.prod(sizes[axis + 1 :]) * 3 for axis in range(len(sizes))]
    ranks = [
        7 + sum(index * strides[axis] for index, axis in zip(at, order, strict=True))
        for at in itertools.product(*(range(sizes[axis]) for axis in order))
    ]
    found = compact(ranks)
    assert isinstance(found, dict) and len(found["by"]) <= len(sizes)
    assert expanded(found, 125) == tuple(ranks)


@given(st.lists(st.integers(0, 9), max_size=8))
def test_any_ranks_come_back(ranks: list[int]) -> None:
    assert expanded(json.loads(json.dumps(compact(ranks))), 9) == tuple(ranks)


@pytest.mark.parametrize(
    "raw",
    [
        None,
        {"from": 0},
        {"from": 0, "by": [[0, 1]]},
        {"from": 0, "by": [[2, 0]]},
        {"from": 0, "by": [[2, 1, 1]]},
        {"from": True, "by": []},
        {"from": 0, "by": [[4, 1], [4, 4]]},
        {"from": 0, "by": [[10**15, 1]]},
        [0, True],
        list(range(20)),
    ],
)
def test_ranks_that_no_save_writes_are_refused(raw: Any) -> None:
    with pytest.raises(ValueError, match="ranks"):
        expanded(raw, 9)


def test_replicas_of_several_meshes_are_one_rule() -> None:
    """As where each rank has a mesh of its own replica: an axis of a larger mesh."""
    one, other = rule_of((2,), (0, 1), [Cut(0)]), rule_of((2,), (2, 3), [Cut(0)])
    assert joined([other, one]) == Rule((2,), (Cut(0),), (0, 1, 2, 3))
    assert joined([one, one]) == one
    assert joined([one, rule_of((2,), (1, 2), [Cut(0)])]) is None, "a rank with two parts"
    assert joined([one, on((2,))]) is None, "other parts"
    assert joined([on((5,)), on((3, 4))]) == on((3, 4, 5))


def test_of_a_part_each_replica_may_write() -> None:
    rule = rule_of((2, 2), (0, 1, 2, 3), [None, Cut(0)])
    assert [rule.writer(1, replica) for replica in range(rule.num_replicas)] == [1, 3]
    several = Listed((Held(Box((0,), (1,)), (4, 6)), Held(Box((1,), (1,)), (5,))))
    assert [several.writer(part, 1) for part in (0, 1)] == [6, 5]
