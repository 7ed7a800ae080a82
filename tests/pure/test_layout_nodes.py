"""Reductions in two hops, as arithmetic: where each rank's chunk lies, and that two exchanges bring every part home."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.layout import NodeGrid, Pack, ReduceLayout, ShardLayout, node_grid, reduces_in_hops
from tests.harness.strategies import shapes

grids = st.builds(NodeGrid, st.integers(1, 4), st.integers(1, 4))


@given(grids, st.data())
def test_slots_and_grids_of_ranks(grid: NodeGrid, data: st.DataObject) -> None:
    """Each rank has a slot of its own; the grids of a range name its ranks, in order, at their slots."""
    assert sorted(map(grid.slot, range(grid.world))) == list(range(grid.world))
    first = data.draw(st.integers(0, grid.world))
    ranks = data.draw(st.integers(0, grid.world - first))
    found = []
    parts = list(grid.grids(first, ranks))
    for part in parts:
        for at in itertools.product(*map(range, part.sizes)):
            rank = part.first_rank + sum(i * n for i, n in zip(at, part.rank_strides, strict=True))
            slot = part.slot + sum(i * n for i, n in zip(at, part.slot_strides, strict=True))
            assert slot == grid.slot(rank)
            found.append(rank)
    assert found == list(range(first, first + ranks))
    assert len(parts) <= 3


def _at(start: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    return [
        start + sum(i * n for i, n in zip(at, strides, strict=True)) for at in itertools.product(*map(range, sizes))
    ]


@given(st.lists(shapes(), min_size=1, max_size=3), grids, st.sampled_from([0, -1]))
def test_two_hops_bring_each_element_to_its_owner(sizes: list[tuple[int, ...]], grid: NodeGrid, dim: int) -> None:
    """Of one sender, simulated: fill the buffer, exchange runs within its node, then chunks between nodes. What arrives
    at each rank is what one exchange in rank order brings there."""
    layouts = [ShardLayout(shape, dim, grid.world) for shape in sizes]
    pack = Pack.build(layouts, align_numel=2)
    flat, hops = ReduceLayout(pack), ReduceLayout(pack, grid=grid)
    buffers = {}
    for layout in (flat, hops):
        buffer: list[tuple[int, int] | None] = [None] * layout.numel
        for index in layout.packed:
            for region in layout.regions(index):
                places = _at(region.start, region.sizes, region.strides)
                elements = _at(region.full_start, region.sizes, region.full_strides)
                for place, element in zip(places, elements, strict=True):
                    assert buffer[place] is None
                    buffer[place] = (index, element)
        buffers[layout] = buffer
    assert sum(x is not None for x in buffers[hops]) == pack.numel
    for layout, buffer in buffers.items():
        # Gradients, presence and gaps: each element is one of them.
        places = [place for place, held in enumerate(buffer) if held is not None]
        places += [layout.presence(i, rank) for i in range(len(layouts)) for rank in range(grid.world)]
        places += [place for gap in layout.gaps() for place in _at(gap.start, gap.sizes, gap.strides)]
        assert sorted(places) == list(range(layout.numel))
    chunk, run = hops.chunk_numel, grid.nodes * hops.chunk_numel
    for rank in range(grid.world):
        node, place = divmod(rank, grid.local)
        first_hop = buffers[hops][place * run : (place + 1) * run]
        arrived = first_hop[node * chunk : (node + 1) * chunk]
        assert arrived == buffers[flat][rank * chunk : (rank + 1) * chunk]
        if layouts[0].numel:
            assert hops.segment(0, rank) == (place * grid.nodes + node) * chunk


def test_groups_on_nodes() -> None:
    assert node_grid(range(6), 3) == NodeGrid(2, 3)
    assert node_grid((0, 2, 4, 6), 4) == NodeGrid(2, 2)  # beside tensor parallelism of two ranks
    assert node_grid((0, 8, 16), 8) == NodeGrid(3, 1)
    assert node_grid((4, 5, 6, 7), 4) == NodeGrid(1, 4)
    for ranks, local, words in (
        (range(6), 4, "4 of node 0, 2 of node 1"),
        ((0, 2, 1, 3), 2, "1 of node 0, 1 of node 1, 1 of node 0, 1 of node 1"),
        ((0, 1, 2, 4), 2, "2 of node 0, 1 of node 1, 1 of node 2"),
    ):
        with pytest.raises(ValueError, match=words):
            node_grid(ranks, local)
    with pytest.raises(ValueError, match="local_world"):
        node_grid(range(4), 0)
    with pytest.raises(ValueError, match="expected 4 ranks in all, found 3 times 2"):
        ReduceLayout(Pack.build([ShardLayout((8,), world=4)], 1), grid=NodeGrid(3, 2))


@pytest.mark.parametrize("grid", [None, NodeGrid(1, 8), NodeGrid(8, 1), NodeGrid(2, 4)])
def test_which_strategies_reduce_in_hops(grid: NodeGrid | None) -> None:
    two = grid == NodeGrid(2, 4)
    assert reduces_in_hops("hierarchical", grid) == reduces_in_hops("auto", grid) == two
    assert not reduces_in_hops("torch", grid) and not reduces_in_hops("all-to-all", grid)
