"""The safetensors format, written and read one tensor at a time.

```
8 bytes: header length N, little-endian | N bytes: JSON {name: {dtype, shape, data_offsets}} | the tensors' bytes
```

The package `safetensors` writes a dict of tensors that are all in memory at once; a sharded model is gathered tensor by
tensor, so the writer here announces all shapes first and then takes one tensor after the other. Files are the
same format and can be read by that package, and the other way round.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_MAX_HEADER_NBYTES = 100_000_000  # the limit of the reference implementation


class Entry(NamedTuple):
    """What the header says about one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SafetensorsWriter:
    """Writes the announced tensors in order to `path`; the file appears there only when all were written.

    Until then the bytes are in `path` + ".part", which is removed when the `with` block ends by an exception.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> None:
        assert sys.byteorder == "little", "safetensors files are little-endian"
        self._path, self._part = path, path.with_name(path.name + ".part")
        self._waiting = list(reversed(entries))
        header: dict[str, object] = {"__metadata__": dict(metadata or {}, format="pt")}
        offset = 0
        for entry in entries:
            span = [offset, offset + entry.nbytes]
            header[entry.name] = {
                "dtype": _NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": span,
            }
            offset += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
        self._file = self._part.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """The next announced tensor, on any device. After return the caller may free or change `tensor`."""
        entry = self._waiting.pop()
        found = Entry(name, tensor.dtype, tuple(tensor.shape))
        if found != entry:
            raise ValueError(f"expected {entry} next, found {found}: write tensors in the order that was announced")
        data = tensor.detach().cpu().contiguous()
        if entry.nbytes:
            self._file.write((ctypes.c_char * entry.nbytes).from_address(data.data_ptr()))

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        if kind is None and not self._waiting:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._part, self._path)
            return
        self._file.close()
        self._part.unlink(missing_ok=True)
        if kind is None:
            raise ValueError(f"{len(self._waiting)} announced tensor(s) not written, next is {self._waiting[-1].name}")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of the file, on the CPU, owned by the caller. Raises `ValueError` for a file that is not whole."""
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        header_nbytes = int.from_bytes(file.read(8), "little")
        if nbytes < 8 or header_nbytes > min(nbytes - 8, _MAX_HEADER_NBYTES):
            raise ValueError(f"{path}: not a safetensors file: a header of {header_nbytes} bytes in {nbytes}")
        entries = _read_header(path, file.read(header_nbytes), nbytes - 8 - header_nbytes)
        if not entries:
            return {}
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors, offset = {}, 8 + header_nbytes
    for entry in entries:
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        if entry.nbytes:
            count = torch.Size(entry.shape).numel()
            tensor.copy_(torch.frombuffer(data, dtype=entry.dtype, count=count, offset=offset).view(entry.shape))
        tensors[entry.name] = tensor
        offset += entry.nbytes
    return tensors


def _read_header(path: Path, text: bytes, data_nbytes: int) -> list[Entry]:
    """The entries by rising offset: checked to fill the data without hole or overlap, before anything is allocated."""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        spans = sorted((tuple(v["data_offsets"]), name, v["dtype"], tuple(v["shape"])) for name, v in header.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: the safetensors header cannot be read: {error}") from None
    entries, offset = [], 0
    for span, name, dtype, shape in spans:
        if dtype not in _DTYPES:
            raise ValueError(f"{path}: {name} has dtype {dtype}; known are {', '.join(_DTYPES)}")
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"{path}: {name} has shape {shape}")
        entry = Entry(name, _DTYPES[dtype], shape)
        if span != (offset, offset + entry.nbytes):
            raise ValueError(
                f"{path}: {name} {shape} should be at bytes {offset} to {offset + entry.nbytes}, not {span}"
            )
        entries.append(entry)
        offset += entry.nbytes
    if offset != data_nbytes:
        raise ValueError(f"{path}: the header tells of {offset} bytes of tensors, the file has {data_nbytes}")
    return entries
