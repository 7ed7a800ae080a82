"""What all ranks hold, as one: the tensors and values that a save is about, proven to fit each other.

Each rank says what it has (a message of `saving.py`); here the messages become one picture, without torch.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..layout import itemsize
from .errors import CheckpointMismatch
from .manifest import Path, key_of
from .plan import Box, Held, coverage_problem

REMEDY = (
    "state of each rank goes under keys of its own (name the rank in them); for state that differs and of which "
    "the first rank's is wanted, name the keys in take_first"
)


class Described(NamedTuple):
    """A tensor, whoever holds its parts."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


class Merged(NamedTuple):
    """`held[rank]`: the parts of that rank, in its own order. `compared`: whether a part has to be the same as that of
    other ranks which hold it. `values`: path, and the rank that sends it."""

    tensors: dict[str, Described]
    held: list[list[Held]]
    compared: list[list[bool]]
    values: dict[str, tuple[Path, int]]


def matches(key: str, patterns: Iterable[str]) -> bool:
    """Whether `key` is one of `patterns`, in which * stands for anything.

    >>> matches("optimizer.state.w.step", ["optimizer.*"]), matches("optimizers", ["optimizer.*"])
    (True, False)
    """
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def merge(messages: Sequence[dict[str, Any]], take_first: Sequence[str], what: str) -> Merged:
    """One picture of what ranks hold.

    Raises `CheckpointMismatch` with all that does not fit: a key of different shapes, dtypes, paths or values, parts
    that leave something out or overlap.
    """
    found = _Merging(take_first)
    for rank, message in enumerate(messages):
        held, compared = list[Held](), list[bool]()
        for path, dtype, shape, box in message["tensors"]:
            part = found.tensor(rank, tuple(path), dtype, tuple(shape), box)
            held.append(part)
            compared.append(not matches(part.key, take_first))
        found.held.append(held)
        found.compared.append(compared)
        for path, digest in message["values"]:
            found.value(rank, tuple(path), digest)
    problems = found.problems + found.coverage()
    if problems:
        raise CheckpointMismatch(f"{what}: expected ranks that fit each other, found", problems, REMEDY)
    values = {key: (path, rank) for key, (path, rank, _) in found.values.items()}
    return Merged(found.tensors, found.held, found.compared, values)


class _Merging:
    def __init__(self, take_first: Sequence[str]) -> None:
        self.take_first = take_first
        self.tensors: dict[str, Described] = {}
        self.values: dict[str, tuple[Path, int, str]] = {}
        self.held: list[list[Held]] = []
        self.compared: list[list[bool]] = []
        self.problems: list[str] = []
        self.first: dict[str, int] = {}
        self.holder: dict[tuple[str, Box], int] = {}

    def tensor(self, rank: int, path: Path, dtype: str, shape: tuple[int, ...], box: Any) -> Held:
        key, described = key_of(path), Described(path, dtype, shape)
        known = self.tensors.setdefault(key, described)
        first = self.first.setdefault(key, rank)
        if known != described:
            self.problems.append(
                f"{key}: {known.dtype} {known.shape} on rank {first}, {dtype} {shape} on rank {rank}"
                if known.path == path
                else f"{key}: at {list(known.path)} on rank {first}, at {list(path)} on rank {rank}"
            )
        if key in self.values:
            self.problems.append(f"{key}: a value on rank {self.values[key][1]}, a tensor on rank {rank}")
        if box is None:  # on a mesh that this rank is no part of
            return Held(key, Box((0,) * len(shape), (0,) * len(shape)), 0)
        part = Box(tuple(box[0]), tuple(box[1]))
        holder = self.holder.setdefault((key, part), rank)
        if holder != rank and matches(key, self.take_first):
            return Held(key, part, 0)  # another rank's is taken, whatever this one has
        return Held(key, part, part.numel * itemsize(dtype))

    def value(self, rank: int, path: Path, digest: str) -> None:
        key = key_of(path)
        known = self.values.setdefault(key, (path, rank, digest))
        if known[2] != digest and not matches(key, self.take_first):
            self.problems.append(f"{key}: one value on rank {known[1]}, another on rank {rank}")
        if key in self.tensors:
            self.problems.append(f"{key}: a tensor on rank {self.first[key]}, a value on rank {rank}")

    def coverage(self) -> list[str]:
        boxes: dict[str, set[Box]] = {key: set() for key in self.tensors}
        for parts in self.held:
            for part in parts:
                if part.nbytes:
                    boxes[part.key].add(part.box)
        problems = []
        for key, described in self.tensors.items():
            if problem := coverage_problem(described.shape, boxes[key]):
                problems.append(f"{key} {described.shape}: {problem}")
        return problems
