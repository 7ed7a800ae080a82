"""The headers of safetensors files, without torch. Our data files have this format, so any tool for it can read them.

    8 bytes: header length N, little-endian | N bytes: JSON {name: {dtype, shape, data_offsets}} | bytes of the tensors

The `safetensors` package writes dicts that are in memory as a whole. This code writes part after part and needs torch
alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .plan import Box, whole
from .table import TABLE_NAME

# The format's names of dtypes. Others are stored as bytes (U8, with the itemsize as a last dim); the manifest has their
# dtype.
DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


class HeaderEntry(NamedTuple):
    """A tensor in a file. `dtype` is the format's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class FilePart(NamedTuple):
    """A part of a tensor in one of our data files."""

    key: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    box: Box

    @property
    def entry(self) -> HeaderEntry:
        """The entry of the file's header."""
        name = name_of(self.key, self.shape, self.box)
        dtype, shape = DTYPE_NAMES.get(self.dtype), self.box.lengths
        if dtype is None:
            dtype, shape = "U8", (*shape, self.itemsize)
        return HeaderEntry(name, dtype, shape, self.box.numel * self.itemsize)


def name_of(key: str, shape: tuple[int, ...], box: Box) -> str:
    """The name of a part in a file: the key, followed by the part of the tensor if it is not all of it."""
    return key if box == whole(shape) else f"{key}{box}"


def file_order(parts: Sequence[FilePart]) -> list[int]:
    """The order of parts in a file: large elements first, so that each is aligned for its dtype."""
    return sorted(range(len(parts)), key=lambda i: (-parts[i].itemsize, parts[i].key, parts[i].box))


def header(entries: Iterable[HeaderEntry], metadata: Mapping[str, str]) -> bytes:
    """The head of a file that contains `entries` in this order. Its length is a multiple of 8.

    Raises `ValueError` if two of them have the same name in the file.
    """
    found: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for entry in entries:
        if entry.name in found:
            raise ValueError(f"{entry.name!r}: expected names that differ from each other and from __metadata__")
        span = [offset, offset + entry.nbytes]
        found[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": span}
        offset += entry.nbytes
    text = json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def data_header(parts: Sequence[FilePart], save_id: str, file_name: str, table_nbytes: int) -> bytes:
    """The head of one of our data files, whose table is the last of its tensors."""
    metadata = {"fullshard_save_id": save_id, "fullshard_file": file_name}
    table = HeaderEntry(TABLE_NAME, "U8", (table_nbytes,), table_nbytes)
    return header([*(part.entry for part in parts), table], metadata)


def save_id_of(head: bytes) -> str | None:
    """The save that a file belongs to by its own header; None if the header cannot be read."""
    try:
        found = json.loads(head[8:])["__metadata__"]["fullshard_save_id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else None
