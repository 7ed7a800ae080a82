"""Overlap of two layouts of the same tensor: what each rank sends to which, and where it lands.

Shape (6,) from 2 ranks to 3; a route is one line between the two rows of boxes:

    src   [ 0 1 2 ]   [ 3 4 5 ]           rank 0, rank 1
    dst   [ 0 1 ] [ 2 3 ] [ 4 5 ]         rank 0, rank 1, rank 2
    routes  0->0: rows 0..1,  0->1: row 2 -> row 0,  1->1: row 0 -> row 1,  1->2: rows 1..2 -> rows 0..1
"""

from __future__ import annotations

from typing import NamedTuple

from .shard import ShardLayout


class Route(NamedTuple):
    """`length` rows along the sharded dim, which both layouts share; starts are rows of the local shards."""

    src_rank: int
    src_start: int
    dst_rank: int
    dst_start: int
    length: int

    def inverse(self) -> Route:
        """The same rows the other way."""
        return Route(self.dst_rank, self.dst_start, self.src_rank, self.src_start, self.length)


class BoxRoute(NamedTuple):
    """An n-dimensional box of `lengths` elements; starts are coordinates in the local (unpadded) shards."""

    src_rank: int
    src_starts: tuple[int, ...]
    dst_rank: int
    dst_starts: tuple[int, ...]
    lengths: tuple[int, ...]

    def inverse(self) -> BoxRoute:
        """The same box the other way."""
        return BoxRoute(self.dst_rank, self.dst_starts, self.src_rank, self.src_starts, self.lengths)


def routes(src: ShardLayout, dst: ShardLayout) -> tuple[Route, ...]:
    """Every non-empty overlap of a shard of `src` with one of `dst`, ordered by row of the full tensor.

    The lengths add up to the rows of the tensor: each row travels exactly once. At most
    `src.world + dst.world - 1` routes, found in one pass. Raises `ValueError` for different shapes or dims.

    >>> for route in routes(ShardLayout((6,), world=2), ShardLayout((6,), world=3)):
    ...     print(*route)
    0 0 0 0 2
    0 2 1 0 1
    1 0 1 1 1
    1 1 2 0 2
    """
    _same_shape(src, dst)
    if src.dim != dst.dim:
        raise ValueError(f"dim: expected equal dims, found {src.dim} and {dst.dim}; use box_routes")
    found: list[Route] = []
    row, rows = 0, src.shape[src.dim]
    while row < rows:
        src_rank, dst_rank = row // src.padded_rows, row // dst.padded_rows
        stop = min(src.start(src_rank) + src.rows(src_rank), dst.start(dst_rank) + dst.rows(dst_rank))
        found.append(Route(src_rank, row - src.start(src_rank), dst_rank, row - dst.start(dst_rank), stop - row))
        row = stop
    return tuple(found)


def box_routes(src: ShardLayout, dst: ShardLayout) -> tuple[BoxRoute, ...]:
    """Every non-empty overlap as an n-dimensional box; the dims of the two layouts may differ.

    Ordered by source rank, then destination rank. Raises `ValueError` for different shapes.

    >>> for route in box_routes(ShardLayout((2, 3), dim=0, world=2), ShardLayout((2, 3), dim=1, world=2)):
    ...     print(*route)
    0 (0, 0) 0 (0, 0) (1, 2)
    0 (0, 2) 1 (0, 0) (1, 1)
    1 (0, 0) 0 (1, 0) (1, 2)
    1 (0, 2) 1 (1, 0) (1, 1)
    """
    _same_shape(src, dst)
    if 0 in src.shape:
        return ()
    found: list[BoxRoute] = []
    for src_rank in range(src.world):
        for dst_rank in range(dst.world):
            src_box, dst_box = _box(src, src_rank), _box(dst, dst_rank)
            starts = tuple(max(a, b) for (a, _), (b, _) in zip(src_box, dst_box, strict=True))
            stops = tuple(min(a, b) for (_, a), (_, b) in zip(src_box, dst_box, strict=True))
            lengths = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
            if min(lengths) > 0:
                src_starts = tuple(start - box[0] for start, box in zip(starts, src_box, strict=True))
                dst_starts = tuple(start - box[0] for start, box in zip(starts, dst_box, strict=True))
                found.append(BoxRoute(src_rank, src_starts, dst_rank, dst_starts, lengths))
    return tuple(found)


def _box(layout: ShardLayout, rank: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) in every dim of the full tensor of what `rank` owns."""
    begin = layout.start(rank)
    return tuple(
        (begin, begin + layout.rows(rank)) if dim == layout.dim else (0, size) for dim, size in enumerate(layout.shape)
    )


def _same_shape(src: ShardLayout, dst: ShardLayout) -> None:
    if src.shape != dst.shape:
        raise ValueError(
            f"shape: expected two layouts of one tensor, found {src.shape} and {dst.shape}; "
            f"routes exist only between layouts of equal full shape"
        )
