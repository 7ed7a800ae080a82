"""What DCP's `.metadata` says: which tensors there are, and where the bytes of each of their chunks lie.

The file is a pickle of DCP's dataclasses. It is read by `pickle_tree` into notes, and the notes become the plain
dataclasses below; nothing of torch's is made, and nothing is believed: sizes, coverage and file names are checked
before any file is opened.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from ..errors import CheckpointDamaged, CheckpointError
from ..plan import Box, coverage_problem
from .pickle_tree import Made, Name, read_pickle, show

Path_ = tuple[str | int, ...]  # where a flat key stood in the nested state dict: ("optimizer", "state", "w", "exp_avg")

_METADATA_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed._shard.checkpoint.metadata")
_METADATA_CLASSES = (
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_DTYPES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu "
    "int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex64 complex128"
).split()
# Where torch kept the class until 2.2; only ShardedTensors and what is as old as they are has it.
_SHARDED_TENSOR_PROPERTIES = "torch.distributed._shard.sharded_tensor.metadata.TensorProperties"
# With torch 2.2 and before, the encoding of a memory format was a class there as well.
_SHARDED_TENSOR_NAMES = (
    _SHARDED_TENSOR_PROPERTIES,
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
)
_ALLOWED = frozenset(
    [
        *(f"{module}.{name}" for module in _METADATA_MODULES for name in _METADATA_CLASSES),
        *(f"torch.{name}" for name in _DTYPES),
        *_SHARDED_TENSOR_NAMES,
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.filesystem._StoragePrefix",
        "torch.distributed._shard.checkpoint.filesystem._StorageInfo",
        "torch.Size",
        "torch.serialization._get_layout",
        "collections.OrderedDict",
        "collections.defaultdict",
        "builtins.dict",  # what a defaultdict names
        "builtins.getattr",  # how some Pythons pickle a member of an Enum; like all calls it is noted and not made
        # `checkpoint_id` may be a path object.
        *(f"{module}.{kind}" for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "WindowsPath")),
    ]
)

_MAX_DIMS = 64  # torch's own limit
_MAX_NBYTES = 4 << 30  # of a `.metadata`: one of 500,000 chunks has about 100 MB


class NotDcp(CheckpointDamaged):
    """A `.metadata` that is not what DCP writes."""


class ShardedTensorCheckpoint(CheckpointError):
    """A checkpoint of ShardedTensors, or from a torch as old as they are."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file of the checkpoint: `length` from `offset`. What is there was written by `torch.save`."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor, and where it is."""

    box: Box
    span: Span


@dataclass(frozen=True, slots=True)
class DcpTensor:
    dtype: str  # "float32"
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(slots=True)
class DcpIndex:
    """The whole of a `.metadata`, in the order of the file."""

    tensors: dict[str, DcpTensor] = field(default_factory=dict)
    values: dict[str, Span] = field(default_factory=dict)
    paths: dict[str, Path_] = field(default_factory=dict)

    def files(self) -> set[str]:
        spans = [chunk.span for tensor in self.tensors.values() for chunk in tensor.chunks]
        return {span.file for span in [*spans, *self.values.values()]}


def read_index(path: Path) -> DcpIndex:
    """Read a `.metadata` file. Raises `PickleRefused`, `NotDcp` or `ShardedTensorCheckpoint`, all of them "
    "`CheckpointError`."""
    nbytes = path.stat().st_size
    if nbytes > _MAX_NBYTES:
        raise NotDcp(f"{path}: {nbytes:,} bytes of metadata, more than the {_MAX_NBYTES:,} that are read")
    try:
        return index_of(path.read_bytes())
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from None


def index_of(data: bytes) -> DcpIndex:
    """`read_index` of the bytes of the file."""
    root = read_pickle(data, _ALLOWED)
    fields = _state(root, "Metadata")
    stored = fields.get("state_dict_metadata")
    places = fields.get("storage_data")
    if not isinstance(stored, dict) or not isinstance(places, dict):
        raise NotDcp("it has no table of tensors and of where they are; was it written by DCP's FileSystemWriter?")
    spans = _spans(places)
    index = DcpIndex(paths=_paths(fields.get("planner_data")))
    # Each chunk is an object of its own in what DCP writes, so there are fewer of them than bytes: a file that repeats
    # one list of chunks under many keys is not read to its end.
    left = len(data)
    for key, note in stored.items():
        if not isinstance(key, str):
            raise NotDcp(f"a key of its table is a {type(key).__name__}, expected text")
        if _is(note, "BytesStorageMetadata"):
            index.values[key] = _span_of(spans, key, ())
            continue
        fields = _state(note, "TensorStorageMetadata")
        found = fields.get("chunks")
        if not isinstance(found, list):
            raise NotDcp(f"{key} has no list of chunks")
        left -= len(found)
        if left < 0:
            raise NotDcp("it tells of more chunks than it has bytes")
        index.tensors[key] = _tensor(key, fields, found, spans)
    return index


