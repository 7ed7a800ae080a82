"""Full state dicts that `torch.save` wrote, read through `weights_only`, and only where the caller asks for it by "
"name."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointDamaged, CheckpointError
from ..plan import Box, whole
from .dcp import ShardedTensorCheckpoint, refuse_flat_parameters
from .numbered import with_names
from .pickle_tree import read_pickle
from .source import KeyPath, Source, TensorInfo, place

_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor"
_DTENSOR = (
    "torch.distributed.tensor.DTensor",
    "torch.distributed._tensor.api.DTensor",
    "torch.distributed._tensor.DTensor",
)
_MAX_PICKLE = 1 << 30


class TorchSaveRefused(CheckpointError):
    """A file of `torch.save` that is not read."""


class TorchSource(Source):
    """The file `path`, mapped into memory, so that what is not asked for is not read.

    `allow`: False refuses every such file. They are pickles; torch's `weights_only` reader builds tensors and plain
    values alone, but it has had flaws that let a file run code. `optimizer_names`: what the numbers of the optimizers
    in it stand for (`numbered.with_names`). Raises `TorchSaveRefused`, `ShardedTensorCheckpoint` for one rank's part of
    a sharded state, and `CheckpointMismatch` for names that do not fit.
    """

    kind = "torch"

    def __init__(self, path: Path, *, allow: bool, optimizer_names: Sequence[str] | None = None) -> None:
        self.path = path
        names = names_in(path)
        if any(name.startswith(_SHARDED_TENSOR) for name in names):
            raise ShardedTensorCheckpoint(
                f"{path} holds ShardedTensors: one rank's part of a SHARDED_STATE_DICT of FSDP1. Load the files of "
                "all ranks "
                "with the program and the number of ranks that wrote them, and save with torch.distributed.checkpoint"
            )
        if names & set(_DTENSOR):
            raise TorchSaveRefused(
                f"{path} holds DTensors: one rank's rows of a sharded state dict. Save with fullshard.checkpoint or "
                "torch.distributed.checkpoint, which write all ranks' rows, or gather it first (full_tensor)"
            )
        if not allow:
            raise TorchSaveRefused(
                f"{path} was written by torch.save: a pickle. It is read only if you say so (allow_torch_save=True, "
                "--allow-torch-save), through weights_only, and you should trust where it comes from"
            )
        try:
            root = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except Exception as error:
            first = str(error).strip().split("\n")[0]
            raise TorchSaveRefused(f"{path} cannot be read through weights_only: {first}") from None
        if not isinstance(root, dict):
            raise TorchSaveRefused(f"{path}: expected a state dict, found a {type(root).__name__}")
        self._tensors: dict[str, Tensor] = {}
        self._values: dict[str, Any] = {}
        self.tensors, self.values = {}, {}
        for leaf, value in leaves(with_names(root, optimizer_names, path)):
            key = ".".join(map(str, leaf))
            if key in self._tensors or key in self._values:
                raise CheckpointDamaged(f"{path}: two entries would be {key}")
            if isinstance(value, Tensor):
                self._tensors[key] = value
                self.tensors[key] = TensorInfo(leaf, str(value.dtype).removeprefix("torch."), tuple(value.shape))
            else:
                self._values[key] = value
                self.values[key] = leaf
        refuse_flat_parameters(path, self.tensors)

    def read(self, key: str, box: Box | None = None) -> Tensor:
        tensor = self._tensors[key].detach()
        all_of_it = whole(tensor.shape)
        return place(tensor, all_of_it, all_of_it if box is None else box).clone(memory_format=torch.contiguous_format)

    def value(self, key: str) -> Any:
        return self._values[key]

    def close(self) -> None:
        self._tensors.clear()


def names_in(path: Path) -> frozenset[str]:
    """What the pickle of a file of `torch.save` mentions. Nothing of it is run; empty for the format before torch "
    "1.6."""
    if not zipfile.is_zipfile(path):
        return frozenset()
    found = _Every()
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [info for info in archive.infolist() if info.filename.rpartition("/")[2] == "data.pkl"]
            if len(pickles) != 1 or pickles[0].file_size > _MAX_PICKLE:
                raise CheckpointDamaged(f"{path}: a zip archive, and not one of torch.save")
            read_pickle(archive.read(pickles[0]), found)
    except (zipfile.BadZipFile, NotImplementedError, OSError) as error:
        raise CheckpointDamaged(f"{path}: {error}") from None
    except CheckpointDamaged:
        raise
    except CheckpointError:
        pass  # an opcode that we do not know: what was mentioned before it is what we can tell
    return frozenset(found.names)


class _Every:
    """A container that holds everything, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Tensors and plain values of a nested state dict: dicts with text as keys are descended, and lists with tensors in
    them.

    >>> [path for path, _ in leaves({"a": {"b": 1}, "c": [1, 2]})]
    [('a', 'b'), ('c',)]
    """
    if isinstance(value, dict) and (value or not path) and all(isinstance(key, str) for key in value):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list | tuple) and _has_tensor(value):
        for i, item in enumerate(value):
            yield from leaves(item, (*path, i))
    else:
        yield path, value


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, Tensor)
