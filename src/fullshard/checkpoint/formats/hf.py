"""Hugging Face checkpoints: one safetensors file, or several with `model.safetensors.index.json`.

The `safetensors` package writes a dict of tensors that are all in memory at once. A sharded model is gathered tensor by
tensor, so the writer here announces all shapes first and then takes one tensor after another. The format is the same:
that package reads our files, and we read its.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..companions import write_files
from ..errors import CheckpointDamaged, CheckpointNotFound
from ..manifest import MAX_NBYTES, is_file_name, parse_json
from ..plan import Box, are_sizes, row_major
from ..safetensors import DTYPE_NAMES, HeaderEntry, header
from ..state import bytes_of, dtype_name, dtype_of, on_host
from .source import Source, TensorInfo, tensor_of

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DEFAULT_MAX_NBYTES = 50_000_000_000  # of a file, as in `save_pretrained` of transformers 5
_DTYPES = {code: name for name, code in DTYPE_NAMES.items()}
# Bytes of each tensor that a fingerprint reads, and of a part after which its pages are given back.
_SAMPLE, _LARGE = 512, 1 << 20
_EMPTY = -1  # the number of the memory of tensors without elements


# ---- one file ------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """The header's description of one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SafetensorsWriter:
    """Writes the announced tensors to `path`, in order; the file appears there only when all are written.

    Until then the bytes are in `path` + ".part", which is removed if the `with` block ends with an exception. Raises
    `ValueError` for a dtype that the format does not have.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> None:
        assert sys.byteorder == "little", "safetensors files are little-endian"
        self._path, self._part = path, path.with_name(path.name + ".part")
        self._waiting = list(reversed(entries))
        for entry in entries:
            if dtype_name(entry.dtype) not in DTYPE_NAMES:
                known = ", ".join(DTYPE_NAMES)
                raise ValueError(f"{entry.name} is {entry.dtype}: expected a dtype that safetensors has ({known})")
        described = [HeaderEntry(e.name, DTYPE_NAMES[dtype_name(e.dtype)], e.shape, e.nbytes) for e in entries]
        head = header(described, metadata or {})
        self._file = self._part.open("wb")
        self._file.write(head)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next announced tensor, on any device. The caller may then free or change `tensor`."""
        entry = self._waiting.pop()
        found = Entry(name, tensor.dtype, tuple(tensor.shape))
        if found != entry:
            raise ValueError(f"expected {entry} next, found {found}: write tensors in the announced order")
        self._file.write(bytes_of(on_host(tensor.detach())))

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
    """A mapped file, read in parts. Raises `CheckpointDamaged` (a `ValueError`) for an incomplete one."""

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
            # A private copy that is not written to: torch requires writable memory.
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._start = 8 + header_nbytes
        self._header = text
        # The tensors in ascending order of offsets, each with its offset.
        self.tensors = self._read_header(text, nbytes - self._start)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A part of a tensor, the whole by default, in separate memory on the CPU."""
        info, offset = self.tensors[name]
        made = tensor_of(self._data, info, box, self._start + offset, row_major(info.shape))
        if made.nbytes >= _LARGE:
            self._release()
        return made

    def _release(self) -> None:
        """Give back pages that were read, to the system's cache: else the memory of a load grows by the file."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._data.madvise(mmap.MADV_DONTNEED)

    def fingerprint(self) -> bytes:
        """A digest of the header and of some bytes from the middle of each tensor: equal for equal files, and
        different, all but surely, for other weights of the same model."""
        digest = hashlib.sha256(self._header)
        for info, offset in self.tensors.values():
            middle = self._start + offset + info.nbytes // 2
            digest.update(self._data[middle : min(middle + _SAMPLE, self._start + offset + info.nbytes)])
        self._release()
        return digest.digest()

    def _read_header(self, text: bytes, data_nbytes: int) -> dict[str, tuple[TensorInfo, int]]:
        """The tensors with their offsets, checked to fill the data without gap or overlap."""
        described = parse_json(text, f"{self.path}, its header")
        if not isinstance(described, dict):
            raise CheckpointDamaged(f"{self.path}: its header is not a table of tensors")
        described.pop("__metadata__", None)
        found, end = {}, 0
        for start, stop, info in sorted(self._entry(name, value) for name, value in described.items()):
            if (start, stop) != (end, end + info.nbytes):
                raise CheckpointDamaged(
                    f"{self.path}: {info.key} {info.shape} should be at bytes {end} to {end + info.nbytes}, "
                    f"not {start} to {stop}"
                )
            found[info.key] = info, start
            end = stop
        if end != data_nbytes:
            raise CheckpointDamaged(
                f"{self.path}: the header describes {end} bytes of tensors, the file has {data_nbytes}"
            )
        return found

    def _entry(self, name: str, value: Any) -> tuple[int, int, TensorInfo]:
        if not isinstance(value, dict):
            raise CheckpointDamaged(f"{self.path}: {name} is not described")
        dtype, shape, span = value.get("dtype"), value.get("shape"), value.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise CheckpointDamaged(f"{self.path}: {name} has dtype {dtype!r:.40}; known are {', '.join(_DTYPES)}")
        if not are_sizes(shape) or not are_sizes(span) or len(span) != 2:
            raise CheckpointDamaged(f"{self.path}: {name} has shape {shape!r:.80} at bytes {span!r:.80}")
        return span[0], span[1], TensorInfo((name,), _DTYPES[dtype], tuple(shape))


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of the file, on the CPU, owned by the caller. Raises `ValueError` for an incomplete file."""
    file = SafetensorsFile(path)
    return {name: file.read(name) for name in file.tensors}


# ---- a folder of files ---------------------------------------------------------------------------------------


class HfSource(Source):
    """A folder with an index or with one safetensors file, or such a file itself.

    Raises `CheckpointDamaged` unless index and files agree: every name of the index is in its file, every tensor of a
    file is in the index, and file names stay in the folder.
    """

    kind = "hf"

    def __init__(self, path: Path) -> None:
        self.path = path
        index = path / INDEX
        if index.is_file():
            where = self._indexed(index)
        else:
            file = path if path.is_file() else _only_file(path)
            only = SafetensorsFile(file)
            where = dict.fromkeys(only.tensors, only)
        self._where = where
        self.tensors = {name: file.tensors[name][0] for name, file in where.items()}
        self.values = {}

    @property
    def num_files(self) -> int:
        return len({file.path for file in self._where.values()})

    def read(self, key: str, box: Box | None = None) -> Tensor:
        return self._where[key].read(key, box)

    def fingerprint(self) -> str:
        """A digest by which ranks compare their files; reads half a KiB of each tensor."""
        files = {file.path: file for file in self._where.values()}
        return hashlib.sha256(b"".join(sorted(file.fingerprint() for file in files.values()))).hexdigest()

    def value(self, key: str) -> Any:
        raise KeyError(key)

    def close(self) -> None:
        self._where = {}

    def _indexed(self, index: Path) -> dict[str, SafetensorsFile]:
        if index.stat().st_size > MAX_NBYTES:
            raise CheckpointDamaged(f"{index}: larger than the {MAX_NBYTES:,} bytes that are read")
        found = parse_json(index.read_bytes(), str(index))
        weight_map = found.get("weight_map") if isinstance(found, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointDamaged(f"{index}: expected a weight_map of names to files")
        files: dict[str, SafetensorsFile] = {}
        for name in sorted(set(map(str, weight_map.values()))):
            if not is_file_name(name):
                raise CheckpointDamaged(
                    f"{index}: it refers to the file {name[:200]!r}: expected a plain file name in its folder"
                )
            path = index.with_name(name)
            if path.is_symlink() and path.resolve().parent != path.parent.resolve() and not _in_cache(path):
                raise CheckpointDamaged(f"{path} is a link out of its folder")
            if not path.is_file():
                raise CheckpointNotFound(f"{path}: the index names this file, which does not exist")
            files[name] = SafetensorsFile(path)
        problems = [f"{key}: not in {name}" for key, name in weight_map.items() if key not in files[name].tensors]
        for name, file in files.items():
            problems += [f"{key}: in {name}, not in the index" for key in file.tensors if weight_map.get(key) != name]
        if problems:
            raise CheckpointDamaged(f"{index} and the files do not match: {'; '.join(problems[:10])}")
        return {key: files[name] for key, name in weight_map.items()}


def _in_cache(path: Path) -> bool:
    """Whether a link belongs to Hugging Face's cache: `snapshots/<revision>/x` to `blobs/<hash>` of one repository."""
    folder = path.parent.resolve()
    return folder.parent.name == "snapshots" and path.resolve().parent == folder.parent.parent / "blobs"


