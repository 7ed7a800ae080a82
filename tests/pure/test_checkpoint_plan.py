"""Which part of a tensor is where, and what a reader of another world takes: no files, no calls of torch. The cuts
are compared with torch's own arithmetic for DTensors."""

from __future__ import annotations

import gc
import itertools
import math
import random
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.checkpoint.plan import (
    Box,
    Cut,
    coverage_problem,
    local_box,
    overlap,
    row_major,
    takes,
    together,
    uncollected,
    whole,
)

Elements = set[tuple[int, ...]]
CutTensor = tuple[tuple[int, ...], list[int], list[Cut | None]]  # shape, mesh, what each axis cuts


def elements(box: Box) -> Elements:
    return set(itertools.product(*(range(o, o + n) for o, n in zip(*box, strict=True))))


def chunked(full: torch.Tensor, mesh: list[int], coordinate: tuple[int, ...], cuts: list[Cut | None]) -> torch.Tensor:
    """The part that torch.chunk gives, axis by axis from left to right (plain cuts)."""
    part = full
    for size, index, cut in zip(mesh, coordinate, cuts, strict=True):
        if cut is not None:
            pieces = part.chunk(size, dim=cut.dim)
            part = pieces[index] if index < len(pieces) else part.narrow(cut.dim, part.shape[cut.dim], 0)
    return part


@st.composite
def cut_tensors(draw: st.DrawFn) -> CutTensor:
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    dims = st.one_of(st.none(), st.integers(0, len(shape) - 1).map(Cut))
    return shape, mesh, [draw(dims) for _ in mesh]


@given(cut_tensors())
def test_parts_are_those_of_chunk_and_cover_the_tensor(case: CutTensor) -> None:
    shape, mesh, cuts = case
    full = torch.arange(math.prod(shape)).view(shape)
    boxes = set()
    for coordinate in itertools.product(*map(range, mesh)):
        box = local_box(shape, mesh, coordinate, cuts)
        expected = chunked(full, mesh, coordinate, cuts)
        assert box.lengths == tuple(expected.shape)
        index = tuple(slice(o, o + n) for o, n in zip(*box, strict=True))
        assert torch.equal(full[index], expected)
        if box.numel:
            boxes.add(box)
    assert coverage_problem(shape, boxes) is None


@pytest.mark.parametrize("rows", [1, 5, 8, 9])
def test_an_axis_may_cut_after_one_to_its_right(rows: int) -> None:
    """FSDP over tensor parallelism: tensor parallelism (right) cuts first, and `_StridedShard` on the left says so."""
    found = {}
    for data, model in itertools.product(range(2), range(3)):
        found[data, model] = local_box((rows,), (2, 3), (data, model), [Cut(0, pieces=3), Cut(0)])
    for data, model in found:
        piece = local_box((rows,), (3,), (model,), [Cut(0)])
        inner = local_box(piece.lengths, (2,), (data,), [Cut(0)])
        assert found[data, model] == Box((piece.offsets[0] + inner.offsets[0],), inner.lengths)
    assert coverage_problem((rows,), found.values()) is None
    with pytest.raises(ValueError, match="after 3 pieces"):
        local_box((rows,), (2, 2), (0, 0), [Cut(0, pieces=3), Cut(0)])


boxes_of_2d = st.builds(
    Box, st.tuples(st.integers(0, 4), st.integers(0, 4)), st.tuples(st.integers(0, 3), st.integers(0, 3))
)


@given(st.lists(boxes_of_2d, max_size=4))
def test_coverage_is_proven_as_by_counting(boxes: list[Box]) -> None:
    shape = (4, 4)
    counted = [element for box in boxes for element in elements(box)]
    inside = all(o + n <= 4 for box in boxes for o, n in zip(*box, strict=True))
    exact = inside and sorted(counted) == sorted(elements(whole(shape)))
    assert (coverage_problem(shape, boxes) is None) == exact


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 3))
def test_a_grid_covers_and_a_changed_one_does_not(rows: int, columns: int, which: int) -> None:
    grid = [local_box((6, 7), (rows, columns), (i, j), [Cut(0), Cut(1)]) for i in range(rows) for j in range(columns)]
    assert coverage_problem((6, 7), grid) is None
    random.Random(which).shuffle(grid)
    assert "in no part" in (coverage_problem((6, 7), grid[1:]) or "") or not grid[0].numel
    assert "overlap" in (coverage_problem((6, 7), [*grid, grid[0]]) or "") or not grid[0].numel


def test_parts_that_overlap_do_not_make_up_for_a_gap() -> None:
    """As many elements as the tensor has."""
    assert "overlap" in (coverage_problem((4,), [Box((0,), (2,)), Box((1,), (2,))]) or "")


