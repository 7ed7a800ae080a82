"""The functions of `fullshard.checkpoint`: saving, loading, inspecting; several checkpoints in one folder, by the
numbers at the end of their names; and random state by step."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..comm import Messenger, alone, messenger
from ..policy.arguments import (
    expect,
    expect_dict,
    expect_flag,
    expect_group,
    expect_keys,
    expect_state,
    expect_text,
    expect_whole,
)
from .background import background
from .directory import LOCK_NAME, POINTER_NAME, generations, open_folder, read_current, read_pointer, remove_generation
from .errors import CheckpointBusy, CheckpointDamaged, CheckpointError
from .files import Folder, doing
from .loading import CheckpointReader, LoadJob, LoadOptions, Rename
from .manifest import Manifest
from .saving import SaveJob, snapshot
from .state import flatten

_NUMBER = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})", re.ASCII | re.DOTALL)

Location = str | os.PathLike[str]


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Location,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    take_first: Sequence[str] = (),
) -> str:
    """Save `state_dict` to the shared directory `checkpoint_id`; every rank of `process_group` calls it.

    `state_dict`: nested dicts of tensors (DTensors: each rank's part; plain tensors: equal on all ranks that have
    them), of None, bool, int, float, str, lists, tuples and dicts of these, and of objects with `state_dict` and
    `load_state_dict`. Keys may be on some ranks only. A tokenizer among them (any object with `save_pretrained`) is
    stored as its files, like the configuration of a model of transformers whose state `get_state_dict` took; `load`
    passes over them, and `fullshard checkpoint export --to hf` writes them. `no_dist`: this process alone, whatever
    groups exist. `take_first`: key patterns (* matches anything) for which the lowest rank's state is saved if ranks
    differ.

    Returns the directory of the new generation. An existing checkpoint is replaced atomically at the end; until then,
    and after any error, it is unchanged. Raises on all ranks: `CheckpointMismatch` for state that cannot be saved or
    differs between ranks, `CheckpointIOError`, `CheckpointBusy`.
    """
    path, first = _location(checkpoint_id), tuple(expect_keys("take_first", take_first))
    expect_dict("state_dict", state_dict)
    found = _messenger(process_group, no_dist)
    background(found).settle(found, path)
    with found.telling(f"saving {path}"):
        taken = snapshot(flatten(state_dict), companions=found.rank == 0)
    return SaveJob(path, found, first).run(taken)


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Location,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    take_first: Sequence[str] = (),
) -> Future[str]:
    """`save` in the background: the call returns when the state is copied to the host; a thread does the rest.

    Arguments and guarantees are those of `save`. The future's `result()` waits, and returns the directory of the
    generation or raises the failure, the same on all ranks. A failure that nobody asked for is raised by the group's
    next save, by `close()`, and at the end of the process, which then exits with status 1. One save runs at a time: the
    next one waits. The memory of the copy is kept for the next save; `close()` frees it.
    """
    path, first = _location(checkpoint_id), tuple(expect_keys("take_first", take_first))
    expect_dict("state_dict", state_dict)
    found = _messenger(process_group, no_dist)
    return background(found).start(state_dict, path, found, first)


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Location,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    cast: bool = False,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    on_some_ranks: Sequence[str] = (),
    rename: Rename | None = None,
    manifest_sha256: str | None = None,
) -> None:
    """Load the checkpoint in `checkpoint_id` into `state_dict`, in place; every rank of `process_group` calls it.

    Tensors are written in place, in any placement and on any number of ranks; values are replaced. Everything is read
    and checked before anything is written: on an error, which all ranks raise, nothing has changed. Meanwhile it needs
    host memory for this rank's part of the state.

    cast: floating tensors may be stored in another floating dtype
    allow_missing, allow_unexpected: keys of the state that may be absent from the checkpoint, and the reverse;
        * matches anything
    on_some_ranks: keys that only some ranks ask for, besides those of tensors on meshes of other ranks and of ranks
        that each have keys of their own
    rename: from keys of the state to keys of the checkpoint, a mapping or a function; an optimizer's state is looked up
        by parameter (`optimizer.state.layers.0.weight`)
    manifest_sha256: the digest of the manifest from a trusted source; it rules out any modification

    Raises `CheckpointNotFound`, `CheckpointMismatch` (listing all keys, shapes and dtypes that do not fit),
    `CheckpointDamaged`, `CheckpointIOError`.
    """
    expect_flag("cast", cast)
    expect_digest(manifest_sha256)
    renames = rename is None or callable(rename) or isinstance(rename, Mapping)
    expect("rename", renames, "a mapping or a function", rename, "leave it out for none")
    path = _location(checkpoint_id)
    expect_dict("state_dict", state_dict)
    missing = tuple(expect_keys("allow_missing", allow_missing))
    unexpected = tuple(expect_keys("allow_unexpected", allow_unexpected))
    some = tuple(expect_keys("on_some_ranks", on_some_ranks))
    options = LoadOptions(cast, missing, unexpected, rename, manifest_sha256, some)
    found = _messenger(process_group, no_dist)
    background(found).wait()
    LoadJob(path, found, options).run(state_dict)


# ---- inspecting, in one process --------------------------------------------------------------------------------


def inspect(checkpoint_id: Location, *, manifest_sha256: str | None = None) -> Manifest:
    """The contents of a checkpoint: keys, dtypes, shapes, files, values. Reads no data. One process alone."""
    expect_digest(manifest_sha256)
    path = _location(checkpoint_id)
    with doing(f"inspecting {path}"), open_folder(path) as folder:
        return read_current(folder, manifest_sha256).manifest


def is_complete(checkpoint_id: Location) -> bool:
    """Whether a save to `checkpoint_id` completed and its files have their sizes; `verify` also reads them."""
    path = _location(checkpoint_id)
    try:
        with open_checkpoint(path) as found:
            return found.sizes_problem() is None
    except (CheckpointError, OSError):
        return False


def verify(checkpoint_id: Location, *, manifest_sha256: str | None = None) -> Manifest:
    """Read every byte of a checkpoint and compare it with its checksum. One process alone. Raises `CheckpointDamaged`
    or `CheckpointNotFound`."""
    expect_digest(manifest_sha256)
    with doing(f"verifying {checkpoint_id}"), open_checkpoint(checkpoint_id, manifest_sha256=manifest_sha256) as found:
        found.verify()
        return found.manifest


def open_checkpoint(checkpoint_id: Location, *, manifest_sha256: str | None = None) -> CheckpointReader:
    """A checkpoint from which one process reads tensors, one after another; use it in a `with` block."""
    expect_digest(manifest_sha256)
    path = _location(checkpoint_id)
    with doing(f"opening {path}"), open_folder(path) as folder:
        found = read_current(folder, manifest_sha256)
        try:
            generation = folder.sub(found.pointer.generation)
        except FileNotFoundError:
            raise CheckpointDamaged(f"{path}: its generation {found.pointer.generation} disappeared") from None
    return CheckpointReader(generation, found.manifest)


# ---- several checkpoints in one folder -------------------------------------------------------------------------


def latest(folder: Location) -> Path | None:
    """The complete checkpoint in `folder` whose name ends in the greatest number (`step-100`); None without one.

    Not by times, because clocks jump. Incomplete checkpoints are skipped.
    """
    for _, path in reversed(_numbered(_location(folder, "folder"))):
        if is_complete(path):
            return Path(path)
    return None


def set_aside(checkpoint_id: Location) -> Path:
    """Rename a damaged checkpoint, `step-40` to `step-40.damaged` (or `step-40.2.damaged`); returns the new path.

    `latest` and `retain` no longer find it, its place is free for another save, and nothing is deleted: rename it back
    when its files were restored. One process alone. Raises `CheckpointNotFound` for no directory, `CheckpointBusy`
    while a save writes to it, `CheckpointIOError`.
    """
    path = os.path.normpath(_location(checkpoint_id))
    with doing(f"setting {path} aside"), open_folder(path) as folder:
        lock = folder.lock(LOCK_NAME)
        try:
            names = (
                f"{path}{number}.damaged" for number in itertools.chain([""], (f".{n}" for n in itertools.count(2)))
            )
            free = next(name for name in names if not os.path.lexists(name))
            os.rename(path, free)
        finally:
            if lock is not None:
                os.close(lock)
        with Folder.open(os.path.dirname(os.path.abspath(path))) as parent:
            parent.sync()
    return Path(free)


def retain(folder: Location, *, keep_last: int, keep_every: int | None = None) -> list[Path]:
    """Delete old checkpoints in `folder`; returns the deleted ones. One process alone.

    It keeps the `keep_last` newest complete ones (by the number at the end of their names), those whose number is a
    multiple of `keep_every`, everything newer than the newest complete one, anything that is not a fullshard
    checkpoint, and any checkpoint that a save is writing to. It deletes only files that fullshard wrote.
    """
    path = _location(folder, "folder")
    if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1:
        raise ValueError(f"keep_last: expected an int >= 1, so that one checkpoint stays, found {keep_last!r}")
    if keep_every is not None and (isinstance(keep_every, bool) or not isinstance(keep_every, int) or keep_every < 1):
        raise ValueError(f"keep_every: expected an int >= 1 or None, found {keep_every!r}")
    found = _numbered(path)
    complete = [one for one in found if is_complete(one[1])]
    gone = []
    for number, each in found:
        newer = not complete or (number, each) > complete[-1]
        if newer or (number, each) in complete[-keep_last:] or (keep_every is not None and number % keep_every == 0):
            continue
        with doing(f"removing {each}"):
            if _remove(each):
                gone.append(Path(each))
    return gone


def _numbered(folder: str) -> list[tuple[int, str]]:
    """(number, path) of the directories in `folder` whose names end in a number, ascending; links are skipped."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(int(match[1]), f"{folder}/{name}") for name in names if (match := _NUMBER.fullmatch(name))]
    return sorted((number, path) for number, path in found if os.path.isdir(path) and not os.path.islink(path))


