"""Several checkpoints in one folder: which is the newest, and which go. By the number at the end of their names."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from .directory import LOCK_NAME, POINTER_NAME, generations, read_pointer, remove_generation
from .errors import CheckpointBusy, CheckpointDamaged
from .files import Folder, doing

_NUMBER = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})", re.ASCII | re.DOTALL)


def numbered(folder: str) -> list[tuple[int, str]]:
    """(number, path) of the directories in `folder` whose names end in a number, rising; links are left out."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(re_match, f"{folder}/{name}") for name in names if (re_match := _NUMBER.fullmatch(name))]
    return sorted((int(match[1]), path) for match, path in found if os.path.isdir(path) and not os.path.islink(path))


def latest(folder: str, is_complete: Callable[[str], bool]) -> Path | None:
    """The complete one of the greatest number."""
    for _, path in reversed(numbered(folder)):
        if is_complete(path):
            return Path(path)
    return None


def retain(folder: str, keep_last: int, keep_every: int | None, is_complete: Callable[[str], bool]) -> list[Path]:
    """Delete what is older and not to be kept; see `fullshard.checkpoint.retain`."""
    if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1:
        raise ValueError(f"keep_last: expected an int >= 1, so that one checkpoint stays, found {keep_last!r}")
    if keep_every is not None and (isinstance(keep_every, bool) or not isinstance(keep_every, int) or keep_every < 1):
        raise ValueError(f"keep_every: expected an int >= 1 or None, found {keep_every!r}")
    found = numbered(folder)
    complete = [(number, path) for number, path in found if is_complete(path)]
    if not complete:
        return []
    keep = {path for _, path in complete[-keep_last:]}
    newest = complete[-1]
    gone = []
    for number, path in found:
        if path in keep or (number, path) > newest or (keep_every is not None and number % keep_every == 0):
            continue
        with doing(f"removing {path}"):
            if _remove(path):
                gone.append(Path(path))
    return gone


def _remove(path: str) -> bool:
    """Remove a checkpoint, or what is left of a save: the pointer first, so that it is none from then on. False where
    nothing of it is ours, or somebody saves to it."""
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
