"""The functions of `fullshard.checkpoint`: saving, loading, inspecting; several checkpoints in one folder, by the
numbers at the end of their names; and random state by step."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..comm import Messenger, alone, messenger
from ..peers import shown_ranks, variants
from ..policy.arguments import (
    expect,
    expect_callable,
    expect_dict,
    expect_flag,
    expect_group,
    expect_keys,
    expect_state,
    expect_text,
    expect_whole,
)
from . import bucket
from .agreement import Heard, Message, agree
from .background import SaveFuture, background
from .companions import METRICS, ROOM, metrics_of
from .directory import LOCK_NAME, generations, open_folder, pointer_number, reach, read_current
from .errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointNotFound
from .files import Folder, doing
from .loading import LoadJob, LoadOptions, Rename
from .local_first import RecoverJob
from .manifest import MANIFEST_NAME, Manifest, encode
from .plan import KeyPath, key_of
from .reading import CheckpointReader, Progress
from .retention import CheckpointInfo, clear_rests, kept, numbered, remove, using
from .retention import Rule as Retained
from .rules import Rule
from .saving import SaveJob, SaveOptions, Snapshot, snapshot
from .state import Tree, flatten
from .store import is_url, location

Location = str | os.PathLike[str]


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Location,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    take_first: Sequence[str] = (),
    metrics: Mapping[str, float] | None = None,
    base: Location | None = None,
    progress: Progress | None = None,
) -> str:
    """Save `state_dict` to `checkpoint_id`, a directory that all ranks share or a URL of an object store
    (`s3://bucket/run/step-100`); every rank of `process_group` calls it.

    `state_dict`: nested dicts of tensors (DTensors: each rank's part; plain tensors: equal on all ranks that have
    them), of None, bool, int, float, str, lists, tuples and dicts of these, and of objects with `state_dict` and
    `load_state_dict`. Keys may be on some ranks only. A tokenizer among them (any object with `save_pretrained`) is
    stored as its files, like the configuration of a model of transformers whose state `get_state_dict` took; `load`
    passes over them, and `fullshard checkpoint export --to hf` writes them. `no_dist`: this process alone, whatever
    groups exist. `take_first`: key patterns (* matches anything) for which the lowest rank's state is saved if ranks
    differ. `metrics`: numbers by name, of which those of the first rank are recorded, for `retain` and
    `list_checkpoints`. `base`: an earlier checkpoint, whose files of frozen parameters are linked instead of written
    where they have the same bytes; afterwards either can be deleted. `progress`: called on this rank, by any thread,
    with the bytes that it has written so far and those that it writes in all.

    Returns the directory of the new generation. An existing checkpoint is replaced atomically at the end; until then,
    and after any error, it is unchanged. Raises on all ranks: `CheckpointMismatch` for state that cannot be saved or
    differs between ranks, `CheckpointIOError`, `CheckpointBusy`; before anything is written, if the files do not fit on
    the file system, or if a host does not see the directory of the first rank.
    """
    path, first, numbers = _location(checkpoint_id), tuple(expect_keys("take_first", take_first)), _numbers(metrics)
    earlier = _earlier(base, path)
    expect_dict("state_dict", state_dict)
    _expect_progress(progress)
    found = _messenger(process_group, no_dist)
    background(found).settle(found, f"saving {path}")
    with found.telling(f"saving {path}"):
        taken = _taken(flatten(state_dict), found, numbers)
    return SaveJob(path, found, SaveOptions(first, earlier, progress)).run(taken)


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Location,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    take_first: Sequence[str] = (),
    metrics: Mapping[str, float] | None = None,
    base: Location | None = None,
    staging_nbytes: int | None = None,
    queue: bool = False,
    progress: Progress | None = None,
    local: Location | None = None,
) -> SaveFuture:
    """`save` in the background: the call returns when the state is copied to the host; a thread does the rest.

    Arguments and guarantees are those of `save`. The future's `result()` waits, and returns the directory of the
    generation or raises the failure, the same on all ranks. A failure that was not read is raised by the group's
    next save, by `wait()`, by `close()`, and at the end of the process, which then exits with status 1. The memory of
    the copy (pinned for a device) is kept for the next save; `close()` frees it.

    staging_nbytes: the most bytes of this rank's state that are copied; None for all of it. The call also waits until
        what does not fit was written. The future's `waited` says how long the call took, and for what.
    queue: one save may wait for the one that runs, with a copy of its own (twice the memory), and the call for that
        does not wait. Otherwise, and with one that waits, the call first waits for the end of the oldest. Where a
        process group has no connections of its own (backends of tests) it has no effect.
    local: for a save to an object store, a directory of this host for this run, which may be another one on each host:
        the files are written there first, and removed when the save has committed. `recover` finishes one that a crash
        interrupted after that.
    """
    path, first, numbers = _location(checkpoint_id), tuple(expect_keys("take_first", take_first)), _numbers(metrics)
    earlier = _earlier(base, path)
    expect_dict("state_dict", state_dict)
    _expect_progress(progress)
    disk = _disk(local, path)
    bound = None if staging_nbytes is None else expect_whole("staging_nbytes", staging_nbytes, 0)
    found = _messenger(process_group, no_dist)
    calls = messenger(process_group, "checkpoint call") if expect_flag("queue", queue) and found.is_own else None
    calls = found if queue and found.group is None else calls
    return background(found).start(
        state_dict,
        lambda tree: _taken(tree, found, numbers),
        SaveJob(path, found, SaveOptions(first, earlier, progress, disk)),
        staging_nbytes=bound,
        calls=calls,
    )


def wait(*, process_group: dist.ProcessGroup | None = None, no_dist: bool = False) -> None:
    """Wait for the saves in the background of `process_group`; every rank calls it. Raises, on all ranks, the failure
    of one that some rank has not asked for. `close` does the same for all groups, by this process alone."""
    found = _messenger(process_group, no_dist)
    background(found).settle(found, "waiting for saves")


def _taken(tree: Tree, found: Messenger, numbers: dict[str, float]) -> Snapshot:
    taken = snapshot(tree, companions=found.rank == 0)
    if numbers and found.rank == 0:
        path: KeyPath = (ROOM, METRICS)
        taken.values[key_of(path)] = path, encode(numbers)
    return taken


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
    progress: Progress | None = None,
) -> None:
    """Load the checkpoint in `checkpoint_id` into `state_dict`, in place; every rank of `process_group` calls it.

    Tensors are written in place, in any placement and on any number of ranks; values are replaced. Everything is read
    and checked before anything is written: on an error, which all ranks raise, nothing has changed. Meanwhile
    this rank's part of the files is in locked pages of the page cache, or, where pages cannot be locked (`ulimit -l`,
    network file systems), in host memory of its own.

    cast: floating tensors may be stored in another floating dtype
    allow_missing, allow_unexpected: keys of the state that may be absent from the checkpoint, and the reverse;
        * matches anything
    on_some_ranks: keys that only some ranks ask for, besides those of tensors on meshes of other ranks and of ranks
        that each have keys of their own
    rename: from keys of the state to keys of the checkpoint, a mapping or a function; an optimizer's state is looked up
        by parameter (`optimizer.state.layers.0.weight`)
    manifest_sha256: the digest of the manifest from a trusted source; it rules out any modification
    progress: called on this rank with the bytes read so far, and those that it reads in all

    Raises `CheckpointNotFound`, `CheckpointMismatch` (listing all keys, shapes and dtypes that do not fit),
    `CheckpointDamaged`, `CheckpointIOError`.
    """
    expect_flag("cast", cast)
    expect_digest(manifest_sha256)
    _expect_progress(progress)
    renames = rename is None or callable(rename) or isinstance(rename, Mapping)
    expect("rename", renames, "a mapping or a function", rename, "leave it out for none")
    path = _location(checkpoint_id)
    expect_dict("state_dict", state_dict)
    missing = tuple(expect_keys("allow_missing", allow_missing))
    unexpected = tuple(expect_keys("allow_unexpected", allow_unexpected))
    some = tuple(expect_keys("on_some_ranks", on_some_ranks))
    options = LoadOptions(cast, missing, unexpected, rename, manifest_sha256, some, progress)
    found = _messenger(process_group, no_dist)
    background(found).wait()
    with using(path):
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


def latest(folder: Location) -> Path | str | None:
    """The complete checkpoint in `folder` whose name ends in the greatest number (`step-100`); None without one.

    Not by times, because clocks jump. Incomplete checkpoints are skipped.
    """
    for _, path in reversed(numbered(_location(folder, "folder"))):
        if is_complete(path):
            return _named(path)
    return None


def recover(
    folder: Location,
    *,
    local: Location | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> Path | str | None:
    """The newest complete checkpoint in `folder`, as `latest`, the same on all ranks; every rank of `process_group`
    calls it, before the first save of a run.

    `local`: the directory of this host that `async_save` was given. If hosts have on their disks what a newer save to
    the URL `folder` still lacks there, they send it, and that one is the newest: whatever the number of ranks is now,
    and whichever of them can read a file. What is not needed any more is removed from the disks. Raises
    `CheckpointIOError`, `CheckpointDamaged`, and `CheckpointError` where ranks differ.
    """
    path = _location(folder, "folder")
    disk = None if local is None else _disk(local, path)
    found = _messenger(process_group, no_dist)
    background(found).wait()
    newest = RecoverJob(path, found, disk, is_complete).run()
    return None if newest is None else _named(newest)


def set_aside(checkpoint_id: Location) -> Path | str:
    """Rename a damaged checkpoint, `step-40` to `step-40.damaged` (or `step-40.2.damaged`); returns the new path.

    `latest` and `retain` no longer find it, its place is free for another save, and nothing is deleted: rename it back
    when its files were restored. One process alone. Raises `CheckpointNotFound` for no directory, `CheckpointBusy`
    while a save writes to it, `CheckpointIOError`.
    """
    path = _location(checkpoint_id)
    if is_url(path):
        with doing(f"setting {path} aside"):
            return bucket.set_aside(path)
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


def list_checkpoints(folder: Location) -> list[CheckpointInfo]:
    """The checkpoints in `folder`, ascending by the number at the end of their names; those that are damaged and the
    rests of saves too, with the problem. Reads pointers, manifests and sizes. One process alone."""
    found = (_info(step, path) for step, path in numbered(_location(folder, "folder")))
    return [info for info in found if info is not None]


def retain(
    folder: Location,
    *,
    keep_last: int,
    keep_every: int | None = None,
    keep_best: int | None = None,
    metric: str | None = None,
    mode: str = "min",
    dry_run: bool = False,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = True,
) -> list[Path | str]:
    """Delete old checkpoints in `folder`; returns the deleted ones, with `dry_run` those that it would delete.

    It keeps the `keep_last` newest whole ones (by the number at the end of their names), those whose number is a
    multiple of `keep_every`, the `keep_best` with the smallest (`mode="min"`) or greatest (`"max"`) `metric` that their
    save recorded, everything newer than the newest whole one, anything that is not a fullshard checkpoint, and any
    checkpoint that a save is writing to or that this process is loading. It deletes only files that fullshard wrote. A
    kill leaves a checkpoint whole or invisible; the next call removes the rest.

    One process alone; with `no_dist=False` every rank of `process_group` calls it, the first one looks and deletes, and
    all return the same or raise the same. That waits for a save in the background. Raises `CheckpointMismatch` if ranks
    ask for different things, `CheckpointIOError`.
    """
    path = _location(folder, "folder")
    rule = Retained(keep_last, keep_every, keep_best, metric, mode)
    if (problem := rule.problem()) is not None:
        raise ValueError(problem)
    expect_flag("dry_run", dry_run)
    found = _messenger(process_group, no_dist)
    background(found).wait()
    what = f"removing {path}"

    def decide(heard: Heard) -> Message:
        rules = variants({rank: Retained(*message["rule"]) for ranks, message in heard.groups for rank in ranks})
        if len(rules) > 1:
            problems = [f"{shown_ranks(ranks)}: {each}" for each, ranks in rules.items()]
            raise CheckpointMismatch(f"{what}: expected the same request of all ranks, found", problems)
        return {"gone": _retain(path, rule, dry_run)}

    done = agree(found, what, lambda: {"rule": list(rule)}, decide)
    return [_named(one) for one in done["gone"]]


def _retain(path: str, rule: Retained, dry_run: bool) -> list[str]:
    found = list_checkpoints(path)
    if not dry_run:
        clear_rests(path, found)
    stays = kept(found, rule)
    gone = []
    for info in found:
        if info.path not in stays:
            with doing(f"removing {info.path}"):
                if dry_run or remove(str(info.path)):
                    gone.append(str(info.path))
    return gone


def _info(step: int, path: str) -> CheckpointInfo | None:
    """The facts of the checkpoint in the directory `path`; None if no save of fullshard wrote there."""
    try:
        with open_checkpoint(path) as found:
            manifest = found.manifest
            return CheckpointInfo(
                _named(path),
                step,
                found.sizes_problem(),
                sum(file.nbytes for file in manifest.files),
                _layout(manifest),
                found.folder.saved_at(MANIFEST_NAME),
                metrics_of(manifest),
            )
    except CheckpointNotFound:
        with doing(f"looking at {path}"), reach(path) as folder:
            left = any(generations(folder)) or any(pointer_number(name) for name in folder.names())
            return CheckpointInfo(_named(path), step, "an unfinished save") if left else None
    except (CheckpointError, OSError) as error:
        return CheckpointInfo(_named(path), step, str(error))


def _layout(manifest: Manifest) -> str:
    """How it was saved, for people: "4 ranks, 2 copies of 2 parts", of the largest tensor."""
    text = f"{manifest.world} rank{'s' * (manifest.world > 1)}"
    entry = max(manifest.tensors.values(), key=lambda one: one.nbytes, default=None)
    rule = None if entry is None or manifest.schema == 1 else entry.rule
    if isinstance(rule, Rule) and len(rule.ranks) > 1:
        parts = " x ".join(map(str, rule.sizes)) or "1"
        text += f", {rule.num_replicas} cop{'ies' if rule.num_replicas > 1 else 'y'} of {parts} parts"
    return text


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
    so nothing has to be stored. It has `state_dict` and `load_state_dict`, and can be saved as it is.

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
    expect(argument, fits, "the path of a directory, or a URL", given, "pass a string or a Path")
    return location(given)


def _earlier(base: Location | None, path: str) -> str | None:
    if base is None:
        return None
    earlier = _location(base, "base")
    fits = not is_url(earlier) and not is_url(path)
    expect("base", fits, "two directories, because files are linked", f"{earlier} for {path}", "leave it out")
    return earlier


def _disk(local: Location | None, path: str) -> str | None:
    if local is None:
        return None
    found = _location(local, "local")
    fits = is_url(path) and not is_url(found)
    expect("local", fits, "a directory, for a save to an object store", f"{found} for {path}", "leave it out")
    return found


def _named(path: str) -> Path | str:
    """A path as users get it: a Path would leave out a slash of a URL."""
    return path if is_url(path) else Path(path)


def _numbers(metrics: Mapping[str, float] | None) -> dict[str, float]:
    expect_dict("metrics", metrics, or_none=True)
    for name, value in (metrics or {}).items():
        fits = isinstance(value, Real) and not isinstance(value, bool)
        expect(f"metrics[{name!r}]", fits, "a number", value, "for a tensor pass its item()")
    return {name: float(value) for name, value in (metrics or {}).items()}


def _expect_progress(progress: object) -> None:
    expect_callable("progress", progress, "a function of two numbers or None", or_none=True)


def expect_digest(manifest_sha256: object) -> None:
    expect_text("manifest_sha256", manifest_sha256, "64 hexadecimal digits or None", or_none=True)


def _messenger(process_group: dist.ProcessGroup | None, no_dist: bool) -> Messenger:
    expect_group("process_group", process_group)
    return alone() if expect_flag("no_dist", no_dist) else messenger(process_group)
