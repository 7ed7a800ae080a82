"""The table at the end of each data file: where its parts are, and their checksums.

A reader finds a part by its name (that of the safetensors header: the key, and the box where it is not all of the
tensor) without reading the names of the others. Little-endian:

    u32 CRC-32 of the file's header | u32 number of parts
    u64 for each part: the digest of its name, ascending | u32 for each of them: its number in the file
    u64 for each part in the file, and one for their end: its first byte
    u32 for each block of each part, in the order of the file: a CRC-32

The manifest has the SHA-256 of the table, and so, by way of it, of every byte of the file. No torch, no files.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .errors import CheckpointDamaged

# Its name among the tensors of the file, as which the format of the file has it.
TABLE_NAME = "__fullshard_table__"


class Place(NamedTuple):
    """Where a part is in its file, in bytes, with the CRC-32 of each block."""

    start: int
    nbytes: int
    crcs: Sequence[int]


class Table:
    """The parts of one data file."""

    __slots__ = ("_blocks", "_crcs", "_digests", "_numbers", "_starts", "block_nbytes", "header_crc")

    def __init__(
        self,
        header_crc: int,
        digests: array[int],
        numbers: array[int],
        starts: array[int],
        crcs: array[int],
        block_nbytes: int,
    ) -> None:
        """`starts` has the end, too."""
        self.header_crc, self._digests, self._numbers = header_crc, digests, numbers
        self._starts, self._crcs, self.block_nbytes = starts, crcs, block_nbytes
        # Blocks before each part.
        self._blocks = array("Q", [0])
        for start, stop in zip(starts, starts[1:], strict=False):
            self._blocks.append(self._blocks[-1] + -(-(stop - start) // block_nbytes))

    @classmethod
    def of(
        cls, header_crc: int, names: Sequence[str], starts: Sequence[int], crcs: Sequence[int], block_nbytes: int
    ) -> Table:
        """The table of parts in the order of the file."""
        order = sorted((_digest(name), number) for number, name in enumerate(names))
        return cls(
            header_crc,
            array("Q", (digest for digest, _ in order)),
            array("I", (number for _, number in order)),
            array("Q", starts),
            array("I", crcs),
            block_nbytes,
        )

    @property
    def start(self) -> int:
        """The first byte of the first part."""
        return self._starts[0]

    @property
    def end(self) -> int:
        """The byte after the last part."""
        return self._starts[-1]

    @property
    def nbytes(self) -> int:
        """The memory that it takes, about."""
        return 32 * len(self._digests) + 4 * len(self._crcs)

    def __len__(self) -> int:
        return len(self._digests)

    def find(self, name: str) -> Place | None:
        """The part of that name."""
        digest = _digest(name)
        at = bisect_left(self._digests, digest)
        if at == len(self._digests) or self._digests[at] != digest:
            return None
        number = self._numbers[at]
        start, stop = self._starts[number], self._starts[number + 1]
        return Place(start, stop - start, self._crcs[self._blocks[number] : self._blocks[number + 1]])

    def places(self) -> list[Place]:
        """All parts, in the order of the file."""
        return [
            Place(start, stop - start, self._crcs[first:last])
            for start, stop, first, last in zip(
                self._starts, self._starts[1:], self._blocks, self._blocks[1:], strict=False
            )
        ]

    def to_bytes(self) -> bytes:
        head = array("I", [self.header_crc, len(self)])
        parts = [head, self._digests, self._numbers, self._starts, self._crcs]
        return b"".join(_swapped(part).tobytes() for part in parts)

    @classmethod
    def parse(cls, data: bytes, block_nbytes: int, where: str) -> Table:
        """The table that `to_bytes` wrote. Raises `CheckpointDamaged` for anything else; what it says of the file is
        not compared with the file."""
        head = _read("I", data[:8])
        count = head[1] if len(head) == 2 else 0
        bounds = [8, 8 + 8 * count, 8 + 12 * count, 16 + 20 * count]
        if len(data) < bounds[-1] or len(head) < 2 or (len(data) - bounds[-1]) % 4:
            raise CheckpointDamaged(f"{where}: expected a table of parts, found {len(data)} bytes")
        digests, numbers = _read("Q", data[bounds[0] : bounds[1]]), _read("I", data[bounds[1] : bounds[2]])
        starts, crcs = _read("Q", data[bounds[2] : bounds[3]]), _read("I", data[bounds[3] :])
        ascending = all(a < b for a, b in zip(digests, digests[1:], strict=False))
        if not ascending or sorted(numbers) != list(range(count)) or list(starts) != sorted(starts):
            raise CheckpointDamaged(f"{where}: expected a table of parts in order, found another one")
        made = cls(head[0], digests, numbers, starts, crcs, block_nbytes)
        if made._blocks[-1] != len(crcs):
            raise CheckpointDamaged(f"{where}: expected {made._blocks[-1]} checksums, found {len(crcs)}")
        return made


def nbytes_of(sizes: Sequence[int], block_nbytes: int) -> int:
    """The bytes of the table of parts of these sizes."""
    return 16 + 20 * len(sizes) + 4 * sum(-(-size // block_nbytes) for size in sizes)


class OldTable:
    """The parts of a data file of schema 1, as the manifest has them."""

    def __init__(self, header_crc: int, start: int, places: Mapping[str, Place]) -> None:
        self.header_crc, self.start, self._places = header_crc, start, places
        self.end = max((place.start + place.nbytes for place in places.values()), default=start)
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._places)

    def find(self, name: str) -> Place | None:
        return self._places.get(name)

    def places(self) -> list[Place]:
        return sorted(self._places.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OldTable) and self._places == other._places

    __hash__ = None  # type: ignore[assignment]


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _swapped(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values


def _read(code: str, data: bytes) -> array[int]:
    values: array[int] = array(code)
    values.frombytes(data[: len(data) // values.itemsize * values.itemsize])
    return _swapped(values)
