"""Routes between two layouts of one tensor: every element travels once, and back is the identity."""

import pytest
import torch
from hypothesis import given

from fullshard.layout import BoxRoute, Route, ShardLayout, box_routes, routes
from tests.harness.strategies import two_layouts_of_one_tensor

Shards = list[torch.Tensor]


def shards_of(full: torch.Tensor, layout: ShardLayout) -> Shards:
    """The unpadded shards of all ranks."""
    return [full.narrow(layout.dim, layout.start(rank), layout.rows(rank)).clone() for rank in range(layout.world)]


def move(shards: Shards, dst: ShardLayout, moves: list[Route]) -> Shards:
    """Carry rows along routes; what no route fills stays -1, what two fill is an error."""
    out = [torch.full(dst.local_shape(rank), -1) for rank in range(dst.world)]
    for route in moves:
        target = out[route.dst_rank].narrow(dst.dim, route.dst_start, route.length)
        assert (target == -1).all(), f"{route} fills rows that are already there"
        target.copy_(shards[route.src_rank].narrow(dst.dim, route.src_start, route.length))
    return out


def move_boxes(shards: Shards, dst: ShardLayout, moves: list[BoxRoute]) -> Shards:
    """Carry n-dimensional boxes along routes."""
    out = [torch.full(dst.local_shape(rank), -1) for rank in range(dst.world)]
    for route in moves:
        source = tuple(slice(s, s + n) for s, n in zip(route.src_starts, route.lengths, strict=True))
        target = tuple(slice(s, s + n) for s, n in zip(route.dst_starts, route.lengths, strict=True))
        assert (out[route.dst_rank][target] == -1).all(), f"{route} fills elements that are already there"
        out[route.dst_rank][target] = shards[route.src_rank][source]
    return out


def assert_same(found: Shards, expected: Shards) -> None:
    for rank, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"rank {rank}: {a} is not {b}"


@given(two_layouts_of_one_tensor(same_dim=True))
def test_a_to_b_to_a_is_identity(layouts: tuple[ShardLayout, ShardLayout]) -> None:
    """There with routes(a, b), back with their inverses and with routes(b, a)."""
    a, b = layouts
    full = torch.arange(a.numel).view(a.shape)
    there = routes(a, b)
    moved = move(shards_of(full, a), b, list(there))
    assert_same(moved, shards_of(full, b))
    assert_same(move(moved, a, [route.inverse() for route in there]), shards_of(full, a))
    assert sorted(route.inverse() for route in there) == sorted(routes(b, a))


@given(two_layouts_of_one_tensor(same_dim=True))
def test_routes_cover_every_row_once_and_are_few(layouts: tuple[ShardLayout, ShardLayout]) -> None:
    """Lengths add up, none is empty, and there are fewer than ranks on both sides together."""
    a, b = layouts
    found = routes(a, b)
    assert sum(route.length for route in found) == a.shape[a.dim]
    assert all(route.length > 0 for route in found)
    assert len(found) <= a.world + b.world - 1


@given(two_layouts_of_one_tensor(same_dim=False))
def test_boxes_of_any_dims_are_identity_there_and_back(layouts: tuple[ShardLayout, ShardLayout]) -> None:
    """Also when the sharded dims differ."""
    a, b = layouts
    full = torch.arange(a.numel).view(a.shape)
    there = box_routes(a, b)
    moved = move_boxes(shards_of(full, a), b, list(there))
    assert_same(moved, shards_of(full, b))
    assert_same(move_boxes(moved, a, [route.inverse() for route in there]), shards_of(full, a))


@given(two_layouts_of_one_tensor(same_dim=True))
def test_boxes_and_rows_agree(layouts: tuple[ShardLayout, ShardLayout]) -> None:
    """Of one dim, boxes are the rows of the routes in full width."""
    a, b = layouts
    if 0 in a.shape:  # boxes without elements are left out, rows without elements are not
        assert box_routes(a, b) == ()
        return
    from_boxes = [
        Route(box.src_rank, box.src_starts[a.dim], box.dst_rank, box.dst_starts[a.dim], box.lengths[a.dim])
        for box in box_routes(a, b)
    ]
    assert sorted(from_boxes) == sorted(routes(a, b))


def test_the_same_layout_routes_each_rank_to_itself() -> None:
    """Nothing crosses ranks when nothing changes."""
    layout = ShardLayout((5, 3), world=4)
    assert routes(layout, layout) == (Route(0, 0, 0, 0, 2), Route(1, 0, 1, 0, 2), Route(2, 0, 2, 0, 1))


def test_different_tensors_or_dims_are_refused() -> None:
    """The error says which sizes, and where to go for different dims."""
    with pytest.raises(ValueError, match=r"shape.*\(4, 2\).*\(4, 3\)"):
        routes(ShardLayout((4, 2)), ShardLayout((4, 3)))
    with pytest.raises(ValueError, match="shape"):
        box_routes(ShardLayout((4, 2)), ShardLayout((4, 3)))
    with pytest.raises(ValueError, match="box_routes"):
        routes(ShardLayout((4, 2), dim=0), ShardLayout((4, 2), dim=1))
