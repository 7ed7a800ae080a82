"""The common interface of checkpoints in any format: named tensors of which boxes can be read, and plain values. Also
here: our own checkpoints as such a source, and bytes of mapped files as tensors."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..api import open_checkpoint
from ..companions import ROOM, TIED, files_beside, owner_of, stored_files
from ..errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from ..plan import Box, KeyPath, TensorSpec, key_of, whole
from ..state import bytes_of, dtype_name, dtype_of

TensorInfo = TensorSpec  # a tensor that a source has


def nbytes_of(info: TensorInfo) -> int:
    """The bytes of a tensor."""
    return info.nbytes


class Source(ABC):
    """An opened checkpoint. Close it, or use it as a context manager."""

    kind: str  # "dcp", "hf", "torch", "fullshard"
    path: Path | str  # a string for a URL
    tensors: Mapping[str, TensorInfo]  # by flat key
    values: Mapping[str, KeyPath]  # entries that are not tensors, by flat key
    tied: Mapping[str, str] = {}  # {key of a tensor: key of another that is the same parameter}
    # {key of a tensor: (a number for the memory that it is a part of, its bytes)}, for those that are parts of one.
    memory: Mapping[str, tuple[int, int]] = {}

    def companions(self, model: str | None = None) -> dict[str, bytes]:
        """The files that `from_pretrained` needs beside weights, by name; of several models in a state dict, those of
        the one under the key `model`. Here: the files beside the checkpoint, if a `config.json` is one of them."""
        return {} if isinstance(self.path, str) else files_beside(self.path)

    @abstractmethod
    def read(self, key: str, box: Box | None = None) -> Tensor:
        """A part of a tensor, the whole by default: on the CPU, owned by the caller, checked against the checksums that
        the format has. Raises `CheckpointError`."""

    @abstractmethod
    def value(self, key: str) -> Any:
        """The value under `key`: None, bool, int, float, str, bytes, lists, tuples, dicts, and tensors in them."""

    def inputs(self, order: Iterable[str]) -> list[str]:
        """The keys of the innermost source in the order in which they are read when tensors are read in `order`."""
        return list(order)

    def verify(self, progress: Callable[[str, int], object] | None = None) -> list[str]:
        """Read every byte that has a checksum. Returns one text for each thing that cannot be verified; none if
        everything was compared. `progress`: called with the name and the bytes of what was read, where that is known.

        Raises `CheckpointError` for damage. Here: reads every tensor, and reports that the format has no checksums.
        """
        for key in self.tensors:
            self.read(key)
        return [f"the format ({self.kind}) carries no checksums: a flipped bit in a tensor cannot be detected"]

    def close(self) -> None:  # noqa: B027  most sources have nothing to close
        """Close files. Tensors that were read stay valid."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LeavesSource(Source):
    """A state dict in memory as a source: leaves by their paths, tensors and values."""

    def __init__(self, path: Path, leaves: Iterable[tuple[KeyPath, Any]]) -> None:
        self.path = path
        self._leaves: dict[str, Any] = {}
        self.tensors, self.values = {}, {}
        for leaf, value in leaves:
            key = key_of(leaf)
            if key in self._leaves:
                raise CheckpointDamaged(f"{path}: two entries would have the key {key}")
            self._leaves[key] = value
            if isinstance(value, Tensor):
                self.tensors[key] = TensorInfo(leaf, dtype_name(value.dtype), tuple(value.shape))
            else:
                self.values[key] = leaf

    def read(self, key: str, box: Box | None = None) -> Tensor:
        tensor: Tensor = self._leaves[key].detach()
        full = whole(tensor.shape)
        return place(tensor, full, full if box is None else box).clone(memory_format=torch.contiguous_format)

    def value(self, key: str) -> Any:
        return self._leaves[key]

    def close(self) -> None:
        self._leaves.clear()