def test_a_tensor_without_dims_or_elements() -> None:
    assert coverage_problem((), [whole(())]) is None
    assert "1 of 1" in (coverage_problem((), []) or "")
    assert "overlap" in (coverage_problem((), [whole(()), whole(())]) or "")
    assert coverage_problem((0, 3), []) is None
    assert "outside" in (coverage_problem((2,), [Box((1,), (2,))]) or "")
    assert "dims" in (coverage_problem((2,), [Box((), ())]) or "")


@given(st.data())
def test_what_is_taken_puts_a_wanted_part_together(data: st.DataObject) -> None:
    """Out of parts of one layout, any box; each element from the place in memory where it was put."""
    shape, mesh, cuts = data.draw(cut_tensors())
    offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
    lengths = tuple(data.draw(st.integers(0, size - o)) for o, size in zip(offsets, shape, strict=True))
    wanted = Box(offsets, lengths)
    full = torch.arange(math.prod(shape)).view(shape)
    parts = sorted({local_box(shape, mesh, c, cuts) for c in itertools.product(*map(range, mesh))})
    # As in files: `reshape` alone leaves one column where it is.
    memory = [full[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].contiguous().reshape(-1) for box in parts]
    out = torch.full(lengths, -1)
    for take in takes(wanted, parts):
        read = memory[take.part][take.first : take.stop]
        assert len(read) == take.stop - take.first, "nothing outside of the part is read"
        region = out[tuple(slice(t, t + n) for t, n in zip(take.target, take.lengths, strict=True))]
        assert (region == -1).all()
        region.copy_(read.as_strided(take.lengths, take.strides))
        assert take.contiguous == (read.numel() == region.numel())
    assert torch.equal(out, full[tuple(slice(o, o + n) for o, n in zip(*wanted, strict=True))])


def test_boxes_say_what_they_are() -> None:
    assert str(Box((0, 3), (2, 2))) == "[0:2, 3:5]"
    assert overlap(Box((0,), (2,)), Box((2,), (2,))) is None
    assert row_major((4, 3, 2)) == (6, 2, 1)


# ---- groups of parameters --------------------------------------------------------------------------------------


def test_groups_of_stages_become_those_of_one_optimizer() -> None:
    decay, none = {"lr": 1.0, "decay": 0.1}, {"lr": 1.0, "decay": 0.0}
    first = [{**decay, "params": ["0.w"]}, {**none, "params": ["0.b"]}]
    second = [{**decay, "params": ["1.w"]}, {**none, "params": ["1.b", "1.c"]}]
    whole = [{**decay, "params": ["0.w", "1.w"]}, {**none, "params": ["0.b", "1.b", "1.c"]}]
    assert together([first, second]) == whole
    assert first[0]["params"] == ["0.w"]  # as it was
    # A stage without one of the groups, and in another order.
    assert together([first, [second[1]]]) == [first[0], whole[1]]
    assert together([first, second[::-1]]) == whole
    # Other settings are another group; groups of one optimizer stay apart whatever their settings are.
    assert together([[first[0]], [{**second[0], "lr": 2.0}]]) == [first[0], {**second[0], "lr": 2.0}]
    alike = [{**decay, "params": ["a"]}, {**decay, "params": ["b"]}]
    assert together([alike]) == alike
    assert together([alike, [{**decay, "params": ["c"]}, {**decay, "params": ["d"]}]]) == [
        {**decay, "params": ["a", "c"]},
        {**decay, "params": ["b", "d"]},
    ]
    assert together([["a"], ["b"], []]) == ["a", "b"]


@pytest.mark.parametrize(
    "values",
    [
        [[{"params": ["a", "b"]}], [{"params": ["b"]}]],
        [[{"params": [0]}], [{"params": [0, 1]}]],
        [["a"], ["a", "b"]],
    ],
    ids=["groups", "numbers", "names"],
)
def test_two_ranks_that_name_one_parameter_have_one_stage_and_differ(values: list[Any]) -> None:
    with pytest.raises(ValueError, match="same"):
        together(values)


def test_the_collector_is_off_during_a_plan_and_as_it_was_after() -> None:
    was = gc.isenabled()
    try:
        for enabled in (True, False):
            (gc.enable if enabled else gc.disable)()
            with pytest.raises(ZeroDivisionError), uncollected():
                assert not gc.isenabled()
                raise ZeroDivisionError
            assert gc.isenabled() is enabled
        gc.enable()
        found: list[bool] = []

        def beside() -> None:
            with uncollected():
                found.append(gc.isenabled())

        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        assert found == [True], "another thread leaves it to the program"
    finally:
        (gc.enable if was else gc.disable)()
