"""The rows of one parameter that each rank owns: pure arithmetic, no tensors.

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

import math
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