def _tensor(
    key: str, fields: dict[str, Any], found: list[Any], spans: dict[tuple[str, tuple[int, ...]], Span]
) -> DcpTensor:
    dtype = _dtype(key, fields.get("properties"))
    shape = _sizes(fields.get("size"), f"the shape of {key}")
    chunks = []
    for note in found:
        chunk = _state(note, "ChunkStorageMetadata")
        offsets = _sizes(chunk.get("offsets"), f"the offsets of a chunk of {key}")
        sizes = _sizes(chunk.get("sizes"), f"the sizes of a chunk of {key}")
        chunks.append(Chunk(Box(offsets, sizes), _span_of(spans, key, offsets)))
    problem = coverage_problem(shape, [chunk.box for chunk in chunks])
    if problem is not None:
        raise NotDcp(f"{key}: {problem}")
    return DcpTensor(dtype, shape, tuple(chunks))


def _spans(places: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...]], Span]:
    found = {}
    for where, what in places.items():
        index, info = _state(where, "MetadataIndex"), _state(what, "_StorageInfo")
        key, offset = index.get("fqn"), index.get("offset")
        file, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(key, str):
            raise NotDcp(f"a place in its table is for {show(key)}, expected the name of a tensor")
        if not isinstance(file, str) or not _is_size(start) or not _is_size(length):
            raise NotDcp(
                f"the place of {key} is {show(file)}, {show(start)}, {show(length)}: expected a file, an offset and a "
                "length"
            )
        if info.get("transform_descriptors"):
            raise NotDcp(
                f"{key} was written through an extension of DCP (compression, for instance), which is "
                "not read here. Load it with DCP and save it without extensions"
            )
        check_file_name(file)
        found[key, () if offset is None else _sizes(offset, f"an offset of {key}")] = Span(file, start, length)
    return found


def check_file_name(name: str) -> None:
    """Raise `NotDcp` unless `name` is a plain name inside of the checkpoint's directory."""
    plain = all(c.isascii() and (c.isalnum() or c in "._-") for c in name)
    if not name or not plain or name.startswith(".") or len(name) > 200:
        raise NotDcp(f"it names the file {name[:200]!r}: expected a plain name in its own directory")


def _span_of(spans: dict[tuple[str, tuple[int, ...]], Span], key: str, offsets: tuple[int, ...]) -> Span:
    span = spans.get((key, offsets))
    if span is None:
        span = spans.get((key, ())) if not any(offsets) else None
    if span is None:
        raise NotDcp(f"{key}: there is no file for its part at {list(offsets)}")
    return span


def _dtype(key: str, note: Any) -> str:
    if isinstance(note, Made) and note.name in _SHARDED_TENSOR_NAMES:
        raise ShardedTensorCheckpoint(
            f"{key} was saved as a ShardedTensor, or by torch 2.2 or older. Load it there, with FSDP1 on a "
            "`device_mesh` so that "
            "state dicts are of DTensors (torch 2.3 or newer reads both), and save it anew with "
            "torch.distributed.checkpoint"
        )
    if not _is(note, "TensorProperties") or not isinstance(note.state, tuple) or not note.state:
        raise NotDcp(f"{key} has no properties, so its dtype is not known")
    dtype = note.state[0]
    if not isinstance(dtype, Name) or dtype.full.removeprefix("torch.") not in _DTYPES:
        raise NotDcp(f"{key}: its dtype is {show(dtype)}")
    return dtype.full.removeprefix("torch.")


def _paths(found: Any) -> dict[str, Path_]:
    """Where keys stood before they were made flat; nothing where it cannot be told."""
    if not isinstance(found, dict):
        return {}
    return {
        key: path
        for key, path in found.items()
        if isinstance(key, str) and isinstance(path, tuple) and all(isinstance(part, str | int) for part in path)
    }


def _is(note: Any, kind: str) -> bool:
    return isinstance(note, Made) and note.name.rpartition(".")[2] == kind


def _state(note: Any, kind: str) -> dict[str, Any]:
    """The fields of an instance of DCP's class `kind`."""
    if not _is(note, kind):
        raise NotDcp(f"found {show(note)}, expected a {kind}")
    if note.state is None:
        return {}
    if not isinstance(note.state, dict):
        raise NotDcp(f"a {kind} without fields")
    return note.state


def _sizes(note: Any, what: str) -> tuple[int, ...]:
    found = note.args[0] if isinstance(note, Made) and note.name == "torch.Size" and len(note.args) == 1 else note
    found = tuple(found) if isinstance(found, list | tuple) else found
    if not isinstance(found, tuple) or len(found) > _MAX_DIMS or not all(map(_is_size, found)):
        raise NotDcp(f"{what} is {show(found)}, expected sizes")
    return found


def _is_size(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
