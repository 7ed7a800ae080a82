"""The rows of one parameter that each rank owns, and the shards of one unit in a flat buffer: arithmetic, no tensors.

Every rank but the last ones owns the same number of rows of the sharded dim, as with `torch.chunk`.
Local buffers are padded to that number, so that one gather moves equal messages and its result, in rank
order, *is* the padded full tensor (for dim 0). Shape (5, 3) on 4 ranks, dim 0; `#` is an element, `.` is
padding:

    rank 0   # # #     rank 1   # # #     rank 2   # # #     rank 3   . . .
             # # #              # # #              . . .              . . .
    rows     2                  2                  1                  0        padded_rows 2 everywhere
    start    0                  2                  4                  5
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# ---- dtypes ----------------------------------------------------------------------------------------------------------
# How many bytes one element of a dtype takes, by the dtype's name: byte arithmetic without torch.
#
# Names are torch's own, with or without the `torch.` prefix, so `itemsize(str(tensor.dtype))` works.

_ITEMSIZES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}

# torch's aliases of the same dtypes.
_ALIASES: dict[str, str] = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "chalf": "complex32",
    "cfloat": "complex64",
    "cdouble": "complex128",
}


def known_dtypes() -> tuple[str, ...]:
    """The canonical names `itemsize` knows, sorted."""
    return tuple(sorted(_ITEMSIZES))


def itemsize(name: str) -> int:
    """Bytes of one element of dtype `name`.

    >>> itemsize("bfloat16"), itemsize("torch.float32"), itemsize("float8_e4m3fn")
    (2, 4, 1)

    Raises `ValueError` for a name that is not a whole-byte torch dtype.
    """
    short = name.removeprefix("torch.")
    nbytes = _ITEMSIZES.get(_ALIASES.get(short, short))
    if nbytes is None:
        raise ValueError(
            f"dtype: expected the name of a torch dtype of whole bytes, found {name!r}; "
            f"use one of {', '.join(known_dtypes())}"
        )
    return nbytes


# ---- shard -----------------------------------------------------------------------------------------------------------


def require_int(field: str, value: object, at_least: int, remedy: str) -> int:
    """`value` as an int of at least `at_least`, or a `ValueError` with `field`, the value and `remedy`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{field}: expected an int >= {at_least}, found {value!r}; {remedy}")
    return value


