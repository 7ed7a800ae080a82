"""Files of `torch.save`: full state dicts read through `weights_only`, and only if the caller allows it explicitly;
archives read without loading; and archives written, one tensor in memory at a time.

An archive is a zip file with a pickle, in which each tensor refers to a storage by number, and the storages' bytes.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...layout import itemsize, known_dtypes
from ..errors import CheckpointDamaged, CheckpointError
from ..files import crc32
from ..plan import Box, KeyPath, are_sizes, whole
from ..state import bytes_of, dtype_of, holds_tensor, nested, on_host
from .names import with_names
from .pickle_tree import Call, Name, PickleRefused, Reference, read_pickle, show
from .source import LeavesSource, ShardedTensorCheckpoint, Source, TensorInfo, refuse_flat_parameters, tensor_of

# torch's classes for storages. Newer dtypes have none: their tensors are rebuilt from bytes, with the dtype stored
# beside them.
_STORAGES = dict(
    zip(
        "Double Float Half BFloat16 Long Int Short Char Byte Bool ComplexFloat ComplexDouble".split(),
        "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128".split(),
        strict=True,
    )
)
_TENSOR = "torch._utils._rebuild_tensor_v2"
_TENSOR_V3 = "torch._utils._rebuild_tensor_v3"
_PARAMETER = "torch._utils._rebuild_parameter"
_BYTES = "_codecs.encode"  # how protocol 2 spells bytes
_SETS = ("builtins.set", "__builtin__.set")
_ALLOWED = frozenset(
    [
        *(f"torch.{name}Storage" for name in _STORAGES),
        *(f"torch.{name}" for name in known_dtypes()),
        *("torch.storage.UntypedStorage", _TENSOR, _TENSOR_V3, _PARAMETER, _BYTES, "torch.Size", "torch.device"),
        *("collections.OrderedDict", "collections.defaultdict", "builtins.dict", *_SETS),
    ]
)
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor"
_DTENSOR = {f"torch.distributed.{name}.DTensor" for name in ("tensor", "_tensor.api", "_tensor")}
_MAX_DEPTH = 64
_MAX_PICKLE = 1 << 30


class TorchSaveRefused(CheckpointError):
    """A file of `torch.save` that is not read."""


class ArchiveDamaged(CheckpointDamaged):
    """An archive that is not whole, or whose bytes are not those that were written."""


# ---- whole files, through torch ------------------------------------------------------------------------------


class TorchSource(LeavesSource):
    """The file `path`, mapped into memory, so that unused parts are not read.

    `allow`: False rejects every such file. They are pickles; torch's `weights_only` reader only builds tensors and
    plain values, but it has had flaws that let a file run code. `optimizer_names`: the names for the parameter
    numbers of the file's optimizers (`names.with_names`). Raises `TorchSaveRefused`, `ShardedTensorCheckpoint` for one
    rank's part of a sharded state, and `CheckpointMismatch` for names that do not fit.
    """

    kind = "torch"

    def __init__(self, path: Path, *, allow: bool, optimizer_names: Sequence[str] | None = None) -> None:
        names = names_in(path)
        if any(name.startswith(_SHARDED_TENSOR) for name in names):
            raise ShardedTensorCheckpoint(
                f"{path} holds ShardedTensors: one rank's part of a SHARDED_STATE_DICT of FSDP1. Load the files of all "
                "ranks with the program and the number of ranks that wrote them, and save with "
                "torch.distributed.checkpoint"
            )
        if names & _DTENSOR:
            raise TorchSaveRefused(
                f"{path} holds DTensors: one rank's rows of a sharded state dict. Save with fullshard.checkpoint or "
                "torch.distributed.checkpoint, which write all ranks' rows, or gather it first (full_tensor)"
            )
        if not allow:
            raise TorchSaveRefused(
                f"{path} was written by torch.save: a pickle. If you trust its source, allow it explicitly "
                "(allow_torch_save=True, --allow-torch-save); it is read through weights_only"
            )
        try:
            root = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except Exception as error:
            first = str(error).strip().split("\n")[0]
            raise TorchSaveRefused(f"{path} cannot be read through weights_only: {first}") from None
        if not isinstance(root, dict):
            raise TorchSaveRefused(f"{path}: expected a state dict, found a {type(root).__name__}")
        super().__init__(path, leaves(with_names(root, optimizer_names, path)))
        refuse_flat_parameters(path, self.tensors)


class _Everything(set[str]):
    """A set that claims to contain everything, and records the lookups."""

    def __contains__(self, name: object) -> bool:
        self.add(str(name))
        return True


def names_in(path: Path) -> frozenset[str]:
    """The names that the pickle of a `torch.save` file mentions, without running it; empty for the format before torch
    1.6."""
    found = _Everything()
    if not zipfile.is_zipfile(path):
        return frozenset()
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [info for info in archive.infolist() if info.filename.rpartition("/")[2] == "data.pkl"]
            if len(pickles) != 1 or pickles[0].file_size > _MAX_PICKLE:
                raise CheckpointDamaged(f"{path}: a zip archive, but not one of torch.save")
            read_pickle(archive.read(pickles[0]), found)
    except (zipfile.BadZipFile, NotImplementedError, OSError) as error:
        raise CheckpointDamaged(f"{path}: {error}") from None
    except PickleRefused:
        pass  # an unknown opcode: the names before it are the result
    return frozenset(found)


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Tensors and plain values of a nested state dict: dicts with string keys are descended, and lists that contain
    tensors.

    >>> [path for path, _ in leaves({"a": {"b": 1}, "c": [1, 2]})]
    [('a', 'b'), ('c',)]
    """
    if isinstance(value, dict) and (value or not path) and all(isinstance(key, str) for key in value):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list | tuple) and holds_tensor(value):
        for i, item in enumerate(value):
            yield from leaves(item, (*path, i))
    else:
        yield path, value


