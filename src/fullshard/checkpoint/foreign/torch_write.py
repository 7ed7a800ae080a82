"""Writing what `torch.load` reads, one tensor in memory at a time.

`torch.save` pickles a state dict that is in memory as a whole. The archive that it makes is simple: a pickle in which
each tensor refers to a storage by number, and the storages' bytes behind it. So the pickle is written first, with
tensors that are announced and not there, and then one storage after the other.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..tensors import bytes_of, on_host
from ..tree import nested
from .source import KeyPath, Source, TensorInfo
from .torch_archive import storage_name

_ALIGNMENT = 64  # of a storage in the file, as torch has it, so that a mapped tensor is aligned
_PIECE = 1 << 24


class _Announced:
    """A tensor that will be written as the storage `number`."""

    def __init__(self, info: TensorInfo, number: int) -> None:
        self.info, self.number = info, number


class _Storage(_Announced):
    """Its storage, in the pickle."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _Announced):
            return NotImplemented
        # How torch pickles a tensor of this dtype; only what it is made of changes.
        dtype = getattr(torch, value.info.dtype)
        rebuild, arguments = torch.empty(0, dtype=dtype).__reduce_ex__(2)
        like = torch.empty(value.info.shape, dtype=dtype, device="meta")
        rest = tuple(arguments[4:])
        return rebuild, (_Storage(value.info, value.number), 0, tuple(like.shape), like.stride(), *rest)

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        dtype = getattr(torch, value.info.dtype)
        numel = torch.Size(value.info.shape).numel()
        name = storage_name(dtype)
        if name is None:
            return "storage", torch.UntypedStorage, str(value.number), "cpu", numel * dtype.itemsize
        return "storage", getattr(torch, name), str(value.number), "cpu", numel


def write_torch(target: Path, source: Source, read: Callable[[str], Tensor]) -> list[Path]:
    """Write all of `source` to the file `target`, nested as it was; `read(key)` is called once for each tensor, in
    order.

    `torch.load(target, weights_only=True)` reads it, with `mmap=True` without reading what is not used. Raises
    `FileExistsError` where there is a file already; it appears when it is whole.
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
    leaves: dict[KeyPath, Any] = {
        info.path: _Announced(info, number) for number, info in enumerate(source.tensors.values())
    }
    leaves |= {path: source.value(key) for key, path in source.values.items()}
    data = io.BytesIO()
    _Pickler(data, protocol=2).dump(nested(leaves))
    small: Mapping[str, bytes] = {"data.pkl": data.getvalue(), "byteorder": b"little", "version": b"3\n"}
    for name, text in small.items():
        archive.writestr(f"archive/{name}", text)
    for number, key in enumerate(source.tensors):
        info = zipfile.ZipInfo(f"archive/data/{number}")
        # 30 bytes of header, the name, 20 that tell a size of more than 4 GiB, and 4 of the padding's own head.
        ends = file.tell() + 30 + len(info.filename) + 20 + 4
        padding = -ends % _ALIGNMENT
        info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
        tensor = on_host(read(key).detach())
        with archive.open(info, "w", force_zip64=True) as stream:
            view = bytes_of(tensor)
            for start in range(0, len(view), _PIECE):
                stream.write(view[start : start + _PIECE])
