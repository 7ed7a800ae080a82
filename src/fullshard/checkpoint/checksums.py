"""CRC-32 of blocks of bytes, by the fastest code that is installed.

The package isal (the extra `checkpoint`) multiplies polynomials on the processor: some 12 GiB/s from memory and 80 from
the cache where zlib does 2. The numbers are the same, so whatever one of them wrote the other one reads.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from .errors import CheckpointDamaged
from .manifest import blocks_of

Buffer = memoryview


def _fastest() -> tuple[Callable[[bytes | bytearray | memoryview], int], bool]:
    try:
        from isal.isal_zlib import crc32
    except ImportError:
        return zlib.crc32, False
    return crc32, True


# Both leave the interpreter to other threads meanwhile. FAST: a small part of what writing the same bytes takes.
crc32, FAST = _fastest()


def of_blocks(buffer: Buffer, block_nbytes: int) -> tuple[int, ...]:
    """The CRC-32 of each block of `buffer`, the last one shorter."""
    return tuple(crc32(buffer[i : i + block_nbytes]) for i in range(0, len(buffer), block_nbytes))


def compare(buffer: Buffer, expected: Sequence[int], block_nbytes: int, where: str, start: int) -> None:
    """Raise `CheckpointDamaged` unless `buffer`, from byte `start` of the file `where`, has the checksums expected."""
    assert len(expected) == blocks_of(len(buffer), block_nbytes)
    for index, crc in enumerate(of_blocks(buffer, block_nbytes)):
        if crc != expected[index]:
            first = start + index * block_nbytes
            last = min(first + block_nbytes, start + len(buffer))
            raise CheckpointDamaged(
                f"{where}: bytes {first} to {last} are not those that were saved (checksum {expected[index]:08x} "
                f"expected, {crc:08x} found); load an older checkpoint, or restore this file"
            )
