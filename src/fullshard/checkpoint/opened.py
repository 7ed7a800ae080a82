"""Reading and writing checkpoints in one process, tensor by tensor: for converters and tools.

Memory is bounded by the largest tensor, not by the checkpoint.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from torch import Tensor

from ..layout import itemsize
from . import checksums
from .directory import Saving
from .errors import CheckpointMismatch
from .files import Folder, WriteFile, doing
from .manifest import BLOCK_NBYTES, Chunk, FileEntry, Manifest, Path, TensorEntry, ValueEntry, key_of, parse, to_bytes
from .plan import Box, whole
from .reader import Reader
from .safetensors import Stored, header
from .saving import WRITER
from .tensors import bytes_of, dtype_name, on_host
from .tree import nested
from .values import Value, decode, encode

# A new data file begins behind so many bytes.
_FILE_NBYTES = 4 << 30


class Opened:
    """A checkpoint, open for reading by one process. Every byte that is returned was checked."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    @property
    def manifest(self) -> Manifest:
        return self.reader.manifest

    def tensor(self, key: str, box: Box | None = None) -> Tensor:
        """A stored tensor, or `box` of it: on the host, contiguous, owned by the caller. `KeyError` for no such key."""
        entry = self.manifest.tensors[key]
        return self.reader.read(entry, whole(entry.shape) if box is None else box)

    def value(self, key: str) -> Value:
        """What is stored under a key that is no tensor. `KeyError` for no such key."""
        return self.manifest.values[key].value

    def state_dict(self) -> dict[str, Any]:
        """All of it, nested as it was saved, with full tensors: for small checkpoints."""
        leaves: dict[Path, Any] = {entry.path: self.tensor(key) for key, entry in self.manifest.tensors.items()}
        leaves |= {entry.path: entry.value for entry in self.manifest.values.values()}
        return nested(leaves)

    def close(self) -> None:
        self.reader.close()

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorSpec(NamedTuple):
    """A tensor that is going to be written. `path`: in the nested state dict; `dtype`: torch's name, no `torch.`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


class CheckpointWriter:
    """Writes a checkpoint, full tensor after full tensor, and commits it when the `with` block ends without an error.

    Tensors are announced first, because a file begins with what is in it; they are written in that order. `values`: by
    path. Raises what `save` raises.
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str],
        tensors: Sequence[TensorSpec],
        values: Mapping[Path, Any] | None = None,
        *,
        file_nbytes: int = _FILE_NBYTES,
    ) -> None:
        self._path = os.path.abspath(os.fspath(checkpoint_id))
        self._specs = [TensorSpec(tuple(s.path), s.dtype, tuple(s.shape)) for s in tensors]
        self._values = {tuple(path): decode(encode(value)) for path, value in (values or {}).items()}
        keys = [key_of(path) for path in [*(spec.path for spec in self._specs), *self._values]]
        twice = sorted({key for key in keys if keys.count(key) > 1}) if len(set(keys)) != len(keys) else []
        if twice:
            raise CheckpointMismatch(f"saving {self._path}: expected each key once, found", twice)
        self._groups = _grouped(self._specs, file_nbytes)
        self._next = 0
        self._entries: dict[str, TensorEntry] = {}
        self._files: list[FileEntry] = []

    def __enter__(self) -> CheckpointWriter:
        self._saving = Saving.begin(self._path, uuid.uuid4().hex)
        self._file: WriteFile | None = None
        with Folder.open(self._path) as folder:
            self._folder = folder.sub(self._saving.name)
        return self

    def write(self, key: str, tensor: Tensor) -> None:
        """The next announced tensor, on any device; the caller may change it afterwards."""
        if self._next == len(self._specs):
            raise ValueError(f"expected no more than the announced tensors, found {key}")
        spec = self._specs[self._next]
        found = TensorSpec(spec.path, dtype_name(tensor.dtype), tuple(tensor.shape))
        if key != key_of(spec.path) or found != spec:
            raise ValueError(
                f"expected {key_of(spec.path)} {spec.dtype} {spec.shape} next, found {key} {found.dtype} {found.shape}"
            )
        self._next += 1
        chunks: tuple[Chunk, ...] = ()
        if tensor.numel():
            with doing(f"writing {key} to {self._path}"):
                chunks = (self._write(whole(spec.shape), bytes_of(on_host(tensor.detach()))),)
        self._entries[key] = TensorEntry(spec.path, spec.dtype, spec.shape, chunks)

    def _write(self, box: Box, data: memoryview) -> Chunk:
        if self._file is None:
            self._begin_file()
        assert self._file is not None
        start = self._file.nbytes
        crcs = self._file.write_summed(data, BLOCK_NBYTES)
        self._left -= 1
        chunk = Chunk(box, len(self._files), start, len(data), crcs)
        if not self._left:
            self._end_file()
        return chunk

    def _begin_file(self) -> None:
        specs = self._groups[len(self._files)]
        name = f"data-{len(self._files):05d}.safetensors"
        stored = [Stored(key_of(s.path), s.dtype, itemsize(s.dtype), s.shape, whole(s.shape)) for s in specs]
        self._head = header(stored, self._saving.save_id, name)
        self._name, self._left = name, len(specs)
        self._file = self._folder.writing(name)
        self._file.write(memoryview(self._head))

    def _end_file(self) -> None:
        assert self._file is not None
        self._file.sync()
        self._files.append(FileEntry(self._name, self._file.nbytes, len(self._head), checksums.crc32(self._head)))
        self._file.close()
        self._file = None

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                if self._next < len(self._specs):
                    left = [key_of(spec.path) for spec in self._specs[self._next :]]
                    raise CheckpointMismatch(f"saving {self._path}: expected what was announced, lacks", left)
                values = {key_of(path): ValueEntry(path, value) for path, value in self._values.items()}
                files = tuple(self._files)
                manifest = Manifest(self._saving.save_id, 1, WRITER, self._entries, values, files)
                data = to_bytes(manifest)
                parse(data, self._path)
                self._saving.commit(data)
        finally:
            if self._file is not None:
                self._file.close()
            self._folder.close()
            self._saving.end()


def _grouped(specs: Sequence[TensorSpec], file_nbytes: int) -> list[list[TensorSpec]]:
    """Which tensors share a file, in order; those without elements are in none."""
    groups: list[list[TensorSpec]] = []
    nbytes = file_nbytes
    for spec in specs:
        size = whole(spec.shape).numel * itemsize(spec.dtype)
        if not size:
            continue
        if nbytes + size > file_nbytes:
            groups.append([])
            nbytes = 0
        groups[-1].append(spec)
        nbytes += size
    return groups
