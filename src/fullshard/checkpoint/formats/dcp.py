"""Checkpoints of torch's DCP, read without unpickling: torchtitan's `step-N`, Composer's `ep{E}-ba{B}`, FSDP1 saved as
DTensor. They are written through DCP's own writer, one tensor in memory at a time.

`.metadata` is a pickle of DCP's dataclasses: the tensors, and the place of the bytes of each of their chunks.
`pickle_tree` reads it into notes, which become the plain tuples below. No object of torch is built, and nothing is
trusted: sizes, coverage and file names are checked before any file is opened."""

from __future__ import annotations

import os
import shutil
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from ...layout import known_dtypes
from ..errors import CheckpointDamaged, CheckpointError
from ..plan import Box, KeyPath, are_sizes, coverage_problem, overlap, whole
from ..state import dtype_of, nested
from .pickle_tree import Call, Name, read_pickle, show
from .source import ShardedTensorCheckpoint, Source, TensorInfo, mapped, place, refuse_flat_parameters, within
from .torch_file import ArchiveDamaged, TensorNote, TorchArchive

_METADATA_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed._shard.checkpoint.metadata")
_METADATA_CLASSES = (
    "Metadata MetadataIndex TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
    "StorageMeta _MEM_FORMAT_ENCODING"
).split()
# Where torch kept the classes until 2.2; only ShardedTensors and checkpoints of that age have them.
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_SHARDED_TENSOR_NAMES = (f"{_OLD}.TensorProperties", f"{_OLD}.MEM_FORMAT_ENCODING")
_ALLOWED = frozenset(
    [
        *(f"{module}.{name}" for module in _METADATA_MODULES for name in _METADATA_CLASSES),
        *(f"torch.{name}" for name in known_dtypes()),
        *_SHARDED_TENSOR_NAMES,
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.filesystem._StoragePrefix",
        "torch.distributed._shard.checkpoint.filesystem._StorageInfo",
        *("torch.Size", "torch.serialization._get_layout", "collections.OrderedDict", "collections.defaultdict"),
        "builtins.dict",  # the argument of a defaultdict
        "builtins.getattr",  # some Pythons pickle Enum members with it; like all calls it is noted, not made
        # `checkpoint_id` may be a path object.
        *(f"{module}.{kind}" for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "WindowsPath")),
    ]
)
_MAX_DIMS = 64  # torch's own limit
_MAX_NBYTES = 4 << 30  # of `.metadata`, which has about 100 MB for 500,000 chunks


class NotDcp(CheckpointDamaged):
    """A `.metadata` that DCP did not write."""


# ---- the contents of `.metadata` -----------------------------------------------------------------------------


class Span(NamedTuple):
    """A byte range of a file of the checkpoint: `length` bytes from `offset`, written by `torch.save`."""

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """A part of a tensor, and where it is."""

    box: Box
    span: Span


class DcpTensor(NamedTuple):
    dtype: str  # "float32"
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class DcpIndex(NamedTuple):
    """The contents of a `.metadata`, in file order. `paths`: the nested positions of keys before flattening."""

    tensors: dict[str, DcpTensor]
    values: dict[str, Span]
    paths: dict[str, KeyPath]


_Spans = dict[tuple[str, tuple[int, ...]], Span]


def index_of(data: bytes) -> DcpIndex:
    """The contents of a `.metadata`. Raises `PickleRefused`, `NotDcp` or `ShardedTensorCheckpoint`."""
    fields = _fields(read_pickle(data, _ALLOWED), "Metadata")
    table, places = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(table, dict) or not isinstance(places, dict):
        raise NotDcp("it has no table of tensors and their places; was it written by DCP's FileSystemWriter?")
    spans = _spans(places)
    index = DcpIndex({}, {}, _paths(fields.get("planner_data")))
    # DCP writes each chunk as a separate object, so there are fewer chunks than bytes. The limit stops the reading of a
    # file that repeats one list of chunks under many keys.
    left = len(data)
    for key, note in table.items():
        if not isinstance(key, str):
            raise NotDcp(f"a key of its table is a {type(key).__name__}, expected text")
        if _is(note, "BytesStorageMetadata"):
            index.values[key] = _span_of(spans, key, ())
            continue
        fields = _fields(note, "TensorStorageMetadata")
        chunks = fields.get("chunks")
        if not isinstance(chunks, list):
            raise NotDcp(f"{key} has no list of chunks")
        left -= len(chunks)
        if left < 0:
            raise NotDcp("it lists more chunks than it has bytes")
        index.tensors[key] = _tensor(key, fields, chunks, spans)
    return index


