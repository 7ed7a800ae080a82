"""The shards of one unit in one flat rank-local buffer, and the shapes of the messages made of it (chunks.py).

Three parameters on 2 ranks, `align_numel` 4; one character is one element, `.` is padding of rows, `_` of
alignment:

    local buffer of a rank     aaaaaa__bbb.cccc          segments at 0, 8, 12; padded_local_numel 16
    gathered buffer            aaaaaa__bbb.ccccaaaaaa__bbb.cccc       rank-major: rank r starts at 16 * r
    one reduction message      aaaaaa__bbb.cccc110ffffffff_      per rank: a chunk of the same offsets, presence, facts
    with `a` direct                    bbb.cccc110ffffffff_      what is left of the chunk; `a` travels by itself

Everything is counted in elements, so the offsets are the same in storage, compute and reduce dtype. Every
list is indexed by the position of the parameter in the `layouts` given to `Pack.build`; `order` alone says
how the segments follow each other in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .shard import ShardLayout, require_int

# Vector loads, collectives and the views of other dtypes want the shards to begin at such addresses.
SEGMENT_ALIGN_NBYTES = 16


def align_numel(itemsizes: Iterable[int]) -> int:
    """Elements to which segments are aligned so that they begin at 16 bytes in every dtype in use.

    `itemsizes` are the bytes per element of storage, compute and reduce dtype; the smallest decides.

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

    # Position of the parameter in the list of layouts.
    index: int
    # First element in the flat local buffer.
    offset: int
    layout: ShardLayout
    # For errors and reports only.
    name: str

    @property
    def padded_numel(self) -> int:
        """Elements of the padded shard: the segment without what aligns the next one."""
        return self.layout.padded_local_numel

    @property
    def end(self) -> int:
        """First element behind the padded shard."""
        return self.offset + self.padded_numel

    def __str__(self) -> str:
        return f"{self.name} [{self.offset}, {self.end})"


@dataclass(frozen=True, slots=True)
class Pack:
    """Order and offsets (elements) of all shards of a unit in one flat local buffer; made by `build`.

    >>> pack = Pack.build([ShardLayout((4, 3), world=2), ShardLayout((3,), world=2)], align_numel=4)
    >>> [str(segment) for segment in pack.segments], pack.padded_local_numel, pack.gathered_numel
    (['0 [0, 6)', '1 [8, 10)'], 12, 24)
    >>> pack.gathered_segment(1, rank=1)
    20
    """

    # One per parameter, in the order of the given layouts: segments[i].index == i.
    segments: tuple[Segment, ...]
    # The indices as the segments follow each other in the buffer.
    order: tuple[int, ...]
    # Every offset and the total are multiples of this many elements.
    align_numel: int
    # Number of ranks, the same for all layouts.
    world: int
    # Elements of the flat local buffer, alignment and padding included.
    padded_local_numel: int
    # Where each parameter's full tensor (layout.full_memory_numel) begins in one buffer that holds all, by index.
    full_offsets: tuple[int, ...]
    # Every full offset and the full total are multiples of this many elements.
    full_align_numel: int
    # Elements of the buffer that holds all full tensors.
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
    ) -> Pack:
        """Lay the shards of `layouts` behind each other: the indices in `first`, then the others as given.

        `align_numel`: see the function of that name. `full_align_numel` (default 4 * align_numel, which is
        64 bytes in the smallest dtype) aligns the full tensors. `names` are for errors; default: the
        positions.
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
                f"order {self.order} and {len(self.full_offsets)} offsets; use Pack.build"
            )
        for index, segment in enumerate(self.segments):
            if segment.index != index:
                raise ValueError(f"segments[{index}]: expected index {index}, found {segment.index}; use Pack.build")
            if segment.layout.world != self.world:
                raise ValueError(
                    f"{segment.name}: expected world {self.world} as for the whole pack, found "
                    f"{segment.layout.world}; put parameters of different meshes into different packs"
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
        """Elements of the rank-major buffer that one gather of the whole pack fills."""
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
    """Aligned, ordered, disjoint, in bounds; `ranges` are (label, start, end) in memory order."""
    if total % alignment:
        raise ValueError(f"{total_name}: expected a multiple of {alignment}, found {total}; use Pack.build")
    previous_label, previous_end = "the beginning [0, 0)", 0
    for label, start, end in ranges:
        if start % alignment:
            raise ValueError(f"{label}: expected to begin at a multiple of {alignment}; use Pack.build")
        if start < previous_end:
            raise ValueError(f"{label}: expected to begin behind {previous_label}; use Pack.build")
        if end > total:
            raise ValueError(f"{label}: expected to end within {total_name} {total}; use Pack.build")
        previous_label, previous_end = label, end
