"""Data files are safetensors files: any tool that knows the format reads them. Here: their headers, without torch.

    8 bytes: header length N, little-endian | N bytes: JSON {name: {dtype, shape, data_offsets}} | bytes of the tensors

The package of that name writes dicts that are in memory as a whole; we write part after part, and need torch alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from .plan import Box, whole

# What the format calls a dtype. Others are stored as their bytes (U8, with the itemsize as a last dim); the manifest
# knows what they are.
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


class Stored(NamedTuple):
    """A part of a tensor as it is put in a file."""

    key: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.itemsize

    @property
    def name(self) -> str:
        """In the file: the key, and which part of the tensor where it is not all of it."""
        return self.key if self.box == whole(self.shape) else f"{self.key}{self.box}"


def file_order(parts: Sequence[Stored]) -> list[int]:
    """In which order parts stand in a file: large elements first, so that each begins where its dtype may."""
    return sorted(range(len(parts)), key=lambda i: (-parts[i].itemsize, parts[i].key, parts[i].box))


def header(parts: Sequence[Stored], save_id: str, file_name: str) -> bytes:
    """The head of a file in which `parts` follow each other in this order. Its length is a multiple of 8.

    Raises `ValueError` where two parts would have one name in the file.
    """
    entries: dict[str, object] = {
        "__metadata__": {"format": "pt", "fullshard_save_id": save_id, "fullshard_file": file_name}
    }
    offset = 0
    for part in parts:
        if part.name in entries:
            raise ValueError(f"{part.name!r}: expected names that differ from each other and from __metadata__")
        dtype, shape = DTYPE_NAMES.get(part.dtype), list(part.box.lengths)
        if dtype is None:
            dtype, shape = "U8", [*shape, part.itemsize]
        entries[part.name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + part.nbytes]}
        offset += part.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def save_id_of(head: bytes) -> str | None:
    """The save that a file says it belongs to; None when its header cannot be read."""
    try:
        found = json.loads(head[8:])["__metadata__"]["fullshard_save_id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else None