def _remove(path: str) -> bool:
    """Remove a checkpoint, or the remains of a save: the pointer first, so that it stops being one at once. False if
    none of it is ours, or if a save is writing to it."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(Folder.open(path))
        try:
            pointed = read_pointer(folder) is not None
        except CheckpointDamaged:
            return False
        if not pointed and not any(generations(folder)):
            return False
        try:
            lock = folder.lock(LOCK_NAME)
        except CheckpointBusy:
            return False
        if lock is not None:
            stack.callback(os.close, lock)
        if pointed:
            folder.remove(POINTER_NAME)
            folder.sync()
        for name in list(generations(folder)):
            remove_generation(folder, name)
        folder.remove(LOCK_NAME)
        if folder.names():
            return True
    with Folder.open(os.path.dirname(path)) as parent:
        os.rmdir(path)
        parent.sync()
    return True


# ---- random state ----------------------------------------------------------------------------------------------


def derived_seed(seed: int, step: int, rank: int, purpose: str = "") -> int:
    """A 63-bit number that depends only on the arguments, not on processes or versions.

    >>> derived_seed(0, 1, 0) == derived_seed(0, 0, 1)
    False
    """
    for name, number in (("seed", seed), ("step", step), ("rank", rank)):
        expect_whole(name, number)
    expect_text("purpose", purpose)
    text = f"fullshard {seed} {step} {rank} {purpose}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class RandomState:
    """The generators of this process, by step: random state is a function of (seed, step, rank), defined for any world,
    so none of it has to be stored. It has `state_dict` and `load_state_dict`, and can be saved as it is.

        random = RandomState(seed=0)
        for step in range(start, steps):
            random.begin(step)  # dropout, augmentation, ... of this step on this rank
            ...
        save({..., "random": random}, checkpoint_id=...)

    Generator state in the middle of a step is meaningless on another number of ranks, so every step begins by seeding.

    `rank`: the stream of this process; by default its rank in the default process group. Ranks that must draw the same
    numbers (those of one tensor-parallel group) pass the same.
    """

    def __init__(self, seed: int, rank: int | None = None) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed: expected an int, found {seed!r}")
        self.seed, self._rank = seed, None if rank is None else expect_whole("rank", rank, 0)
        self.step: int | None = None

    def begin(self, step: int) -> None:
        """Seed the generators of torch (the host's and all CUDA devices'), of `random`, and of numpy if it is imported,
        for `step` on this rank."""
        expect_whole("step", step)
        self.step = step
        rank = self._rank
        if rank is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        torch.manual_seed(derived_seed(self.seed, step, rank))
        random.seed(derived_seed(self.seed, step, rank, "random"))
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(derived_seed(self.seed, step, rank, "numpy") % 2**32)

    def state_dict(self) -> dict[str, Any]:
        """The seed and the last step that began; the same on all ranks."""
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the stored seed. The stored step is seeded again; the next `begin` sets the next one."""
        expect_state("state", state, {"seed", "step"})
        self.seed, step = state["seed"], state["step"]
        if step is not None:
            self.begin(step)


# ---- arguments -------------------------------------------------------------------------------------------------


def _location(given: Location, argument: str = "checkpoint_id") -> str:
    fits = isinstance(given, (str, os.PathLike)) and bool(str(given))
    expect(argument, fits, "the path of a directory", given, "pass a string or a Path")
    return os.path.abspath(os.fspath(given))


def expect_digest(manifest_sha256: object) -> None:
    expect_text("manifest_sha256", manifest_sha256, "64 hexadecimal digits or None", or_none=True)


def _messenger(process_group: dist.ProcessGroup | None, no_dist: bool) -> Messenger:
    expect_group("process_group", process_group)
    return alone() if expect_flag("no_dist", no_dist) else messenger(process_group)