# ---- archives, without loading -------------------------------------------------------------------------------


class TensorNote(NamedTuple):
    """A tensor as described by the pickle: `strides` in elements, from element `start` of the storage `key` on."""

    key: str
    info: TensorInfo
    start: int
    strides: tuple[int, ...]


class TorchArchive:
    """The archive in `data` from byte `begin` to the end; its checksums are verified first. `pickle_tree` reads the
    pickle, so none of it is run, and only the requested part of a storage is copied. `where`: its name in errors.
    Raises `ArchiveDamaged`."""

    def __init__(self, data: mmap.mmap, begin: int, where: str) -> None:
        self._data, self._begin, self.where = memoryview(data), begin, where
        try:
            infos = zipfile.ZipFile(data).infolist()  # type: ignore[call-overload]  # a map reads, seeks and tells
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
            raise ArchiveDamaged(f"{where}: not written by torch.save, or damaged: {error}") from None
        pickles = [info.filename for info in infos if info.filename.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise ArchiveDamaged(f"{where}: expected one data.pkl in it, found {len(pickles)}")
        prefix = pickles[0].removesuffix("data.pkl")
        # False: written without checksums (`torch.serialization.set_crc32_options(False)`).
        self.has_checksums = any(info.CRC for info in infos)
        self._records = {info.filename.removeprefix(prefix): self._record(info) for info in infos}
        self._left = 0  # the number of values that `plain` may still build
        if bytes(self._records.get("byteorder", b"little")) != b"little":
            raise ArchiveDamaged(f"{where}: it was written on a big-endian machine, which is not supported")

    def _record(self, info: zipfile.ZipInfo) -> memoryview:
        """The bytes of one file of the archive, not copied."""
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise ArchiveDamaged(
                f"{self.where}: {info.filename} is compressed or encrypted, which torch.save never does"
            )
        head = self._data[info.header_offset :][:30]
        # Another archive may precede `begin`; `zipfile` finds that one if the end of this one is damaged.
        if info.header_offset < self._begin or len(head) < 30 or bytes(head[:4]) != b"PK\x03\x04":
            raise ArchiveDamaged(f"{self.where}: {info.filename} does not begin where the archive says")
        start = info.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        record = self._data[start : start + info.file_size]
        if len(record) < info.file_size:
            raise ArchiveDamaged(f"{self.where}: {info.filename} reaches beyond the archive")
        if self.has_checksums and crc32(record) != info.CRC:
            raise ArchiveDamaged(
                f"{self.where}: the bytes of {info.filename} do not have the checksum that was written with them "
                f"({info.CRC:08x}): the file was damaged"
            )
        return record

    def tree(self) -> Any:
        """The pickle, with notes instead of calls."""
        data = self._records["data.pkl"]
        self._left = 16 * len(data) + 1000
        try:
            return read_pickle(data, _ALLOWED)
        except PickleRefused as error:
            raise PickleRefused(f"{self.where}: {error}") from None

    def note(self, found: Any) -> TensorNote:
        """The tensor that a note of the tree describes. Raises `ArchiveDamaged` if it is not a readable tensor."""
        if isinstance(found, Call) and found.name == _PARAMETER and found.args:
            found = found.args[0]
        with_dtype = isinstance(found, Call) and found.name == _TENSOR_V3 and len(found.args) > 6
        if not with_dtype and not (isinstance(found, Call) and found.name == _TENSOR and len(found.args) > 3):
            raise ArchiveDamaged(f"{self.where}: expected a tensor, found {show(found)}")
        storage, start, shape, strides = found.args[:4]
        if not isinstance(storage, Reference) or not isinstance(storage.key, tuple) or len(storage.key) != 5:
            raise ArchiveDamaged(f"{self.where}: a tensor without a storage")
        kind, key = found.args[6] if with_dtype else storage.key[1], storage.key[2]
        dtype = kind.full.removeprefix("torch.") if isinstance(kind, Name) else None
        if dtype is not None and not with_dtype:
            dtype = _STORAGES.get(dtype.removesuffix("Storage"))
        shape = shape.args[0] if isinstance(shape, Call) and shape.name == "torch.Size" and shape.args else shape
        if dtype not in known_dtypes() or not isinstance(key, str) or not are_sizes(shape) or not are_sizes(strides):
            raise ArchiveDamaged(f"{self.where}: a tensor of an unknown kind ({show(kind)})")
        if not are_sizes((start,)) or len(shape) != len(strides):
            raise ArchiveDamaged(f"{self.where}: a tensor of shape {shape} and stride {strides} from {show(start)}")
        return TensorNote(key, TensorInfo((), str(dtype), tuple(shape)), start, tuple(strides))

    def tensor(self, note: TensorNote, box: Box | None = None) -> Tensor:
        """A part of the tensor (all of it by default), in separate memory. Raises `ArchiveDamaged`."""
        record, size = self._records.get(f"data/{note.key}"), itemsize(note.info.dtype)
        if note.info.nbytes:
            if record is None:
                raise ArchiveDamaged(f"{self.where}: the storage {note.key!r} of a tensor is not in it")
            last = note.start + sum((n - 1) * s for n, s in zip(note.info.shape, note.strides, strict=True))
            if (last + 1) * size > len(record):
                raise ArchiveDamaged(
                    f"{self.where}: a tensor of shape {list(note.info.shape)} ends after the {len(record)} bytes of "
                    "its storage"
                )
        return tensor_of(record or memoryview(b""), note.info, box, note.start * size, note.strides)

    def plain(self, tree: Any, depth: int = 0) -> Any:
        """The tree as Python values and tensors. Raises `PickleRefused` for anything else."""
        # A two-byte recall refers to a list without repeating it, even within itself, so depth and size are limited.
        self._left -= 1
        if depth > _MAX_DEPTH or self._left < 0:
            raise PickleRefused(f"{self.where}: nested deeper than {_MAX_DEPTH}, or far larger than its bytes")
        match tree:
            case None | bool() | int() | float() | str() | bytes():
                return tree
            case dict():
                return {self._key(key): self.plain(value, depth + 1) for key, value in tree.items()}
            case list():
                return [self.plain(item, depth + 1) for item in tree]
            case tuple():
                return tuple([self.plain(item, depth + 1) for item in tree])
            case Call(name=name) if name in (_TENSOR, _TENSOR_V3, _PARAMETER):
                return self.tensor(self.note(tree))
            case Call(name="torch.Size", args=(size,)):
                return self.plain(size, depth + 1)
            case Call(name=name, args=(str(text), *_)) if name == _BYTES:
                return text.encode("latin1")
            case Call(name=name, args=args) if name in _SETS and not any(args):
                return []
        raise PickleRefused(f"{self.where}: it holds {show(tree)}, which is neither a tensor nor a plain value")

    def _key(self, key: Any) -> Any:
        if key is None or isinstance(key, bool | int | float | str):
            return key
        raise PickleRefused(f"{self.where}: a key is {show(key)}, expected text or a number")


# ---- writing -------------------------------------------------------------------------------------------------

_ALIGNMENT = 64  # of storages in the file, as in torch, so that mapped tensors are aligned
_PIECE = 1 << 24


class _Announcement:
    """A tensor that will be written as the storage `number`."""

    def __init__(self, info: TensorInfo, number: int) -> None:
        self.info, self.number = info, number


class _Storage(_Announcement):
    """The storage of an announced tensor, in the pickle."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _Announcement):
            return NotImplemented
        # Pickled like a torch tensor of this dtype, with another storage.
        dtype = dtype_of(value.info.dtype)
        rebuild, arguments = torch.empty(0, dtype=dtype).__reduce_ex__(2)
        like = torch.empty(value.info.shape, dtype=dtype, device="meta")
        storage = _Storage(value.info, value.number)
        return rebuild, (storage, 0, tuple(like.shape), like.stride(), *arguments[4:])

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        name = next((name for name, dtype in _STORAGES.items() if dtype == value.info.dtype), None)
        kind = torch.UntypedStorage if name is None else getattr(torch, f"{name}Storage")
        count = value.info.nbytes if name is None else whole(value.info.shape).numel
        return "storage", kind, str(value.number), "cpu", count


def write_torch(target: Path, source: Source, read: Callable[[str], Tensor]) -> list[Path]:
    """Write all of `source` to the file `target`, with its nesting; `read(key)` is called once per tensor, in order.

    `torch.load(target, weights_only=True)` reads it, and with `mmap=True` only the used parts. Raises
    `FileExistsError` if the file exists; it appears only when it is complete.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists: choose another name, or remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.new")
    try:
        with part.open("wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
                _write(archive, file, source, read)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return [target]


def _write(archive: zipfile.ZipFile, file: io.BufferedWriter, source: Source, read: Callable[[str], Tensor]) -> None:
    """Write the pickle first, with announced tensors, and then one storage after another."""
    found: dict[KeyPath, Any] = {
        info.path: _Announcement(info, number) for number, info in enumerate(source.tensors.values())
    }
    found |= {path: source.value(key) for key, path in source.values.items()}
    data = io.BytesIO()
    _Pickler(data, protocol=2).dump(nested(found))
    for name, text in {"data.pkl": data.getvalue(), "byteorder": b"little", "version": b"3\n"}.items():
        archive.writestr(f"archive/{name}", text)
    for number, key in enumerate(source.tensors):
        info = zipfile.ZipInfo(f"archive/data/{number}")
        # 30 bytes of header, the name, 20 for sizes above 4 GiB, and 4 for the header of the padding.
        ends = file.tell() + 30 + len(info.filename) + 20 + 4
        padding = -ends % _ALIGNMENT
        info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        tensor = on_host(read(key).detach())
        with archive.open(info, "w", force_zip64=True) as stream:
            view = bytes_of(tensor)
            for start in range(0, len(view), _PIECE):
                stream.write(view[start : start + _PIECE])
