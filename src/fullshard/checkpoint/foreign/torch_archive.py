"""What `torch.save` wrote, read without loading: a zip archive with a pickle and the bytes of each storage.

The pickle goes through `pickle_tree`, so nothing of it is run, and storages are views of the mapped file: of a chunk
that a rank needs ten rows of, ten rows are copied.
"""

from __future__ import annotations

import io
import math
import zipfile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checksums
from ..errors import CheckpointDamaged
from ..plan import Box, whole
from .pickle_tree import Made, Name, PickleRefused, Stored, read_pickle, show

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
# Newer dtypes have no storage class of their own: their tensors are rebuilt from bytes, the dtype beside them.
_UNTYPED = "torch.storage.UntypedStorage"
_DTYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz int64 int32 int16 "
        "int8 "
        "uint64 uint32 uint16 uint8 bool complex64 complex128"
    ).split()
}
_TENSOR = "torch._utils._rebuild_tensor_v2"
_TENSOR_V3 = "torch._utils._rebuild_tensor_v3"
_PARAMETER = "torch._utils._rebuild_parameter"
_BYTES = "_codecs.encode"  # how protocol 2 spells bytes
_ALLOWED = frozenset(
    [
        *(f"torch.{name}" for name in _STORAGES),
        *_DTYPES,
        *(_UNTYPED, _TENSOR, _TENSOR_V3, _PARAMETER, _BYTES, "torch.Size", "torch.device"),
        *("collections.OrderedDict", "collections.defaultdict", "builtins.dict", "builtins.set", "__builtin__.set"),
    ]
)
_MAX_DEPTH = 64


def storage_name(dtype: torch.dtype) -> str | None:
    """The class of torch that stands for a storage of `dtype` in a pickle; None for those that are pickled as bytes."""
    return next((name for name, known in _STORAGES.items() if known is dtype), None)


class ArchiveDamaged(CheckpointDamaged):
    """An archive that is not whole, or whose bytes are not those that were written."""


