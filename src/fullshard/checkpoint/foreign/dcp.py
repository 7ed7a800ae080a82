"""Checkpoints of torch's DCP, read without unpickling: torchtitan's `step-N`, Composer's `ep{E}-ba{B}`, FSDP1 saved "
"as DTensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..plan import Box, overlap, whole
from .dcp_index import Chunk, DcpIndex, NotDcp, ShardedTensorCheckpoint, Span, read_index
from .source import KeyPath, MappedFiles, Source, TensorInfo, place, within
from .torch_archive import ArchiveDamaged, TorchArchive

# How FSDP1's LOCAL_STATE_DICT names what it saves: parts of flat parameters, whose names and shapes are not in the
# file.
_FLAT = ("_flat_param", "flat_param")


class FlatParameterCheckpoint(CheckpointError):
    """A LOCAL_STATE_DICT of FSDP1."""


class DcpSource(Source):
    """The directory `path` of a DCP checkpoint. Raises `CheckpointError` where it is none, or one that is refused."""

    kind = "dcp"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index: DcpIndex = read_index(path / ".metadata")
        refuse_flat_parameters(path, self.index.tensors)
        paths = self.index.paths
        self.tensors = {
            key: TensorInfo(_path(paths, key), tensor.dtype, tensor.shape) for key, tensor in self.index.tensors.items()
        }
        self.values: dict[str, KeyPath] = {key: _path(paths, key) for key in self.index.values}
        self._files = MappedFiles(path)

    def read(self, key: str, box: Box | None = None) -> Tensor:
        tensor = self.index.tensors[key]
        wanted = whole(tensor.shape) if box is None else box
        out = torch.empty(wanted.lengths, dtype=getattr(torch, tensor.dtype))
        for chunk in tensor.chunks:
            common = overlap(wanted, chunk.box)
            if common is not None:
                place(out, wanted, common).copy_(self._chunk(key, tensor.dtype, chunk, within(chunk.box, common)))
        return out

    def value(self, key: str) -> Any:
        archive = self._archive(key, self.index.values[key])
        return archive.plain(archive.tree())

    def verify(self) -> list[str]:
        """Every archive's checksums, and that every tensor is what the index says."""
        without = []
        for key, tensor in self.index.tensors.items():
            for chunk in tensor.chunks:
                self._chunk(key, tensor.dtype, chunk, Box((0,) * len(tensor.shape), (0,) * len(tensor.shape)))
                without += [key] * (not self._archive(key, chunk.span).checked)
        for key, span in self.index.values.items():
            without += [key] * (not self._archive(key, span).checked)
        found = ["`.metadata` itself has no checksum"]
        if without:
            found.append(f"{len(without)} entries were written without checksums ({without[0]}, ...)")
        return found

    def close(self) -> None:
        self._files.close()

    def _chunk(self, key: str, dtype: str, chunk: Chunk, box: Box) -> Tensor:
        archive = self._archive(key, chunk.span)
        note = archive.note(archive.tree())
        if note.shape != chunk.box.lengths or note.dtype != getattr(torch, dtype):
            raise ArchiveDamaged(
                f"{archive.where}: expected {dtype} {list(chunk.box.lengths)}, as `.metadata` says, found {note.dtype} "
                f"{list(note.shape)}: the file belongs to another checkpoint"
            )
        return archive.tensor(note, box)

    def _archive(self, key: str, span: Span) -> TorchArchive:
        where = f"{self.path / span.file}, {key}"
        archive = TorchArchive(self._files.view(span.file, span.offset, span.length), where)
        return archive


def refuse_flat_parameters(path: Path, keys: Any) -> None:
    """Raise `FlatParameterCheckpoint` where one of `keys` is a flat parameter of FSDP1."""
    flat = [key for key in keys if key.rpartition(".")[2].startswith(_FLAT)]
    if flat:
        raise FlatParameterCheckpoint(
            f"{path}: {len(flat)} flat parameter(s) of FSDP1 ({flat[0]}, ...): a LOCAL_STATE_DICT, which does not "
            "tell the names "
            "and shapes inside. Load it with FSDP1 at the same number of ranks, and save it anew under "
            "StateDictType.SHARDED_STATE_DICT with a device_mesh, or FULL_STATE_DICT"
        )


def _path(paths: dict[str, KeyPath], key: str) -> KeyPath:
    return paths.get(key, (key,))


__all__ = ["DcpSource", "FlatParameterCheckpoint", "NotDcp", "ShardedTensorCheckpoint", "refuse_flat_parameters"]
