"""Hugging Face checkpoints: one safetensors file, or several with `model.safetensors.index.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointDamaged, CheckpointNotFound
from ..manifest import MAX_NBYTES, is_file_name, parse_json
from ..plan import Box
from .safetensors_file import Entry, SafetensorsFile, SafetensorsWriter
from .source import Source, TensorInfo

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DEFAULT_MAX_NBYTES = 5_000_000_000  # of a file, as `save_pretrained` has it


class HfSource(Source):
    """A folder with the index or with one safetensors file, or such a file itself.

    Raises `CheckpointDamaged` unless index and files agree: every name of the index in its file, every tensor of a file
    in the index; names of files stay in the folder.
    """

    kind = "hf"

    def __init__(self, path: Path) -> None:
        self.path = path
        index = path / INDEX
        if index.is_file():
            where = self._indexed(index)
        else:
            file = path if path.is_file() else _only_file(path)
            opened = SafetensorsFile(file)
            where = {name: opened for name in opened.entries}
        self._where = where
        self.tensors = {
            name: TensorInfo(
                (name,), str(file.entries[name][0].dtype).removeprefix("torch."), file.entries[name][0].shape
            )
            for name, file in where.items()
        }
        self.values = {}

    @property
    def num_files(self) -> int:
        return len({file.path for file in self._where.values()})

    def read(self, key: str, box: Box | None = None) -> Tensor:
        return self._where[key].read(key, box)

    def value(self, key: str) -> Any:
        raise KeyError(key)

    def close(self) -> None:
        self._where = {}

    def _indexed(self, index: Path) -> dict[str, SafetensorsFile]:
        if index.stat().st_size > MAX_NBYTES:
            raise CheckpointDamaged(f"{index}: larger than the {MAX_NBYTES:,} bytes that are read")
        found = parse_json(index.read_bytes(), str(index))
        weight_map = found.get("weight_map") if isinstance(found, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointDamaged(f"{index}: expected a weight_map of names to files")
        files: dict[str, SafetensorsFile] = {}
        for name in sorted(set(map(str, weight_map.values()))):
            if not is_file_name(name):
                raise CheckpointDamaged(f"{index}: it names the file {name[:200]!r}: expected a plain name beside it")
            path = index.with_name(name)
            if path.is_symlink() and path.resolve().parent != path.parent.resolve() and not _in_cache(path):
                raise CheckpointDamaged(f"{path} is a link out of its folder")
            if not path.is_file():
                raise CheckpointNotFound(f"{path}: the index names it, and it is not there")
            files[name] = SafetensorsFile(path)
        problems = [f"{key}: not in {name}" for key, name in weight_map.items() if key not in files[name].entries]
        for name, file in files.items():
            problems += [f"{key}: in {name}, not in the index" for key in file.entries if weight_map.get(key) != name]
        if problems:
            raise CheckpointDamaged(f"{index} and the files do not belong together: {'; '.join(problems[:10])}")
        return {key: files[name] for key, name in weight_map.items()}


def _in_cache(path: Path) -> bool:
    """Whether a link is one of Hugging Face's cache: `snapshots/<revision>/x` to `blobs/<hash>` of the same "
    "repository."""
    folder = path.parent.resolve()
    return folder.parent.name == "snapshots" and path.resolve().parent == folder.parent.parent / "blobs"


def _only_file(folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    if (folder / SINGLE) in files:
        return folder / SINGLE
    if len(files) != 1:
        names = ", ".join(file.name for file in files[:5]) or "none"
        raise CheckpointNotFound(f"{folder}: expected {INDEX}, {SINGLE} or one .safetensors file, found {names}")
    return files[0]


def plan_files(entries: Sequence[Entry], max_nbytes: int) -> list[list[Entry]]:
    """The tensors of each file, in order: as many as fit into `max_nbytes`, and at least one.

    >>> [len(f) for f in plan_files([Entry(n, torch.uint8, (4,)) for n in "abc"], 8)]
    [2, 1]
    """
    if max_nbytes < 1:
        raise ValueError(f"max_nbytes: expected at least 1, found {max_nbytes}")
    files: list[list[Entry]] = [[]]
    nbytes = 0
    for entry in entries:
        if files[-1] and nbytes + entry.nbytes > max_nbytes:
            files.append([])
            nbytes = 0
        files[-1].append(entry)
        nbytes += entry.nbytes
    return files


def write_hf(
    folder: Path,
    entries: Sequence[Entry],
    read: Callable[[str], Tensor],
    *,
    max_nbytes: int = DEFAULT_MAX_NBYTES,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write `entries` to `folder`, in files of at most `max_nbytes` of tensors, and the index where there is more than
    one.

    `read(name)` is called once for each, in order, and what it returns is let go before the next: one tensor is in
    memory at a time. The files are written under other names and renamed at the end, the index last. Returns the files
    written. Raises `FileExistsError` where a model is there already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taken = [name for name in (SINGLE, INDEX) if (folder / name).exists()]
    if taken:
        raise FileExistsError(f"{folder / taken[0]} exists: choose a folder without a model, or remove it first")
    planned = plan_files(entries, max_nbytes)
    count = len(planned)
    names = [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    written = []
    with ExitStack() as undo:
        for name, part in zip(names, planned, strict=True):
            target = folder / f".{name}.new"
            undo.callback(target.unlink, missing_ok=True)
            with SafetensorsWriter(target, part, metadata) as file:
                for entry in part:
                    file.write(entry.name, read(entry.name))
        for name in names:
            os.replace(folder / f".{name}.new", folder / name)
            written.append(folder / name)
    if count > 1:
        weight_map = {entry.name: name for name, part in zip(names, planned, strict=True) for entry in part}
        index = {"metadata": {"total_size": sum(entry.nbytes for entry in entries)}, "weight_map": weight_map}
        part_file = folder / f".{INDEX}.new"
        part_file.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        os.replace(part_file, folder / INDEX)
        written.append(folder / INDEX)
    return written


def entries_of(source: Source) -> list[Entry]:
    """The tensors of a source as entries of a file."""
    return [Entry(key, getattr(torch, info.dtype), info.shape) for key, info in source.tensors.items()]