class TensorNote(NamedTuple):
    """A tensor as the pickle tells of it: `shape` and `stride` in elements from `start` of the storage `key`."""

    key: str
    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class TorchArchive:
    """The archive in `data`, compared with its checksums first. `where`: what errors call it. Raises "
    "`ArchiveDamaged`."""

    def __init__(self, data: memoryview, where: str) -> None:
        self._data, self.where = data, where
        try:
            self._zip = zipfile.ZipFile(io.BufferedReader(_View(data)))
            infos = {info.filename: info for info in self._zip.infolist()}
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
            raise ArchiveDamaged(f"{where}: not what torch.save writes, or damaged: {error}") from None
        pickles = [name for name in infos if name.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise ArchiveDamaged(f"{where}: expected one data.pkl in it, found {len(pickles)}")
        self._prefix = pickles[0].removesuffix("data.pkl")
        self._infos = infos
        self._left = 0  # how many values `plain` may still make
        self.checked = self._check()  # False: it carries no checksums
        order = infos.get(self._prefix + "byteorder")
        if order is not None and bytes(self._record(order)) != b"little":
            raise ArchiveDamaged(f"{where}: it was written on a big-endian machine, which is not read")

    def tree(self) -> Any:
        """The pickle, with notes for what it would call."""
        try:
            data = self._record(self._infos[self._prefix + "data.pkl"])
            self._left = 16 * len(data) + 1000
            return read_pickle(data, _ALLOWED)
        except PickleRefused as error:
            raise PickleRefused(f"{self.where}: {error}") from None

    def _check(self) -> bool:
        """Compare the checksums that the archive carries of each of its files. Raises `ArchiveDamaged`; False: it was
        written without (`torch.serialization.set_crc32_options(False)`)."""
        if not any(info.CRC for info in self._infos.values()):
            return False
        for info in self._infos.values():
            record = self._record(info)
            if checksums.crc32(record) != info.CRC:
                raise ArchiveDamaged(
                    f"{self.where}: the bytes of {info.filename} do not have the checksum that was written with them "
                    f"({info.CRC:08x}): the file was damaged"
                )
        return True

    def note(self, made: Any) -> TensorNote:
        """The tensor that a note of the tree stands for. Raises `ArchiveDamaged` where it is none that can be read."""
        if isinstance(made, Made) and made.name == _PARAMETER and made.args:
            made = made.args[0]
        dtype = None
        if isinstance(made, Made) and made.name == _TENSOR_V3 and len(made.args) > 6:
            dtype = _DTYPES.get(made.args[6].full) if isinstance(made.args[6], Name) else None
        elif not isinstance(made, Made) or made.name != _TENSOR or len(made.args) < 4:
            raise ArchiveDamaged(f"{self.where}: expected a tensor, found {show(made)}")
        stored, start, shape, stride = made.args[:4]
        if not isinstance(stored, Stored) or not isinstance(stored.key, tuple) or len(stored.key) != 5:
            raise ArchiveDamaged(f"{self.where}: a tensor without a storage")
        kind, key = stored.key[1], stored.key[2]
        if dtype is None and isinstance(kind, Name):
            dtype = _STORAGES.get(kind.full.removeprefix("torch."))
        shape = shape.args[0] if isinstance(shape, Made) and shape.name == "torch.Size" and shape.args else shape
        if dtype is None or not isinstance(key, str) or not _are_sizes(shape) or not _are_sizes(stride):
            raise ArchiveDamaged(f"{self.where}: a tensor of an unknown kind ({show(kind)})")
        if not _are_sizes((start,)) or len(shape) != len(stride):
            raise ArchiveDamaged(f"{self.where}: a tensor of shape {shape} and stride {stride} from {show(start)}")
        return TensorNote(key, dtype, start, tuple(shape), tuple(stride))

    def tensor(self, note: TensorNote, box: Box | None = None) -> Tensor:
        """A part of the tensor (all of it by default), in memory of its own. Raises `ArchiveDamaged`."""
        offsets, sizes = whole(note.shape) if box is None else box
        out = torch.empty(sizes, dtype=note.dtype)
        if 0 in sizes:
            return out
        info = self._infos.get(f"{self._prefix}data/{note.key}")
        if info is None:
            raise ArchiveDamaged(f"{self.where}: the storage {note.key!r} of a tensor is not in it")
        first = note.start + sum(o * s for o, s in zip(offsets, note.stride, strict=True))
        last = first + sum((n - 1) * s for n, s in zip(sizes, note.stride, strict=True))
        itemsize = note.dtype.itemsize
        record = self._record(info)
        if (last + 1) * itemsize > len(record):
            raise ArchiveDamaged(
                f"{self.where}: a tensor of shape {list(note.shape)} ends behind the {len(record)} bytes of its storage"
            )
        # Elements need not be aligned where they lie in the file, so bytes are moved and then looked at as elements.
        nbytes = (last + 1 - first) * itemsize
        if nbytes == math.prod(sizes) * itemsize and _contiguous(sizes, note.stride):
            out.view(-1).view(torch.uint8).copy_(_bytes(record, first * itemsize, nbytes))
            return out
        held = torch.empty(last + 1 - first, dtype=note.dtype)
        held.view(torch.uint8).copy_(_bytes(record, first * itemsize, nbytes))
        return out.copy_(held.as_strided(sizes, note.stride))

    def plain(self, tree: Any, depth: int = 0) -> Any:
        """The tree as Python values and tensors. Raises `PickleRefused` for what is neither."""
        # A list that is recalled and not repeated takes two bytes, and may be recalled within itself.
        self._left -= 1
        if depth > _MAX_DEPTH or self._left < 0:
            raise PickleRefused(f"{self.where}: nested deeper than {_MAX_DEPTH}, or far larger than its bytes")
        if tree is None or isinstance(tree, bool | int | float | str | bytes):
            return tree
        if isinstance(tree, dict):
            return {self._key(k): self.plain(v, depth + 1) for k, v in tree.items()}
        if isinstance(tree, list):
            return [self.plain(v, depth + 1) for v in tree]
        if isinstance(tree, tuple):
            return tuple([self.plain(v, depth + 1) for v in tree])
        if isinstance(tree, Made) and tree.name in (_TENSOR, _TENSOR_V3, _PARAMETER):
            return self.tensor(self.note(tree))
        if isinstance(tree, Made) and tree.name == "torch.Size" and len(tree.args) == 1:
            return self.plain(tree.args[0], depth + 1)
        if isinstance(tree, Made) and tree.name == _BYTES and isinstance(tree.args[0], str):
            return tree.args[0].encode("latin1")
        if isinstance(tree, Made) and tree.name in ("builtins.set", "__builtin__.set") and not any(tree.args):
            return []
        raise PickleRefused(f"{self.where}: it holds {show(tree)}, which is neither a tensor nor a plain value")

    def _key(self, key: Any) -> Any:
        if key is None or isinstance(key, bool | int | float | str):
            return key
        raise PickleRefused(f"{self.where}: a key is {show(key)}, expected text or a number")

    def _record(self, info: zipfile.ZipInfo) -> memoryview:
        """The bytes of one file of the archive, where they lie."""
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise ArchiveDamaged(
                f"{self.where}: {info.filename} is compressed or encrypted, which torch.save does not do"
            )
        head = self._data[info.header_offset : info.header_offset + 30]
        if len(head) < 30 or bytes(head[:4]) != b"PK\x03\x04":
            raise ArchiveDamaged(f"{self.where}: {info.filename} does not begin where the archive says")
        skip = 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        start = info.header_offset + skip
        if start + info.file_size > len(self._data):
            raise ArchiveDamaged(f"{self.where}: {info.filename} reaches beyond the archive")
        return self._data[start : start + info.file_size]


class _View(io.RawIOBase):
    """A memoryview as the file that `zipfile` wants."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        if base + offset < 0:
            raise OSError("a position before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        piece = self._data[self._at : self._at + len(buffer)]
        memoryview(buffer)[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def _bytes(record: memoryview, start: int, nbytes: int) -> Tensor:
    return torch.frombuffer(record, dtype=torch.uint8, count=nbytes, offset=start)


def _contiguous(sizes: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(sizes), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _are_sizes(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 62 for n in value
    )