class OursSource(Source):
    """The current generation of the checkpoint at `path`. Every byte is compared with its checksum."""

    kind = "fullshard"

    def __init__(self, path: Path | str) -> None:
        self.path = path
        self._checkpoint = open_checkpoint(path)
        manifest = self._checkpoint.manifest
        tensors = {key: entry.spec for key, entry in manifest.tensors.items()}
        values = {key: entry.path for key, entry in manifest.values.items()}
        self.tensors = {key: spec for key, spec in tensors.items() if spec.path[0] != ROOM}
        self.values = {key: each for key, each in values.items() if each[0] != ROOM}
        paths = {key: spec.path for key, spec in tensors.items()} | values
        self._stored = {key: each for key, each in paths.items() if each[0] == ROOM}
        # The keys of the models in the state dict.
        self.models = sorted(owner_of(each) for each in self._stored.values() if each[-1] == TIED)
        self.tied = {}
        for key, stored in self._stored.items():
            prefix = key_of((*stored[1:-1], ""))
            for name, kept in self.value(key).items() if stored[-1] == TIED else ():
                self.tied[prefix + name] = prefix + kept

    def companions(self, model: str | None = None) -> dict[str, bytes]:
        stored = stored_files(self._stored, model)
        return super().companions() | {name: bytes(bytes_of(self.read(key))) for name, key in stored.items()}

    def read(self, key: str, box: Box | None = None) -> Tensor:
        return self._checkpoint.tensor(key, box)

    def value(self, key: str) -> Any:
        return self._checkpoint.value(key)

    def verify(self, progress: Callable[[str, int], object] | None = None) -> list[str]:
        self._checkpoint.verify(progress)
        return []

    def close(self) -> None:
        self._checkpoint.close()


# ---- known but not read --------------------------------------------------------------------------------------

# FSDP1's LOCAL_STATE_DICT names flat parameters like this, without the names and shapes of their parts.
_FLAT = ("_flat_param", "flat_param")


class FlatParameterCheckpoint(CheckpointError):
    """A LOCAL_STATE_DICT of FSDP1."""


class ShardedTensorCheckpoint(CheckpointError):
    """A checkpoint of ShardedTensors, or from a torch as old as they are."""


def refuse_flat_parameters(path: Path, keys: Iterable[str]) -> None:
    """Raise `FlatParameterCheckpoint` if one of `keys` is a flat parameter of FSDP1."""
    flat = [key for key in keys if key.rpartition(".")[2].startswith(_FLAT)]
    if flat:
        raise FlatParameterCheckpoint(
            f"{path}: {len(flat)} flat parameter(s) of FSDP1 ({flat[0]}, ...): a LOCAL_STATE_DICT, which lacks the "
            "names and shapes inside. Load it with FSDP1 at the same number of ranks, and save it anew under "
            "StateDictType.SHARDED_STATE_DICT with a device_mesh, or FULL_STATE_DICT"
        )


# ---- bytes of files ------------------------------------------------------------------------------------------


def mapped(path: Path, offset: int, length: int) -> tuple[mmap.mmap, int]:
    """The file `path` (not a link), mapped up to byte `offset + length`, and the position of `offset` in the map, which
    begins at a page. Raises `CheckpointNotFound`, or `CheckpointDamaged` if those bytes do not exist."""
    if path.is_symlink() or not path.is_file():
        what = "a link" if path.is_symlink() else "something that is not a file" if path.exists() else "no file"
        raise CheckpointNotFound(f"{path}: expected a file of the checkpoint, found {what}")
    with path.open("rb") as file:
        stop, nbytes = offset + length, path.stat().st_size
        if length < 1 or stop > nbytes:
            raise CheckpointDamaged(f"{path}: expected at least {stop:,} bytes, found {nbytes:,}: it is truncated")
        first = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        # A private copy that is not written to: torch requires writable memory.
        return mmap.mmap(file.fileno(), stop - first, access=mmap.ACCESS_COPY, offset=first), offset - first


def tensor_of(
    data: mmap.mmap | memoryview, info: TensorInfo, box: Box | None, start: int, strides: Sequence[int]
) -> Tensor:
    """`box` of the tensor `info`, whose elements are in `data` from byte `start` on, `strides` elements apart; copied
    to separate memory. The caller has checked that they all exist; they need not be aligned."""
    wanted, dtype = whole(info.shape) if box is None else box, dtype_of(info.dtype)
    made = torch.empty(wanted.lengths, dtype=dtype)
    if made.numel():
        # Moves bytes, not elements: they need not be aligned.
        size = dtype.itemsize
        steps = [*(step * size for step in strides), 1]
        held = torch.frombuffer(data, dtype=torch.uint8).as_strided((*info.shape, size), steps, start)
        made.unsqueeze(-1).view(torch.uint8).copy_(place(held, whole(info.shape), wanted))
    return made


def within(outer: Box, part: Box) -> Box:
    """`part`, which lies within `outer`, in the coordinates of `outer`."""
    return Box(tuple(p - o for p, o in zip(part.offsets, outer.offsets, strict=True)), part.lengths)


def place(held: Tensor, box: Box, part: Box) -> Tensor:
    """The view of `held`, which is `box` of a tensor, for `part` of the same tensor."""
    for dim, (start, length) in enumerate(zip(*within(box, part), strict=True)):
        held = held.narrow(dim, start, length)
    return held