def _tensor(key: str, fields: dict[str, Any], notes: list[Any], spans: _Spans) -> DcpTensor:
    dtype, shape = _dtype(key, fields.get("properties")), _sizes(fields.get("size"), f"the shape of {key}")
    chunks = []
    for note in notes:
        chunk = _fields(note, "ChunkStorageMetadata")
        offsets, sizes = (_sizes(chunk.get(name), f"the {name} of a chunk of {key}") for name in ("offsets", "sizes"))
        chunks.append(Chunk(Box(offsets, sizes), _span_of(spans, key, offsets)))
    if problem := coverage_problem(shape, [chunk.box for chunk in chunks]):
        raise NotDcp(f"{key}: {problem}")
    return DcpTensor(dtype, shape, tuple(chunks))


def _spans(places: dict[Any, Any]) -> _Spans:
    found = {}
    for where, what in places.items():
        index, info = _fields(where, "MetadataIndex"), _fields(what, "_StorageInfo")
        key, offset = index.get("fqn"), index.get("offset")
        file, span = info.get("relative_path"), (info.get("offset"), info.get("length"))
        if not isinstance(key, str):
            raise NotDcp(f"a place in its table is for {show(key)}, expected the name of a tensor")
        if not isinstance(file, str) or not are_sizes(span):
            place = ", ".join(map(show, (file, *span)))
            raise NotDcp(f"the place of {key} is {place}: expected a file, an offset and a length")
        if info.get("transform_descriptors"):
            raise NotDcp(
                f"{key} was written through a DCP extension (for instance compression), which is "
                "not supported here. Load it with DCP and save it without extensions"
            )
        if not all(c.isascii() and (c.isalnum() or c in "._-") for c in file) or file[:1] in ("", ".") or file[200:]:
            raise NotDcp(f"it refers to the file {file[:200]!r}: expected a plain name in its own directory")
        found[key, () if offset is None else _sizes(offset, f"an offset of {key}")] = Span(file, *span)
    return found


def _span_of(spans: _Spans, key: str, offsets: tuple[int, ...]) -> Span:
    span = spans.get((key, offsets)) or (None if any(offsets) else spans.get((key, ())))
    if span is None:
        raise NotDcp(f"{key}: there is no file for its part at {list(offsets)}")
    return span


def _dtype(key: str, note: Any) -> str:
    if isinstance(note, Call) and note.name in _SHARDED_TENSOR_NAMES:
        raise ShardedTensorCheckpoint(
            f"{key} was saved as a ShardedTensor, or by torch 2.2 or older. Load it there, with FSDP1 on a "
            "`device_mesh` so that state dicts are of DTensors (torch 2.3 or newer reads both), and save it anew with "
            "torch.distributed.checkpoint"
        )
    if not _is(note, "TensorProperties") or not isinstance(note.state, tuple) or not note.state:
        raise NotDcp(f"{key} has no properties, so its dtype is unknown")
    dtype = note.state[0]
    if not isinstance(dtype, Name) or dtype.full.removeprefix("torch.") not in known_dtypes():
        raise NotDcp(f"{key}: its dtype is {show(dtype)}")
    return dtype.full.removeprefix("torch.")


def _paths(found: Any) -> dict[str, KeyPath]:
    """The nested positions of keys; empty if they are not known."""
    return {
        key: path
        for key, path in (found.items() if isinstance(found, dict) else ())
        if isinstance(key, str) and isinstance(path, tuple) and all(isinstance(part, str | int) for part in path)
    }


def _is(note: Any, kind: str) -> TypeGuard[Call]:
    return isinstance(note, Call) and note.name.rpartition(".")[2] == kind


def _fields(note: Any, kind: str) -> dict[str, Any]:
    """The fields of an instance of DCP's class `kind`."""
    if not _is(note, kind) or not isinstance(note.state, dict | None):
        raise NotDcp(f"found {show(note)}, expected a {kind}")
    return note.state or {}


def _sizes(note: Any, what: str) -> tuple[int, ...]:
    found = note.args[0] if isinstance(note, Call) and note.name == "torch.Size" and len(note.args) == 1 else note
    if not are_sizes(found) or len(found) > _MAX_DIMS:
        raise NotDcp(f"{what} is {show(found)}, expected sizes")
    return tuple(found)


