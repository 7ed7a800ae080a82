"""The safetensors format, written one tensor at a time and read one slice at a time.

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
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ..errors import CheckpointDamaged
from ..manifest import MAX_NBYTES, parse_json
from ..plan import Box, takes, whole
from ..safetensors import DTYPE_NAMES

_NAMES: dict[torch.dtype, str] = {getattr(torch, name): code for name, code in DTYPE_NAMES.items()}
_DTYPES = {code: dtype for dtype, code in _NAMES.items()}


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

    Until then the bytes are in `path` + ".part", which is removed when the `with` block ends by an exception. Raises
    `ValueError` for a dtype that the format does not have.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> None:
        assert sys.byteorder == "little", "safetensors files are little-endian"
        self._path, self._part = path, path.with_name(path.name + ".part")
        self._waiting = list(reversed(entries))
        header: dict[str, object] = {"__metadata__": dict(metadata or {}, format="pt")}
        offset = 0
        for entry in entries:
            if entry.dtype not in _NAMES:
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES)
                raise ValueError(f"{entry.name} is {entry.dtype}: expected a dtype that safetensors has ({known})")
            if entry.name in header:
                raise ValueError(f"{entry.name!r}: expected names that differ from each other and from __metadata__")
            span = [offset, offset + entry.nbytes]
            header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": span}
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
        try:
            if kind is None and not self._waiting:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                os.replace(self._part, self._path)
                return
        finally:
            self._file.close()
            self._part.unlink(missing_ok=True)
        if kind is None:
            raise ValueError(f"{len(self._waiting)} announced tensor(s) not written, next is {self._waiting[-1].name}")


class SafetensorsFile:
    """A file that is mapped, and read in parts. Raises `CheckpointDamaged` (a `ValueError`) for one that is not "
    "whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            header_nbytes = int.from_bytes(head, "little")
            if len(head) < 8 or header_nbytes > min(nbytes - 8, MAX_NBYTES):
                raise CheckpointDamaged(
                    f"{path}: not a safetensors file: a header of {header_nbytes} bytes in {nbytes}"
                )
            text = file.read(header_nbytes)
            # A private copy that nobody writes: torch wants memory that could be written.
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._start = 8 + header_nbytes
        self.metadata: dict[str, str] = {}
        self.entries = self._read_header(text, nbytes - self._start)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A part of a tensor, the whole by default, in memory of its own on the CPU."""
        entry, offset = self.entries[name]
        wanted = whole(entry.shape) if box is None else box
        out = torch.empty(wanted.lengths, dtype=entry.dtype)
        for take in takes(wanted, [whole(entry.shape)]):
            # Bytes are moved and then looked at as elements: those need not be aligned where they lie.
            size = entry.dtype.itemsize
            held = out.view(-1) if take.contiguous else torch.empty(take.stop - take.first, dtype=entry.dtype)
            start = self._start + offset + take.first * size
            source = torch.frombuffer(
                self._data, dtype=torch.uint8, count=(take.stop - take.first) * size, offset=start
            )
            held.view(torch.uint8).copy_(source)
            if not take.contiguous:
                out.copy_(held.as_strided(take.lengths, take.strides))
        return out

    def _read_header(self, text: bytes, data_nbytes: int) -> dict[str, tuple[Entry, int]]:
        """The entries by rising offset, with it: checked to fill the data without hole or overlap."""
        header = parse_json(text, f"{self.path}, its header")
        if not isinstance(header, dict):
            raise CheckpointDamaged(f"{self.path}: its header is no table of tensors")
        metadata = header.pop("__metadata__", {})
        if isinstance(metadata, dict):
            self.metadata = {key: value for key, value in metadata.items() if isinstance(value, str)}
        described = [self._entry(name, value) for name, value in header.items()]
        found, end = {}, 0
        for start, stop, entry in sorted(described, key=lambda item: item[:2]):
            if (start, stop) != (end, end + entry.nbytes):
                raise CheckpointDamaged(
                    f"{self.path}: {entry.name} {entry.shape} should be at bytes {end} to {end + entry.nbytes}, "
                    f"not {start} to {stop}"
                )
            found[entry.name] = entry, start
            end = stop
        if end != data_nbytes:
            raise CheckpointDamaged(
                f"{self.path}: the header tells of {end} bytes of tensors, the file has {data_nbytes}"
            )
        return found

    def _entry(self, name: str, value: Any) -> tuple[int, int, Entry]:
        if not isinstance(value, dict):
            raise CheckpointDamaged(f"{self.path}: {name} is not described")
        dtype, shape, span = value.get("dtype"), value.get("shape"), value.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise CheckpointDamaged(f"{self.path}: {name} has dtype {dtype!r:.40}; known are {', '.join(_DTYPES)}")
        if not _are_sizes(shape) or not _are_sizes(span) or len(span) != 2:
            raise CheckpointDamaged(f"{self.path}: {name} has shape {shape!r:.80} at bytes {span!r:.80}")
        return span[0], span[1], Entry(name, _DTYPES[dtype], tuple(shape))


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of the file, on the CPU, owned by the caller. Raises `ValueError` for a file that is not whole."""
    file = SafetensorsFile(path)
    return {name: file.read(name) for name in file.entries}


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 62 for n in value
    )
