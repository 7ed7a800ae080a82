"""The messages of one gradient reduction: what of each gradient goes where in the send buffer. Counts are elements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .nodes import NodeGrid, SlotGrid, flat_grids
from .pack import Pack, align_up

# Elements at the end of each chunk for what ranks compare: 64 bits, eight in each as a number from 0 to 255, which all
# floating dtypes have exactly, and whose sums are finite.
FACTS_NUMEL = 8


class SendGap(NamedTuple):
    """A grid of elements of the send buffer that nothing is written to."""

    sizes: tuple[int, ...]
    start: int
    strides: tuple[int, ...]


class SendRegion(NamedTuple):
    """A part of one full gradient whose place in the send buffer is a grid of equal `sizes`. Elements."""

    sizes: tuple[int, ...]
    full_start: int
    full_strides: tuple[int, ...]
    start: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReduceLayout:
    """The chunks of one gradient reduction, (world, chunk_numel), one for each receiving rank, and how they travel.

    A chunk has the offsets of the pack, followed by one presence element per parameter: 1 where this rank
    produced a gradient for it, else 0. So the presence of each gradient travels with the message: the
    message has the same size whatever gradients a rank has, ranks cannot disagree on it, and after the
    reduction a parameter got a gradient somewhere exactly when its presence is not 0 (a sum or an average
    of zeros and ones, in any float dtype). After presence a chunk has room for a digest that ranks compare on
    arrival (comm/comparison.py), whether it carries one or not.

    The gradients of `direct` parameters are sent from where autograd put them, each as a message of its own.
    The rest of the chunks, presence always among it, is *the* message, with a send buffer (world, message_numel). Its
    chunks are in rank order, or as `grid` has them (layout/nodes.py).

    >>> from fullshard.layout import ShardLayout
    >>> pack = Pack.build([ShardLayout((4, 3), world=2), ShardLayout((3,), world=2)], align_numel=4)
    >>> layout = ReduceLayout(pack)
    >>> layout.presence_offset, layout.chunk_numel, layout.numel
    (12, 24, 48)
    >>> ReduceLayout(pack, direct=(0,)).message_start, ReduceLayout(pack, direct=(0,)).numel
    (8, 32)
    """

    # The parameters whose gradients are reduced together: of trainable parameters, if some are frozen.
    pack: Pack
    # The first ones of `pack.order`; each gathers in place, so the parts of the ranks are runs of the whole gradient.
    direct: tuple[int, ...] = ()
    # Of a reduction in two hops; None: in one.
    grid: NodeGrid | None = None
    # Elements for what ranks compare; 0 where the backend sums messages, so that nobody sees what each rank sent.
    facts_numel: int = FACTS_NUMEL

    def __post_init__(self) -> None:
        if self.grid is not None and self.grid.world != self.pack.world:
            raise ValueError(
                f"grid: expected {self.pack.world} ranks in all, found {self.grid.nodes} times {self.grid.local}; "
                f"use node_grid"
            )
        front = self.pack.order[: len(self.direct)]
        if self.direct != front:
            raise ValueError(
                f"direct: expected the first indices of the pack's order {self.pack.order}, found {self.direct}; "
                f"build the pack with first=direct"
            )
        for index in self.direct:
            segment = self.pack.segments[index]
            if not segment.layout.gathers_in_place:
                raise ValueError(
                    f"direct: expected parameters whose shards are runs of their memory, found {segment.name}, cut "
                    f"along dim {segment.layout.dim} of {segment.layout.shape}; leave it in the message"
                )

    @property
    def presence_offset(self) -> int:
        """First presence element in a chunk; aligned, because the pack's total is."""
        return self.pack.padded_local_numel

    @property
    def facts_offset(self) -> int:
        """First of the `facts_numel` elements in a chunk that ranks compare."""
        return self.presence_offset + len(self.pack.segments)

    @property
    def chunk_numel(self) -> int:
        """Elements of what one rank gets: its part of every gradient, presence, and what is compared."""
        return align_up(self.facts_offset + self.facts_numel, self.pack.align_numel)

    @property
    def packed(self) -> tuple[int, ...]:
        """The parameters whose gradients are in the message, in buffer order."""
        return self.pack.order[len(self.direct) :]

    @property
    def message_start(self) -> int:
        """First element of a chunk that is in the message."""
        return self.pack.segments[self.packed[0]].offset if self.packed else self.presence_offset

    @property
    def message_numel(self) -> int:
        """Elements of the message for one rank."""
        return self.chunk_numel - self.message_start

    @property
    def numel(self) -> int:
        """Elements of the whole send buffer."""
        return self.pack.world * self.message_numel

    def unwritten(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The ranges [start, stop) of a chunk that neither the message nor a direct gradient of `rank` writes: padding.

        >>> from fullshard.layout import ShardLayout
        >>> pack = Pack.build([ShardLayout((4, 3), world=2), ShardLayout((3,), world=2)], align_numel=4)
        >>> ReduceLayout(pack, direct=(0,)).unwritten(0)
        ((6, 8),)
        """
        found = []
        for place, index in enumerate(self.direct):
            segment = self.pack.segments[index]
            start = segment.offset + segment.layout.local_numel(rank)
            after = place + 1
            stop = self.pack.segments[self.direct[after]].offset if after < len(self.direct) else self.message_start
            if start < stop:
                found.append((start, stop))
        return tuple(found)

    def regions(self, index: int) -> tuple[SendRegion, ...]:
        """The gradient of packed parameter `index`: which parts of it, as it lies contiguous in memory, go where.

        >>> from fullshard.layout import ShardLayout
        >>> pack = Pack.build([ShardLayout((8,), world=4)], align_numel=1)
        >>> ReduceLayout(pack, grid=NodeGrid(2, 2)).regions(0)[0][:3]
        ((2, 2, 1, 2), 0, (4, 2, 8, 1))
        """
        offset, chunk = self.pack.segments[index].offset - self.message_start, self.message_numel
        found = []
        for piece in self.pack.segments[index].layout.pieces:
            for grid in self._grids(piece.first_rank, piece.ranks):
                found.append(
                    SendRegion(
                        (*grid.sizes, piece.outer, piece.block),
                        piece.full_start + (grid.first_rank - piece.first_rank) * piece.full_rank_stride,
                        (*(n * piece.full_rank_stride for n in grid.rank_strides), piece.full_outer_stride, 1),
                        grid.slot * chunk + offset,
                        (*(n * chunk for n in grid.slot_strides), piece.block, 1),
                    )
                )
        return tuple(found)

    def gaps(self) -> tuple[SendGap, ...]:
        """What neither the gradients of `regions` nor presence fill: alignment, the padding of uneven rows, and what is
        compared, which not every message carries.

        >>> from fullshard.layout import ShardLayout
        >>> pack = Pack.build([ShardLayout((4, 3), world=2), ShardLayout((3,), world=2)], align_numel=4)
        >>> [(gap.sizes, gap.start) for gap in ReduceLayout(pack).gaps()]
        [((2, 2), 6), ((2, 2), 10), ((1, 1), 33), ((2, 10), 14)]
        """
        chunk, world = self.message_numel, self.pack.world
        found = []

        def add(first: int, ranks: int, start: int, stop: int) -> None:
            """[start, stop) of the chunks of these ranks."""
            if ranks and start < stop:
                for grid in self._grids(first, ranks):
                    strides = (*(n * chunk for n in grid.slot_strides), 1)
                    found.append(
                        SendGap((*grid.sizes, stop - start), grid.slot * chunk + start - self.message_start, strides)
                    )

        starts = [self.pack.segments[index].offset for index in self.packed] + [self.presence_offset]
        for index, after in zip(self.packed, starts[1:], strict=True):
            segment = self.pack.segments[index]
            add(0, world, segment.end, after)
            full = 0
            for piece in segment.layout.pieces:
                numel = piece.outer * piece.block
                add(piece.first_rank, piece.ranks, segment.offset + numel, segment.end)
                full = piece.first_rank + piece.ranks
            add(full, world - full, segment.offset, segment.end)
        add(0, world, self.facts_offset, self.chunk_numel)
        return tuple(found)

    def _grids(self, first: int, ranks: int) -> Iterator[SlotGrid]:
        return (flat_grids if self.grid is None else self.grid.grids)(first, ranks)

    def segment(self, index: int, rank: int) -> int:
        """First element, in the send buffer, of the gradient of packed parameter `index` that goes to `rank`."""
        if index in self.direct:
            raise ValueError(f"index: expected one of the packed parameters {self.packed}, found {index!r}")
        return self._message(rank) + self.pack.segments[index].offset - self.message_start

    def presence(self, index: int, rank: int) -> int:
        """The presence element of parameter `index`, in the send buffer, of the message to `rank`."""
        if not 0 <= index < len(self.pack.segments):
            raise ValueError(f"index: expected 0 <= index < {len(self.pack.segments)}, found {index!r}")
        return self._message(rank) + self.presence_offset - self.message_start + index

    def _message(self, rank: int) -> int:
        if not 0 <= rank < self.pack.world:
            raise ValueError(f"rank: expected 0 <= rank < {self.pack.world}, found {rank!r}; give a rank of the group")
        return (rank if self.grid is None else self.grid.slot(rank)) * self.message_numel
