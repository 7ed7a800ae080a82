"""A checkpoint of any format, as those who copy from it see it: named tensors of which boxes can be read, and plain "
"values."""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from ...layout import itemsize
from ..errors import CheckpointDamaged, CheckpointNotFound
from ..plan import Box

KeyPath = tuple[
    str | int, ...
]  # where a flat key stands in the nested state dict: ("optimizer", "state", "w", "exp_avg")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor that a source has. `dtype` is torch's name without "torch."."""

    path: KeyPath
    dtype: str
    shape: tuple[int, ...]


def nbytes_of(info: TensorInfo) -> int:
    """The bytes of a tensor."""
    return math.prod(info.shape) * itemsize(info.dtype)


class Source(ABC):
    """An opened checkpoint. Close it, or use it as a context manager."""

    kind: str  # "dcp", "hf", "torch", "fullshard"
    path: Path
    tensors: Mapping[str, TensorInfo]  # by flat key
    values: Mapping[str, KeyPath]  # what is no tensor, by flat key

    @abstractmethod
    def read(self, key: str, box: Box | None = None) -> Tensor:
        """A part of a tensor, the whole by default: on the CPU, owned by the caller, its bytes compared with the
        checksums that the format has. Raises `CheckpointError`."""

    @abstractmethod
    def value(self, key: str) -> Any:
        """What stands under `key`: None, bool, int, float, str, bytes, lists, tuples, dicts, and tensors in them."""

    def verify(self) -> list[str]:
        """Read every byte that has a checksum. What cannot be found out, one text for each; empty where all was
        compared.

        Raises `CheckpointError` for damage. Here: reads every tensor, and says that the format has no checksums.
        """
        for key in self.tensors:
            self.read(key)
        return [f"the format ({self.kind}) carries no checksums: a flipped bit in a tensor cannot be noticed"]

    def close(self) -> None:  # noqa: B027  most have nothing to do
        """Let go of files. Tensors that were read are not concerned."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MappedFiles:
    """The files of a directory, mapped into memory when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, mmap.mmap] = {}

    def view(self, name: str, offset: int = 0, length: int | None = None) -> memoryview:
        """Bytes of the file `name`, a plain name. Raises `CheckpointDamaged` where they are not there."""
        path = self._folder / name
        if name not in self._maps:
            if path.is_symlink() or not path.is_file():
                raise CheckpointNotFound(f"{path}: expected a file of the checkpoint, found {_what(path)}")
            with path.open("rb") as file:
                if path.stat().st_size == 0:
                    raise CheckpointDamaged(f"{path} is empty")
                # A private copy that nobody writes: torch wants memory that could be written.
                self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        mapped = self._maps[name]
        stop = len(mapped) if length is None else offset + length
        if stop > len(mapped):
            raise CheckpointDamaged(
                f"{path}: expected at least {stop:,} bytes, found {len(mapped):,}: it was cut short"
            )
        return memoryview(mapped)[offset:stop]

    def close(self) -> None:
        # A view that is still held keeps its map alive; dropping ours is enough.
        self._maps.clear()


def within(outer: Box, part: Box) -> Box:
    """`part` of the same tensor in the coordinates of `outer`, which holds it."""
    return Box(tuple(p - o for p, o in zip(part.offsets, outer.offsets, strict=True)), part.lengths)


def place(held: Tensor, box: Box, part: Box) -> Tensor:
    """The view of `held`, which is `box` of a tensor, that is `part` of it."""
    for dim, (start, length) in enumerate(zip(*within(box, part), strict=True)):
        held = held.narrow(dim, start, length)
    return held


def _what(path: Path) -> str:
    if path.is_symlink():
        return "a link"
    return "no file" if not path.exists() else "something that is no file"
