"""Parts of a tensor as boxes: which part a rank holds, what two parts have in common, and ranges of a part's elements.

A tensor of shape (5, 3) on 4 ranks, dim 0, and the rows that rank 1 of 2 wants:

    held      rank 0  (0, 0) + (2, 3)      rank 1  (2, 0) + (2, 3)     rank 2  (4, 0) + (1, 3)     rank 3  nothing
    wanted    (3, 0) + (2, 3)              -> row 3 from the second box, row 4 from the third
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A part of a tensor, in elements; both tuples have an entry per dim, none for a 0-dim tensor."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.lengths)

    def __str__(self) -> str:
        """Writes the box in Python's notation: `[0:2, 3:5]`."""
        return f"[{', '.join(f'{o}:{o + n}' for o, n in zip(self.offsets, self.lengths, strict=True))}]"


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor of `shape`."""
    return Box((0,) * len(shape), tuple(shape))


def overlap(a: Box, b: Box) -> Box | None:
    """The intersection, in coordinates of the whole tensor; None if it is empty.

    >>> print(overlap(Box((0, 0), (2, 3)), Box((1, 1), (5, 5))))
    [1:2, 1:3]
    """
    offsets = tuple(map(max, a.offsets, b.offsets))
    stops = [min(p + n, q + m) for p, n, q, m in zip(*a, *b, strict=True)]
    lengths = tuple(stop - start for start, stop in zip(offsets, stops, strict=True))
    return Box(offsets, lengths) if all(n > 0 for n in lengths) else None


class Cut(NamedTuple):
    """The effect of one mesh axis on a tensor: it splits `dim`. `pieces`: the number of pieces that axes to its right
    made of that dim before (torch's `_StridedShard`); 1 for a plain `Shard`."""

    dim: int
    pieces: int = 1


def local_box(shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], cuts: Sequence[Cut | None]) -> Box:
    """The part of the rank at `coordinate` of a mesh of sizes `mesh`, split like `torch.chunk`; an axis with None
    replicates.

    >>> local_box((5, 3), (4,), (2,), [Cut(0)])
    Box(offsets=(4, 0), lengths=(1, 3))
    >>> local_box((8,), (2, 2), (0, 1), [Cut(0, pieces=2), Cut(0)])  # the right axis cut first
    Box(offsets=(4,), lengths=(2,))
    """
    offsets, lengths = [0] * len(shape), list(shape)
    for axis in cutting_order(mesh, cuts):
        cut = cuts[axis]
        assert cut is not None
        size = -(-lengths[cut.dim] // mesh[axis])
        start = min(size * coordinate[axis], lengths[cut.dim])
        offsets[cut.dim] += start
        lengths[cut.dim] = min(size, lengths[cut.dim] - start)
    return Box(tuple(offsets), tuple(lengths))


def cutting_order(mesh: Sequence[int], cuts: Sequence[Cut | None]) -> list[int]:
    """Axes in the order in which they split: from left to right, but one with `pieces` after those that made them."""
    order: list[int] = []
    for axis in reversed(range(len(cuts))):
        cut = cuts[axis]
        if cut is None:
            continue
        # Skip as many splits of the same dim as make up `pieces`; the others come later than this one.
        place, made = 0, 1
        while made < cut.pieces and place < len(order):
            other = cuts[order[place]]
            assert other is not None
            if other.dim == cut.dim:
                made *= mesh[order[place]]
            place += 1
        if made != cut.pieces:
            raise ValueError(f"axis {axis} splits dim {cut.dim} after {cut.pieces} pieces, but the others make {made}")
        order.insert(place, axis)
    return order


def positions(mesh: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The coordinates of a mesh of sizes `mesh`, in row-major order.

    >>> list(positions((2, 2)))
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    coordinate = [0] * len(mesh)
    for _ in range(math.prod(mesh)):
        yield tuple(coordinate)
        for axis in reversed(range(len(mesh))):
            coordinate[axis] += 1
            if coordinate[axis] < mesh[axis]:
                break
            coordinate[axis] = 0


def spans(lengths: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements [start, stop) of a part of `lengths`, counted in row-major order, as boxes in that order; at most two
    per dim and one more.

    >>> [str(box) for box in spans((3, 4), 2, 11)]
    ['[0:1, 2:4]', '[1:2, 0:4]', '[2:3, 0:3]']
    >>> [str(box) for box in spans((3, 4), 4, 12)]
    ['[1:3, 0:4]']
    """
    if start >= stop:
        return []
    if not lengths:
        return [Box((), ())]
    row = math.prod(lengths[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        return [_within(first, box) for box in spans(lengths[1:], start - first * row, stop - first * row)]
    found = list[Box]()
    if start > first * row:
        found += [_within(first, box) for box in spans(lengths[1:], start - first * row, row)]
        first += 1
    whole_rows = stop // row
    if whole_rows > first:
        found.append(Box((first, *(0,) * (len(lengths) - 1)), (whole_rows - first, *lengths[1:])))
    if stop > whole_rows * row:
        found += [_within(whole_rows, box) for box in spans(lengths[1:], 0, stop - whole_rows * row)]
    return found


def _within(row: int, box: Box) -> Box:
    return Box((row, *box.offsets), (1, *box.lengths))
