"""Writing what torch's DCP loads, through DCP's own writer, one tensor in memory at a time."""

from __future__ import annotations

import os
import shutil
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from ..tree import nested
from .source import Source


class _Planner(DefaultSavePlanner):
    """Plans with tensors that have no memory, and reads each when it is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        return self._read(write_item.index.fqn)


def write_dcp(folder: Path, source: Source, read: Callable[[str], Tensor]) -> list[Path]:
    """Write all of `source` as the DCP checkpoint `folder`, nested as it was. `read(key)` is called once for each
    tensor.

    Written beside it and renamed when it is whole. Raises `FileExistsError` where the folder has something in it.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} exists and is not empty: choose another folder")
    leaves: dict[tuple[str | int, ...], Any] = {
        info.path: torch.empty(info.shape, dtype=getattr(torch, info.dtype), device="meta")
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
    except torch_dcp.api.CheckpointException as error:  # no Exception: it would pass through whoever expects one
        raise OSError(f"{folder} could not be written: {error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return sorted(folder.iterdir())
