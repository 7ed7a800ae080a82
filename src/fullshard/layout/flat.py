"""The flat layout of one unit: its shards in one rank-local buffer, and the messages built from that buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .shard import ShardLayout, require_int

# ---- flat layout -----------------------------------------------------------------------------------------------------
# The shards of one unit in one flat rank-local buffer, and the shapes of the messages built from it.
#
# Three parameters on 2 ranks, `align_numel` 4; one character is one element, `.` is padding of rows, `_` of
# alignment:
#
#     local buffer of a rank     aaaaaa__bbb.cccc          segments at 0, 8, 12; padded_local_numel 16
#     gathered buffer            aaaaaa__bbb.ccccaaaaaa__bbb.cccc       rank-major: rank r starts at 16 * r
#     one reduction message      aaaaaa__bbb.cccc110ffffffff_     per rank: a chunk with these offsets, flags, facts
#     with `a` direct                    bbb.cccc110ffffffff_      the rest of the chunk; `a` travels by itself
#
# Everything is counted in elements, so the offsets are the same in storage, compute and reduce dtype. Every
# list is indexed by the position of the parameter in the `layouts` given to `FlatLayout.build`; only `order` gives
# the order of the segments in memory.

# Shards start at multiples of this, for vector loads, collectives and views in other dtypes.
SEGMENT_ALIGN_NBYTES = 16


def align_numel(itemsizes: Iterable[int]) -> int:
    """Elements to which segments are aligned so that they start at 16-byte boundaries in every dtype in use.

    `itemsizes` are the bytes per element of the storage, compute and reduce dtypes; the smallest decides.

    >>> align_numel([4, 2, 4])
    8
    """
    sizes = tuple(itemsizes)
    if not sizes:
        raise ValueError("itemsizes: expected at least one, found none; give the bytes per element of each dtype")
    for size in sizes:
        if size not in (1, 2, 4, 8, 16):
            raise ValueError(f"itemsizes: expected each in 1, 2, 4, 8, 16, found {sizes}; use layout.itemsize(dtype)")
    return SEGMENT_ALIGN_NBYTES // min(sizes)


def align_up(numel: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `numel`."""
    return -(-numel // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Segment:
    """Where one parameter's padded shard lies in the flat local buffer."""

    # The position of the parameter in the list of layouts.
    index: int
    # The first element in the flat local buffer.
    offset: int
    layout: ShardLayout
    # A name for errors and reports only.
    name: str

    @property
    def padded_numel(self) -> int:
        """Elements of the padded shard, without the padding that aligns the next segment."""
        return self.layout.padded_local_numel

    @property
    def end(self) -> int:
        """First element after the padded shard."""
        return self.offset + self.padded_numel

    def __str__(self) -> str:
        return f"{self.name} [{self.offset}, {self.end})"


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Order and offsets (elements) of all shards of a unit in one flat local buffer; made by `build`.

    >>> pack = FlatLayout.build([ShardLayout((4, 3), world=2), ShardLayout((3,), world=2)], align_numel=4)
    >>> [str(segment) for segment in pack.segments], pack.padded_local_numel, pack.gathered_numel
    (['0 [0, 6)', '1 [8, 10)'], 12, 24)
    >>> pack.gathered_segment(1, rank=1)
    20
    """

    # The segments, one per parameter in the order of the given layouts: segments[i].index == i.
    segments: tuple[Segment, ...]
    # The indices in the order of the segments in the buffer.
    order: tuple[int, ...]
    # Every offset and the total are multiples of this many elements.
    align_numel: int
    # The number of ranks, the same for all layouts.
    world: int
    # The elements of the flat local buffer, alignment and padding included.
    padded_local_numel: int
    # The start of each parameter's full tensor (layout.full_memory_numel) in one buffer for all of them, by index.
    full_offsets: tuple[int, ...]
    # Every full offset and the full total are multiples of this many elements.
    full_align_numel: int
    # The elements of the buffer for all full tensors.
    full_numel: int

    @classmethod
    def build(
        cls,
        layouts: Sequence[ShardLayout],
        align_numel: int,
        *,
        first: Sequence[int] = (),
        names: Sequence[str] | None = None,
        full_align_numel: int | None = None,
    ) -> FlatLayout:
        """Lay out the shards of `layouts` one after another: the indices in `first`, then the others in their order.

        `align_numel`: see the function of that name. `full_align_numel` aligns the full tensors (default: 4 *
        align_numel, 64 bytes in the smallest dtype). `names` appear in errors (default: the positions).
        """
        if not layouts:
            raise ValueError("layouts: expected at least one, found none; a unit without parameters has no pack")
        require_int("align_numel", align_numel, 1, "use layout.align_numel(itemsizes)")
        full_align = 4 * align_numel if full_align_numel is None else full_align_numel
        require_int("full_align_numel", full_align, 1, "give the alignment of full tensors in elements")
        labels = tuple(map(str, range(len(layouts)))) if names is None else tuple(names)
        if len(labels) != len(layouts):
            raise ValueError(f"names: expected {len(layouts)}, one per layout, found {len(labels)}; give all or none")
        front = tuple(first)
        if len(set(front)) != len(front) or not set(front) <= set(range(len(layouts))):
            raise ValueError(
                f"first: expected distinct indices in [0, {len(layouts)}), found {front}; "
                f"give positions in the list of layouts"
            )
        taken = frozenset(front)
        order = (*front, *(index for index in range(len(layouts)) if index not in taken))
        offsets, full_offsets = [0] * len(layouts), [0] * len(layouts)
        local_total = full_total = 0
        for index in order:
            offsets[index], full_offsets[index] = local_total, full_total
            local_total = align_up(local_total + layouts[index].padded_local_numel, align_numel)
            full_total = align_up(full_total + layouts[index].full_memory_numel, full_align)
        segments = tuple(Segment(index, offsets[index], layout, labels[index]) for index, layout in enumerate(layouts))
        return cls(
            segments=segments,
            order=order,
            align_numel=align_numel,
            world=layouts[0].world,
            padded_local_numel=local_total,
            full_offsets=tuple(full_offsets),
            full_align_numel=full_align,
            full_numel=full_total,
        )

    def __post_init__(self) -> None:
        count = len(self.segments)
        require_int("align_numel", self.align_numel, 1, "use layout.align_numel(itemsizes)")
        require_int("full_align_numel", self.full_align_numel, 1, "give the alignment of full tensors in elements")
        if sorted(self.order) != list(range(count)) or len(self.full_offsets) != count:
            raise ValueError(
                f"order, full_offsets: expected each of {count} indices once and {count} offsets, found "
                f"order {self.order} and {len(self.full_offsets)} offsets; use FlatLayout.build"
            )
        for index, segment in enumerate(self.segments):
            if segment.index != index:
                raise ValueError(
                    f"segments[{index}]: expected index {index}, found {segment.index}; use FlatLayout.build"
                )
            if segment.layout.world != self.world:
                raise ValueError(
                    f"{segment.name}: expected world {self.world} as for the whole flat layout, found "
                    f"{segment.layout.world}; put parameters of different meshes into different flat layouts"
                )
        _prove_ranges(
            [(str(self.segments[i]), self.segments[i].offset, self.segments[i].end) for i in self.order],
            self.align_numel,
            self.padded_local_numel,
            "padded_local_numel",
        )
        full = [(self.segments[i], self.full_offsets[i]) for i in self.order]
        _prove_ranges(
            [
                (
                    f"full {s.name} [{start}, {start + s.layout.full_memory_numel})",
                    start,
                    start + s.layout.full_memory_numel,
                )
                for s, start in full
            ],
            self.full_align_numel,
            self.full_numel,
            "full_numel",
        )

    @property
    def gathered_numel(self) -> int:
        """Elements of the rank-major buffer that one gather of the whole flat layout fills."""
        return self.world * self.padded_local_numel

    @property
    def numel(self) -> int:
        """Elements of all full parameters, without any padding."""
        return sum(segment.layout.numel for segment in self.segments)

    def local_numel(self, rank: int) -> int:
        """Elements that `rank` owns, without any padding."""
        return sum(segment.layout.local_numel(rank) for segment in self.segments)

    def gathered_segment(self, index: int, rank: int) -> int:
        """First element, in the rank-major gathered buffer, of the shard of parameter `index` from `rank`."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank: expected 0 <= rank < {self.world}, found {rank!r}; give a rank of the group")
        return rank * self.padded_local_numel + self.segments[index].offset