class Piece(NamedTuple):
    """The equal shards of neighbouring ranks as one strided region: in the full parameter, and in a message.

    A message holds the shards of the ranks one after another, each contiguous. In the full parameter a shard is
    `outer` runs of `block` elements, one for each index of the dims before the sharded one. Shape (2, 5) on 2 ranks,
    dim 1, where rank 0 has 3 columns and rank 1 the other 2; digits are ranks:

        full parameter    0 0 0 1 1          message    0 0 0 0 0 0 | 1 1 1 1 . .
                          0 0 0 1 1

    Ranks with a different number of rows form their own piece, so there are at most two pieces.
    """

    # The first rank, and the number of ranks.
    first_rank: int
    ranks: int
    # The number of runs per shard, and elements per run.
    outer: int
    block: int
    # The first element in the full parameter, the distance between the runs of neighbouring ranks, and the distance
    # between the runs of one rank.
    full_start: int
    full_rank_stride: int
    full_outer_stride: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sizes of the region: ranks, runs, elements."""
        return (self.ranks, self.outer, self.block)

    @property
    def full_strides(self) -> tuple[int, int, int]:
        """Strides of the region in the contiguous full parameter, where it begins at `full_start`."""
        return (self.full_rank_stride, self.full_outer_stride, 1)

    def message_strides(self, rank_stride: int) -> tuple[int, int, int]:
        """Strides of the region in a message in which every rank's part has `rank_stride` elements."""
        return (rank_stride, self.block, 1)


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """How one parameter of `shape` is split along `dim` over `world` ranks.

    >>> layout = ShardLayout((5, 3), world=4)
    >>> [layout.rows(rank) for rank in range(4)]
    [2, 2, 1, 0]
    >>> [layout.start(rank) for rank in range(4)]
    [0, 2, 4, 5]
    >>> layout.padded_local_shape, layout.padded_full_shape, layout.padding_numel
    ((2, 3), (8, 3), 9)

    The padding of the sharded dim is at most `world - 1` rows over all ranks, and it always comes after the owned
    rows. Two layouts are equal when shape, dim and world are.
    """

    # The shape of the full parameter, at least one dimension.
    shape: tuple[int, ...]
    # The sharded dim; a negative one counts from the end and is stored as its non-negative equal.
    dim: int = 0
    # The number of ranks that share the parameter.
    world: int = 1

    def __post_init__(self) -> None:
        shape = tuple(self.shape)
        if not shape:
            raise ValueError(
                "shape: expected at least one dimension to shard, found (); "
                "change the 0-dim parameter to a 1-dim tensor with one element"
            )
        for position, size in enumerate(shape):
            require_int(f"shape[{position}] of {shape}", size, 0, "give the sizes of the full parameter")
        require_int("world", self.world, 1, "give the number of ranks that share the parameter")
        dim = self.dim
        if isinstance(dim, bool) or not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
            raise ValueError(
                f"dim: expected an int in [{-len(shape)}, {len(shape) - 1}] for shape {shape}, "
                f"found {dim!r}; give a dimension that the parameter has"
            )
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dim", dim % len(shape))

    # ---- along the sharded dim, in rows -------------------------------------------------------------------

    @property
    def padded_rows(self) -> int:
        """Rows of every rank's padded shard: ceil(shape[dim] / world)."""
        return -(-self.shape[self.dim] // self.world)

    def start(self, rank: int) -> int:
        """First row of the full parameter that `rank` owns; shape[dim] for a rank past the end."""
        return min(self._checked(rank) * self.padded_rows, self.shape[self.dim])

    def rows(self, rank: int) -> int:
        """Rows that `rank` owns, without padding; 0 for a rank past the end."""
        return min(self.padded_rows, self.shape[self.dim] - self.start(rank))

    # ---- shapes -------------------------------------------------------------------------------------------

    @property
    def padded_local_shape(self) -> tuple[int, ...]:
        """Shape of every rank's shard with padding."""
        return self._with_rows(self.padded_rows)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the shard of `rank` without padding."""
        return self._with_rows(self.rows(rank))

    @property
    def padded_full_shape(self) -> tuple[int, ...]:
        """Shape of the parameter with dim made divisible by the world: all padded shards in order."""
        return self._with_rows(self.padded_rows * self.world)

    # ---- elements -----------------------------------------------------------------------------------------

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return math.prod(self.shape)

    @property
    def padded_local_numel(self) -> int:
        """Elements of every rank's shard with padding."""
        return math.prod(self.padded_local_shape)

    def local_numel(self, rank: int) -> int:
        """Elements that `rank` owns, without padding."""
        return math.prod(self.local_shape(rank))

    @property
    def padded_full_numel(self) -> int:
        """Elements of the padded full parameter: world * padded_local_numel."""
        return self.padded_local_numel * self.world

    @property
    def padding_numel(self) -> int:
        """Elements that exist only as padding, over all ranks; at most (world - 1) rows."""
        return self.padded_full_numel - self.numel

    # ---- memory -------------------------------------------------------------------------------------------

    @property
    def gathers_in_place(self) -> bool:
        """Whether the padded shards in rank order form the padded full parameter in memory.

        True for dim 0, and for a later dim if all dims before it have size 1. Otherwise a gather has to be copied out,
        piece by piece, because the shards of the ranks interleave in the full parameter.
        """
        return math.prod(self.shape[: self.dim]) == 1

    @property
    def full_memory_numel(self) -> int:
        """Elements of memory for the full parameter, with the padding of all ranks if a gather may arrive in it."""
        return self.padded_full_numel if self.gathers_in_place else self.numel

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The ranks that own padded_rows rows, then the one that owns fewer; none when there are no elements.

        >>> for piece in ShardLayout((2, 5), dim=1, world=2).pieces:
        ...     print(piece.first_rank, piece.sizes, piece.full_start, piece.full_strides)
        0 (1, 2, 3) 0 (3, 5, 1)
        1 (1, 2, 2) 3 (2, 5, 1)
        """
        if not self.numel:
            return ()
        outer, inner = math.prod(self.shape[: self.dim]), math.prod(self.shape[self.dim + 1 :])
        row = self.shape[self.dim] * inner
        ranks, rest = divmod(self.shape[self.dim], self.padded_rows)
        found, border = [], 0
        for first, count, rows in ((0, ranks, self.padded_rows), (ranks, 1, rest)):
            if rows:
                found.append(Piece(first, count, outer, rows * inner, border, rows * inner, row))
                border += count * rows * inner
        return tuple(found)

    def _with_rows(self, rows: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.world:
            raise ValueError(
                f"rank: expected 0 <= rank < {self.world} for shape {self.shape}, found {rank!r}; "
                f"give a rank of the group that shards the parameter, not a global one"
            )
        return rank


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor of `shape`.

    >>> contiguous_stride((4, 3, 2))
    (6, 2, 1)
    """
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * max(shape[dim + 1], 1)
    return tuple(stride)


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


# ---- secondary shards ------------------------------------------------------------------------------------------------
# The part of the full parameters that a rank keeps between forward and backward, for an integer
# `reshard_after_forward`.
#
# Rows of dim 0, as `torch.chunk` splits them over the k ranks of a block. Shape (5, 3) on 4 ranks in blocks of 2:
# shards have 2, 2, 1, 0 rows; ranks 0 and 2 keep rows 0 to 2, ranks 1 and 3 keep rows 3 and 4.
#
# A gather over the block fills the same memory as a gather over all ranks, so full parameters do not move. k padded
# parts never exceed the padded shards of all ranks when both are split along the same dim. So a parameter that is
# sharded along another dim is kept along that dim if the padded rows of dim 0 do not fit.


def secondary_layout(pack: FlatLayout, direct: Sequence[int], world: int) -> FlatLayout:
    """The flat layout of secondary shards over the `world` ranks of a block; its full offsets are those of `pack`.
    `direct`: the parameters that are gathered directly into place.

    >>> pack = FlatLayout.build([ShardLayout((5, 3), world=4)], align_numel=4)
    >>> kept = secondary_layout(pack, (0,), 2)
    >>> kept.segments[0].layout.local_shape(0), kept.padded_local_numel, kept.full_offsets == pack.full_offsets
    ((3, 3), 12, True)
    """
    layouts = [_kept(segment.layout, world) for segment in pack.segments]
    kept = FlatLayout.build(layouts, pack.align_numel, first=direct, names=[segment.name for segment in pack.segments])
    return dataclasses.replace(
        kept, full_offsets=pack.full_offsets, full_align_numel=pack.full_align_numel, full_numel=pack.full_numel
    )


def _kept(shards: ShardLayout, world: int) -> ShardLayout:
    rows = ShardLayout(shards.shape, 0, world)
    return rows if rows.full_memory_numel <= shards.full_memory_numel else ShardLayout(shards.shape, shards.dim, world)
