"""Our own checkpoints as a source, and as a target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointMismatch
from ..plan import Box
from ..tree import flatten, nested
from .source import KeyPath, Source, TensorInfo


class OursSource(Source):
    """The current generation of the checkpoint at `path`. Every byte that is read is compared with its checksum."""

    kind = "fullshard"

    def __init__(self, path: Path) -> None:
        from .. import open_checkpoint

        self.path = path
        self._opened = open_checkpoint(path)
        manifest = self._opened.manifest
        self.tensors = {
            key: TensorInfo(entry.path, entry.dtype, entry.shape) for key, entry in manifest.tensors.items()
        }
        self.values = {key: entry.path for key, entry in manifest.values.items()}

    def read(self, key: str, box: Box | None = None) -> Tensor:
        return self._opened.tensor(key, box)

    def value(self, key: str) -> Any:
        return self._opened.value(key)

    def verify(self) -> list[str]:
        from .. import verify

        verify(self.path)
        return []

    def close(self) -> None:
        self._opened.close()


def regrouped(source: Source, values: dict[KeyPath, Any]) -> dict[KeyPath, Any]:
    """`values` of `source` as our own save would have stored them: DCP takes every list apart, we those alone that hold
    tensors. So `param_groups.0.lr` and what is beside it become one value again."""
    leaves: dict[KeyPath, Any] = {info.path: torch.empty(0) for info in source.tensors.values()}
    tree = flatten(nested({**leaves, **values}))
    if tree.problems:
        raise CheckpointMismatch(f"{source.path}: not all of it can be stored", tree.problems)
    return {leaf.path: leaf.value for leaf in tree.values.values()}


def write_ours(folder: Path, source: Source, read: Callable[[str], Tensor]) -> list[Path]:
    """Write all of `source` as a checkpoint of ours, one tensor in memory at a time."""
    from .. import CheckpointWriter, TensorSpec

    specs = [TensorSpec(info.path, info.dtype, info.shape) for info in source.tensors.values()]
    values = regrouped(source, {path: source.value(key) for key, path in source.values.items()})
    with CheckpointWriter(folder, specs, values) as writer:
        for key in source.tensors:
            writer.write(key, read(key))
    return sorted(path for path in folder.rglob("*") if path.is_file())
