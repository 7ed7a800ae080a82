"""The choice of checkpoints that stay in a folder, and the removal of the others, by which a kill leaves a whole one or
none.

    runs/x/step-100/             a checkpoint: the number at the end of its name is its step
    runs/x/.removed-step-40/     one that is being removed, or the rest of a removal that was killed

A removal renames the directory first. From then on nothing lists or loads it, and the next call removes what is left.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from . import bucket
from .directory import (
    LOCK_NAME,
    NEXT_POINTER,
    POINTER_NAME,
    generations,
    pointer_number,
    read_pointer,
    remove_generation,
)
from .errors import CheckpointBusy, CheckpointDamaged
from .files import Folder, doing
from .store import Store, is_url

MODES = ("min", "max")
_REMOVED = ".removed-"
_NUMBER = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})", re.ASCII | re.DOTALL)


class CheckpointInfo(NamedTuple):
    """A checkpoint in a folder of them. `path`: of a URL, a string. `step`: the number at the end of its name.
    `problem`: why it is not whole, by its pointer, manifest and sizes; None if it is. The other fields are empty where
    they cannot be read.

    `nbytes`: of its files. `layout`: how it was saved, for people. `saved_at`: seconds since 1970, by the clock of the
    file system. `metrics`: those that its save recorded."""

    path: Path | str
    step: int
    problem: str | None = None
    nbytes: int = 0
    layout: str = ""
    saved_at: float | None = None
    metrics: Mapping[str, float] = {}

    @property
    def whole(self) -> bool:
        return self.problem is None


class Rule(NamedTuple):
    """The rule of what stays: the `last` newest, those whose step `every` divides, and the `best` by `metric`."""

    last: int
    every: int | None = None
    best: int | None = None
    metric: str | None = None
    mode: str = "min"

    def problem(self) -> str | None:
        """The reason why it is no rule; None if it is one."""
        for name, value in (("keep_last", self.last), ("keep_every", self.every), ("keep_best", self.best)):
            needed = name == "keep_last"
            if (value is not None or needed) and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                wanted = "an int >= 1, so that one checkpoint stays" if needed else "an int >= 1 or None"
                return f"{name}: expected {wanted}, found {value!r}"
        if self.mode not in MODES:
            return f"mode: expected one of {', '.join(MODES)}, found {self.mode!r}"
        if (self.best is None) != (self.metric is None):
            return f"keep_best and metric: expected both or neither, found {self.best!r} and {self.metric!r}"
        if self.metric is not None and not isinstance(self.metric, str):
            return f"metric: expected the name of a metric that saves recorded, found {self.metric!r}"
        return None


def kept(found: Sequence[CheckpointInfo], rule: Rule) -> dict[Path | str, str]:
    """The ones of `found` that stay by `rule`, each with the reason. Only whole ones count for it.

    Whatever is newer than the newest whole one stays too, and everything stays where none is whole. Of equal metrics
    the newer checkpoint is better; one without the metric, or with NaN, is none of the best.

    >>> found = [CheckpointInfo(Path(f"step-{n}"), n, metrics={"loss": abs(n - 3)}) for n in range(1, 6)]
    >>> list(kept(found, Rule(last=1, every=4, best=1, metric="loss")).values())
    ['newest', 'every', 'best']
    """
    whole = sorted((one for one in found if one.whole), key=lambda one: (one.step, str(one.path)))
    if not whole:
        return {one.path: "none is whole" for one in found}
    newest = whole[-1]
    stays = {one.path: "newest" for one in whole[-rule.last :]}
    stays |= {one.path: "newer" for one in found if (one.step, str(one.path)) > (newest.step, str(newest.path))}
    if rule.every is not None:
        for one in whole:
            if one.step % rule.every == 0:
                stays.setdefault(one.path, "every")
    if rule.best is not None and rule.metric is not None:
        measured = [(one.metrics[rule.metric], one) for one in whole if rule.metric in one.metrics]
        measured = [(value, one) for value, one in measured if not math.isnan(value)]
        sign = 1 if rule.mode == "min" else -1
        measured.sort(key=lambda pair: (sign * pair[0], -pair[1].step))
        for _, one in measured[: rule.best]:
            stays.setdefault(one.path, "best")
    return stays


def number_in(name: str) -> int | None:
    """The number at the end of the name of a checkpoint."""
    match = _NUMBER.fullmatch(name)
    return None if match is None else int(match[1])


def numbered(folder: str) -> list[tuple[int, str]]:
    """(number, path) of the directories in `folder` whose names end in a number, ascending; links are skipped."""
    if is_url(folder):
        inner = [name for name, size in Store(folder).names().items() if size is None]
        return sorted((int(match[1]), f"{folder}/{name}") for name in inner if (match := _NUMBER.fullmatch(name)))
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    names = [name for name in names if not name.startswith(_REMOVED)]
    found = [(int(match[1]), f"{folder}/{name}") for name in names if (match := _NUMBER.fullmatch(name))]
    return sorted((number, path) for number, path in found if os.path.isdir(path) and not os.path.islink(path))


# ---- in use ----------------------------------------------------------------------------------------------------------

_used: Counter[str] = Counter()
_LOCK = threading.Lock()


@contextlib.contextmanager
def using(path: str) -> Iterator[None]:
    """No thread of this process removes the checkpoint at `path` inside: it is being loaded, or files of it are being
    linked."""
    key = os.path.realpath(path)
    with _LOCK:
        _used[key] += 1
    try:
        yield
    finally:
        with _LOCK:
            _used[key] -= 1
            if not _used[key]:
                del _used[key]


def is_used(path: str) -> bool:
    """Whether a thread of this process is `using` it."""
    with _LOCK:
        return os.path.realpath(path) in _used


# ---- removal ---------------------------------------------------------------------------------------------------------


def remove(path: str) -> bool:
    """Remove a checkpoint, or the rest of a save that was killed. False if nothing in it is ours, if a save is writing
    to it or something in this process uses it, or if another process removes it at the same time.

    A directory that also contains what is not ours stays, with that, and is no checkpoint from the first step on.
    """
    if is_used(path):
        return False
    if is_url(path):
        return bucket.remove(path)
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(Folder.open(path))
        except FileNotFoundError:
            return False
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
        if not _is_ours(folder):
            _empty(folder)
            return True
        parent = stack.enter_context(Folder.open(os.path.dirname(path)))
        name = _REMOVED + os.path.basename(path)
        clear_rest(parent, name)
        try:
            os.rename(os.path.basename(path), name, src_dir_fd=parent.fd, dst_dir_fd=parent.fd)
        except FileNotFoundError:  # another process did so since this one opened it
            return False
        parent.sync()
        _empty(folder)
        os.rmdir(name, dir_fd=parent.fd)
    return True


def clear_rests(folder: str, found: Sequence[CheckpointInfo]) -> None:
    """Remove what removals that were killed left in `folder`. In a store that is `found` as an unfinished save, but for
    uploads of which nothing is visible yet."""
    if is_url(folder):
        newest = max((one.step for one in found if one.whole), default=0)
        bucket.clear_uploads(folder, newest, number_in)
        return
    try:
        parent = Folder.open(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with parent:
        for name in parent.names():
            if name.startswith(_REMOVED) and _NUMBER.fullmatch(name):
                with doing(f"removing {folder}/{name}"):
                    clear_rest(parent, name)


def clear_rest(parent: Folder, name: str) -> None:
    """Remove the rest `name` of a removal, if there is one; what is not ours in it stays."""
    try:
        found = os.stat(name, dir_fd=parent.fd, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            return
        # The name is our own; it need not be one of a file that a manifest may have.
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with Folder(f"{parent.path}/{name}", os.open(name, flags, dir_fd=parent.fd)) as rest:
            _empty(rest)
            left = bool(rest.names())
        if not left:
            os.rmdir(name, dir_fd=parent.fd)
    except FileNotFoundError:
        return  # another process removed it


def _is_ours(folder: Folder) -> bool:
    """Whether everything in it was written by saves."""
    known = {POINTER_NAME, NEXT_POINTER, LOCK_NAME}
    for name in generations(folder):
        with folder.sub(name) as inner:
            files = inner.names()
            if not all(stat.S_ISREG(os.stat(n, dir_fd=inner.fd, follow_symlinks=False).st_mode) for n in files):
                return False
        known.add(name)
    return not {name for name in folder.names() if pointer_number(name) is None} - known


def _empty(folder: Folder) -> None:
    """Remove all that is ours in it: the pointer first, so that it is no checkpoint from then on."""
    numbered = [name for name in folder.names() if pointer_number(name) is not None]
    for name in (POINTER_NAME, NEXT_POINTER, *numbered):
        with contextlib.suppress(FileNotFoundError):
            folder.remove(name)
            folder.sync()
    for name in list(generations(folder)):
        with contextlib.suppress(FileNotFoundError):
            remove_generation(folder, name)
    with contextlib.suppress(FileNotFoundError):
        folder.remove(LOCK_NAME)