def _only_file(folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    if (folder / SINGLE) in files:
        return folder / SINGLE
    if len(files) != 1:
        names = ", ".join(file.name for file in files[:5]) or "none"
        raise CheckpointNotFound(f"{folder}: expected {INDEX}, {SINGLE} or one .safetensors file, found {names}")
    return files[0]


def plan_files(
    entries: Sequence[Entry], max_nbytes: int, memory: Mapping[str, tuple[int, int]] | None = None
) -> list[list[Entry]]:
    """The tensors of each file, as `save_pretrained` distributes them: in order, as many as fit into `max_nbytes`; a
    larger one has a file of its own, before the file that is being filled. Tensors in one `memory` (its number and its
    bytes, by name) count as one, and so do all that have no elements.

    >>> sizes = dict(a=1, empty=0, larger=3, b=1, c=1, none=0)
    >>> [[e.name for e in f] for f in plan_files([Entry(n, torch.uint8, (s,)) for n, s in sizes.items()], 2)]
    [['larger'], ['a', 'empty', 'b', 'none'], ['c']]
    """
    if max_nbytes < 1:
        raise ValueError(f"max_nbytes: expected at least 1, found {max_nbytes}")
    files: list[list[Entry]] = []
    current: list[Entry] = []
    nbytes = 0
    of_memory: dict[int, list[Entry]] = {}
    for entry in entries:
        number, size = (memory or {}).get(entry.name, (None if entry.nbytes else _EMPTY, entry.nbytes))
        if number in of_memory:
            of_memory[number].append(entry)
            continue
        if size > max_nbytes:
            file = [entry]
            files.append(file)
        else:
            if current and nbytes + size > max_nbytes:
                files.append(current)
                current, nbytes = [], 0
            current.append(entry)
            nbytes += size
            file = current
        if number is not None:
            of_memory[number] = file
    return [*files, current] if current or not files else files


def write_hf(
    folder: Path,
    entries: Sequence[Entry],
    read: Callable[[str], Tensor],
    *,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    metadata: Mapping[str, str] | None = None,
    memory: Mapping[str, tuple[int, int]] | None = None,
) -> list[Path]:
    """Write `entries` to `folder`, in files of at most `max_nbytes` of tensors, with an index if there are several.

    `read(name)` is called once per tensor, in the order of `plan_files`, and its result is freed before the next: one
    tensor is in memory at a time. The files are written under other names and renamed at the end, the index last.
    Returns the files written. Raises `FileExistsError` if the folder already contains a model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taken = [name for name in (SINGLE, INDEX) if (folder / name).exists()]
    if taken:
        raise FileExistsError(f"{folder / taken[0]} exists: choose a folder without a model, or remove it first")
    planned = plan_files(entries, max_nbytes, memory)
    count = len(planned)
    names = [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    written = []
    with ExitStack() as undo:
        for name, part in zip(names, planned, strict=True):
            target = folder / f".{name}.new"
            undo.callback(target.unlink, missing_ok=True)
            with SafetensorsWriter(target, part, metadata) as file:
                for entry in part:
                    file.write(entry.name, read(entry.name))
        for name in names:
            os.replace(folder / f".{name}.new", folder / name)
            written.append(folder / name)
    if count > 1:
        weight_map = {entry.name: name for name, part in zip(names, planned, strict=True) for entry in part}
        index = {"metadata": {"total_size": sum(entry.nbytes for entry in entries)}, "weight_map": weight_map}
        part_file = folder / f".{INDEX}.new"
        part_file.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        os.replace(part_file, folder / INDEX)
        written.append(folder / INDEX)
    return written


def entries_of(source: Source) -> list[Entry]:
    """The tensors of a source as entries of a file; of tied ones the one that is kept."""
    infos = source.tensors.items()
    return [Entry(key, dtype_of(info.dtype), info.shape) for key, info in infos if key not in source.tied]


def order_of(source: Source, max_nbytes: int) -> list[str]:
    """The keys of `source` in the order in which `write_folder` reads them."""
    return [entry.name for file in plan_files(entries_of(source), max_nbytes, source.memory) for entry in file]


def write_folder(
    folder: Path,
    source: Source,
    read: Callable[[str], Tensor],
    companions: Mapping[str, bytes],
    *,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
) -> list[Path]:
    """`write_hf` of a source, and `companions`, whose configuration gets the dtype of the weights."""
    entries = entries_of(source)
    written = write_hf(folder, entries, read, max_nbytes=max_nbytes, metadata={"format": "pt"}, memory=source.memory)
    dtype = next((dtype_name(entry.dtype) for entry in entries if entry.dtype.is_floating_point), None)
    return written + write_files(folder, companions, dtype)