# ---- reading -------------------------------------------------------------------------------------------------


class DcpSource(Source):
    """The directory `path` of a DCP checkpoint. Raises `CheckpointError` if it is none, or one that is rejected."""

    kind = "dcp"

    path: Path

    def __init__(self, path: Path) -> None:
        self.path, metadata = path, path / ".metadata"
        nbytes = metadata.stat().st_size
        if nbytes > _MAX_NBYTES:
            raise NotDcp(f"{metadata}: {nbytes:,} bytes of metadata, more than the {_MAX_NBYTES:,} that are read")
        try:
            self.index = index_of(metadata.read_bytes())
        except CheckpointError as error:
            raise type(error)(f"{metadata}: {error}") from None
        refuse_flat_parameters(path, self.index.tensors)
        paths = self.index.paths
        self.tensors = {
            key: TensorInfo(paths.get(key, (key,)), tensor.dtype, tensor.shape)
            for key, tensor in self.index.tensors.items()
        }
        self.values: dict[str, KeyPath] = {key: paths.get(key, (key,)) for key in self.index.values}

    def read(self, key: str, box: Box | None = None) -> Tensor:
        tensor = self.index.tensors[key]
        wanted = whole(tensor.shape) if box is None else box
        out = torch.empty(wanted.lengths, dtype=dtype_of(tensor.dtype))
        for chunk in tensor.chunks:
            common = overlap(wanted, chunk.box)
            if common is not None:
                archive, info = self._chunk(key, tensor.dtype, chunk)
                place(out, wanted, common).copy_(archive.tensor(info, within(chunk.box, common)))
        return out

    def value(self, key: str) -> Any:
        archive = self._archive(key, self.index.values[key])
        return archive.plain(archive.tree())

    def verify(self, progress: Callable[[str, int], object] | None = None) -> list[str]:
        """Check the checksums of every archive, and that every tensor matches the index."""
        archives = [
            (key, self._chunk(key, tensor.dtype, chunk)[0].has_checksums)
            for key, tensor in self.index.tensors.items()
            for chunk in tensor.chunks
        ]
        archives += [(key, self._archive(key, span).has_checksums) for key, span in self.index.values.items()]
        without = [key for key, has_checksums in archives if not has_checksums]
        found = ["`.metadata` itself has no checksum"]
        if without:
            found.append(f"{len(without)} entries were written without checksums ({without[0]}, ...)")
        return found

    def _chunk(self, key: str, dtype: str, chunk: Chunk) -> tuple[TorchArchive, TensorNote]:
        """The archive of a chunk, and its tensor."""
        archive = self._archive(key, chunk.span)
        note = archive.note(archive.tree())
        if note.info.shape != chunk.box.lengths or note.info.dtype != dtype:
            raise ArchiveDamaged(
                f"{archive.where}: expected {dtype} {list(chunk.box.lengths)}, as `.metadata` says, found "
                f"{note.info.dtype} {list(note.info.shape)}: the file belongs to another checkpoint"
            )
        return archive, note

    def _archive(self, key: str, span: Span) -> TorchArchive:
        path = self.path / span.file
        return TorchArchive(*mapped(path, span.offset, span.length), f"{path}, {key}")


# ---- writing -------------------------------------------------------------------------------------------------


class _Planner(DefaultSavePlanner):
    """Plans with tensors on the meta device, and reads each one when it is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        return self._read(write_item.index.fqn)


def write_dcp(folder: Path, source: Source, read: Callable[[str], Tensor]) -> list[Path]:
    """Write all of `source` as the DCP checkpoint `folder`, with its nesting. `read(key)` is called once per tensor.

    It is written to a temporary folder and renamed when complete. Raises `FileExistsError` if the folder is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} exists and is not empty: choose another folder")
    leaves: dict[KeyPath, Any] = {
        info.path: torch.empty(info.shape, dtype=dtype_of(info.dtype), device="meta")
        for info in source.tensors.values()
    }
    leaves |= {path: source.value(key) for key, path in source.values.items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            torch_dcp.save(nested(leaves), storage_writer=FileSystemWriter(part), planner=_Planner(read), no_dist=True)
        if folder.exists():
            folder.rmdir()
        os.rename(part, folder)
    except torch_dcp.api.CheckpointException as error:  # not an Exception: `except Exception` would miss it
        raise OSError(f"{folder} could not be written: {error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return sorted(folder.iterdir())