def _prove_ranges(ranges: list[tuple[str, int, int]], alignment: int, total: int, total_name: str) -> None:
    """Check that `ranges`, (label, start, end) in memory order, are aligned, ordered, disjoint and in bounds."""
    if total % alignment:
        raise ValueError(f"{total_name}: expected a multiple of {alignment}, found {total}; use FlatLayout.build")
    previous_label, previous_end = "the beginning [0, 0)", 0
    for label, start, end in ranges:
        if start % alignment:
            raise ValueError(f"{label}: expected to begin at a multiple of {alignment}; use FlatLayout.build")
        if start < previous_end:
            raise ValueError(f"{label}: expected to begin after {previous_label}; use FlatLayout.build")
        if end > total:
            raise ValueError(f"{label}: expected to end within {total_name} {total}; use FlatLayout.build")
        previous_label, previous_end = label, end


# ---- chunks ----------------------------------------------------------------------------------------------------------
# The messages of one gradient reduction: where each part of a gradient goes in the send buffer. Counts are elements.

# Elements at the end of each chunk for the facts that ranks compare: 64 bits, eight per element as a number from 0 to
# 255. Every floating dtype represents these numbers exactly, and their sums are finite.
FACTS_NUMEL = 8


class SendRegion(NamedTuple):
    """A part of one full gradient and its place in the send buffer: a strided grid of equal `sizes`, in elements."""

    sizes: tuple[int, ...]
    full_start: int
    full_strides: tuple[int, ...]
    start: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class ReduceLayout:
    """The chunks of one gradient reduction, (world, chunk_numel), one per receiving rank, and how they travel.

    A chunk has the offsets of the flat layout, followed by one grad-present flag per parameter: 1 if this rank
    produced a gradient for it, else 0. The flags travel inside the message, so the message has the same size
    whichever gradients a rank has, and ranks cannot disagree on it. After the reduction a parameter has a
    gradient on some rank exactly when its flag is not 0 (a sum or an average of zeros and ones, in any
    float dtype). After the flags, every chunk reserves room for a digest that ranks compare on arrival
    (comm/comparison.py).

    Gradients of `direct` parameters are sent from where autograd put them, each as its own message.
    The rest of the chunks, always including the flags, is *the* message; its send buffer is (world, message_numel).

    >>> from fullshard.layout import ShardLayout
    >>> pack = FlatLayout.build([ShardLayout((4, 3), world=2), ShardLayout((3,), world=2)], align_numel=4)
    >>> layout = ReduceLayout(pack)
    >>> layout.grad_present_offset, layout.chunk_numel, layout.numel
    (12, 24, 48)
    >>> ReduceLayout(pack, direct=(0,)).message_start, ReduceLayout(pack, direct=(0,)).numel
    (8, 32)
    """

    # The parameters whose gradients are reduced together: the trainable ones, if some are frozen.
    pack: FlatLayout
    # The first ones of `pack.order`. Each gathers in place, so a rank's part is one run of the full gradient.
    direct: tuple[int, ...] = ()
    # The elements for the facts that ranks compare; 0 where the backend sums messages: no rank sees another's facts.
    facts_numel: int = FACTS_NUMEL

    def __post_init__(self) -> None:
        front = self.pack.order[: len(self.direct)]
        if self.direct != front:
            raise ValueError(
                f"direct: expected the first indices of the order {self.pack.order}, found {self.direct}; "
                f"build the flat layout with first=direct"
            )
        for index in self.direct:
            segment = self.pack.segments[index]
            if not segment.layout.gathers_in_place:
                raise ValueError(
                    f"direct: expected parameters whose shards are contiguous in memory, found {segment.name}, cut "
                    f"along dim {segment.layout.dim} of {segment.layout.shape}; leave it in the message"
                )

    @cached_property
    def grad_present_offset(self) -> int:
        """First grad-present flag in a chunk; aligned, because the flat layout's total is."""
        return self.pack.padded_local_numel

    @cached_property
    def facts_offset(self) -> int:
        """First of the `facts_numel` elements of a chunk that ranks compare."""
        return self.grad_present_offset + len(self.pack.segments)

    @cached_property
    def chunk_numel(self) -> int:
        """Elements that one rank receives: its part of every gradient, flags, and the facts that ranks compare."""
        return align_up(self.facts_offset + self.facts_numel, self.pack.align_numel)

    @cached_property
    def packed(self) -> tuple[int, ...]:
        """The parameters whose gradients are in the message, in buffer order."""
        return self.pack.order[len(self.direct) :]

    @cached_property
    def message_start(self) -> int:
        """First element of a chunk that is in the message."""
        return self.pack.segments[self.packed[0]].offset if self.packed else self.grad_present_offset

    @cached_property
    def message_numel(self) -> int:
        """Elements of the message for one rank."""
        return self.chunk_numel - self.message_start

    @cached_property
    def numel(self) -> int:
        """Elements of the whole send buffer."""
        return self.pack.world * self.message_numel

    def unwritten(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The ranges [start, stop) of a chunk that neither the message nor a direct gradient of `rank` writes: padding.

        >>> from fullshard.layout import ShardLayout
        >>> pack = FlatLayout.build([ShardLayout((4, 3), world=2), ShardLayout((3,), world=2)], align_numel=4)
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

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """The ranges [start, stop) of every rank's part of the message that, for some rank, neither a gradient nor a
        flag is written to. The facts are among them, because not every message carries any.

        Below: the third row of rank 0, which rank 1 lacks; the alignment of the second parameter, and of the flags.

        >>> from fullshard.layout import ShardLayout
        >>> pack = FlatLayout.build([ShardLayout((5, 3), world=2), ShardLayout((4,), world=2)], align_numel=4)
        >>> ReduceLayout(pack, facts_numel=0).padding
        ((6, 12), (14, 16), (18, 20))
        """
        segments = [self.pack.segments[index] for index in self.packed]
        # The last rank has the fewest elements of each.
        fewest = [(segment.offset, segment.layout.local_numel(self.pack.world - 1)) for segment in segments]
        written = [*fewest, (self.grad_present_offset, len(self.pack.segments))]
        starts = [*(offset for offset, _ in written[1:]), self.chunk_numel]
        pairs = [(offset + numel, start) for (offset, numel), start in zip(written, starts, strict=True)]
        return tuple((a - self.message_start, b - self.message_start) for a, b in pairs if a < b)

    def regions(self, index: int) -> tuple[SendRegion, ...]:
        """The regions of the contiguous gradient of packed parameter `index`, with their places in the send buffer.

        >>> from fullshard.layout import ShardLayout
        >>> pack = FlatLayout.build([ShardLayout((8,), world=4)], align_numel=1)
        >>> ReduceLayout(pack).regions(0)[0][:3]
        ((4, 1, 2), 0, (2, 8, 1))
        """
        offset, chunk = self.pack.segments[index].offset - self.message_start, self.message_numel
        return tuple(
            SendRegion(
                (piece.ranks, piece.outer, piece.block),
                piece.full_start,
                (piece.full_rank_stride, piece.full_outer_stride, 1),
                piece.first_rank * chunk + offset,
                (chunk, piece.block, 1),
            )
            for piece in self.pack.segments[index].layout.pieces
        )

    def segment(self, index: int, rank: int) -> int:
        """First element, in the send buffer, of the gradient of packed parameter `index` that goes to `rank`."""
        if index in self.direct:
            raise ValueError(f"index: expected one of the packed parameters {self.packed}, found {index!r}")
        return self._message(rank) + self.pack.segments[index].offset - self.message_start

    def grad_present(self, index: int, rank: int) -> int:
        """The grad-present flag of parameter `index` in the send buffer, in the message to `rank`."""
        if not 0 <= index < len(self.pack.segments):
            raise ValueError(f"index: expected 0 <= index < {len(self.pack.segments)}, found {index!r}")
        return self._message(rank) + self.grad_present_offset - self.message_start + index

    def _message(self, rank: int) -> int:
        if not 0 <= rank < self.pack.world:
            raise ValueError(f"rank: expected 0 <= rank < {self.pack.world}, found {rank!r}; give a rank of the group")
        return rank * self.message_numel
