"""Saves and removals in an object store, where nothing can be renamed or locked.

    s3://bucket/run/step-100/CURRENT-000002                   the pointer: what CURRENT is in a directory
    s3://bucket/run/step-100/g000002-<save id>/...            the generation that it names

A save writes the files of its generation under their names, and then the pointer, whose number is one more than the
newest, only if there is none of that number: of several savers that began after the same save one commits. The greatest
number counts.

A removal first writes the next pointer, which points to nothing: no reader finds the checkpoint from then on, and no
saver that is still there can commit. Then it removes the other pointers, the generations, and its own at last. No
torch.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial

from .directory import (
    GIVEN_UP,
    POINTER_NAME,
    Pointer,
    Saving,
    generation_number,
    numbered_pointer,
    pointer_number,
    readable_pointer,
)
from .errors import CheckpointBusy, CheckpointDamaged, CheckpointError
from .files import doing
from .manifest import MANIFEST_NAME, is_save_id
from .objects import ObjectFolder
from .store import Store, is_url, side_by_side

_log = logging.getLogger("fullshard")
# The folders of which this process knows that it can save there, with its number.
_proven: set[tuple[int, str]] = set()


def begin(path: str, save_id: str) -> Saving | BucketSaving:
    """A new save, in a directory or an object store."""
    return BucketSaving.begin(path, save_id) if is_url(path) else Saving.begin(path, save_id)


def prove(folder: str) -> None:
    """Raise unless this process can save checkpoints in the URL `folder`; four requests, once."""
    if (os.getpid(), folder) not in _proven:
        Store(folder).prove()
        _proven.add((os.getpid(), folder))


class BucketSaving:
    """One save in progress, on the rank that commits. `name`: the generation that all ranks fill."""

    def __init__(self, folder: ObjectFolder, number: int, save_id: str) -> None:
        self._folder, self._number, self.save_id = folder, number, save_id
        self.name = f"g{number:06d}-{save_id}"
        self._files: list[str] = []
        self._digest = ""
        self._committed = False
        # Whether what was written stays if the save fails: hosts have the rest on their own disks (local_first.py).
        self.can_continue = False

    @classmethod
    def begin(cls, path: str, save_id: str) -> BucketSaving:
        """Look which save is the newest at the URL `path`. Raises `CheckpointIOError` if this process cannot write
        there, `CheckpointError` if the store replaces what it must not."""
        assert is_save_id(save_id)
        with doing(f"beginning a save in {path}"):
            prove(os.path.dirname(path) if "/" in path.partition("://")[2] else path)
            folder = ObjectFolder(path)
            return cls(folder, _newest(folder, folder.names()) + 1, save_id)

    @classmethod
    def again(cls, path: str, name: str, digest: str) -> BucketSaving:
        """A save that another process left, of which the generation `name` has a manifest with that digest."""
        made = cls(ObjectFolder(path), generation_number(name) or 0, name.partition("-")[2])
        made._digest, made.can_continue = digest, True
        return made

    def finish(self, files: Mapping[str, int]) -> None:
        """Commit what was sent, if all `files` have their sizes."""
        found = self.sizes([*files])
        if found != [*files.values()]:
            raise CheckpointError(f"{self._folder.path}/{self.name}: expected {dict(files)}, found sizes {found}")
        self.point()
        self.end()

    def prove_room(self, nbytes: int, num_files: int, largest: int, name: str) -> None:
        """A store has room for what a save writes."""

    def sizes(self, names: list[str]) -> list[int]:
        """Sizes of the files that ranks reported as written."""
        self._files = names
        with self._folder.sub(self.name) as saving:
            try:
                return [saving.nbytes(name) for name in names]
            except FileNotFoundError as error:
                raise CheckpointError(f"{error.strerror}: expected the file that another rank wrote") from None

    def announce(self, manifest: bytes) -> None:
        """Write the manifest, which no reader finds yet."""
        self._digest = hashlib.sha256(manifest).hexdigest()
        with self._folder.sub(self.name) as saving:
            saving.write(MANIFEST_NAME, manifest)

    def commit(self, manifest: bytes) -> str:
        """Make the save the checkpoint; returns the URL of its generation. Its files are written."""
        self.announce(manifest)
        return self.point()

    def point(self) -> str:
        """The second half of `commit`."""
        folder, name = self._folder, numbered_pointer(self._number)
        pointer = Pointer(self.name, self.save_id, self._digest)
        with doing(f"committing {folder.path}"), folder.sub(self.name) as saving:
            if not folder.store.put_if_absent(name, pointer.to_bytes()):
                raise self._other()
            # Saves, and removals, that began and ended since this one began have used this number too.
            numbers = [number for one in folder.names() if (number := pointer_number(one)) is not None]
            if max(numbers) != self._number or {MANIFEST_NAME, *self._files} - set(saving.names()):
                folder.remove(name)
                raise self._other()
        self._committed = True
        return f"{folder.path}/{self.name}"

    def _other(self) -> CheckpointBusy:
        return CheckpointBusy(
            f"{self._folder.path}: expected to be the only saver, found that another save completed meanwhile, or that "
            f"this one was removed as the rest of a killed one"
        )

    def end(self) -> None:
        """Remove what no save needs: after a commit what was before it, killed saves included; else what was written.
        Errors are only logged: the outcome of the save stands."""
        try:
            names = self._folder.names()
            if self._committed:
                names = [name for name in names if (_number(name) or 0) <= self._number]
                names = [name for name in names if name not in (self.name, numbered_pointer(self._number))]
                _give_up_uploads(self._folder, self._number)
            else:
                names = [name for name in names if name == self.name and not self.can_continue]
            _remove(self._folder, names)
        except (OSError, CheckpointError) as error:
            _log.warning("fullshard: %s: could not clear what older saves left: %s", self._folder.path, error)


def remove(path: str) -> bool:
    """Remove the checkpoint at the URL `path`, or the rest of a killed save. False if nothing there is ours, if its
    pointer cannot be read, or if a save commits at this moment."""
    folder = ObjectFolder(path)
    names = [name for name in folder.names() if _number(name) is not None]
    try:
        readable_pointer(folder)
    except CheckpointDamaged:
        return False
    return bool(names) and _give_up(folder, names)


def set_aside(path: str) -> str:
    """Copy the objects of the checkpoint at the URL `path` to another name, within the store, and remove them."""
    folder = ObjectFolder(path)
    names = folder.names()
    places = (f"{path}{number}.damaged" for number in itertools.chain([""], (f".{n}" for n in itertools.count(2))))
    target = next(place for place in places if not Store(place).names())
    files = [f"{name}/{file}" for name in names if generation_number(name) is not None for file in _files(folder, name)]
    side_by_side([partial(folder.store.copy, file, f"{target}/{file}") for file in files])
    for name in names:
        if _number(name) is not None and generation_number(name) is None:
            folder.store.copy(name, f"{target}/{name}")
    _give_up(folder, [name for name in names if _number(name) is not None])
    return target


def _give_up(folder: ObjectFolder, names: list[str]) -> bool:
    """Remove the pointers and generations `names`, which are all. Whether no saver was faster."""
    pointers = [pointer_number(name) or 0 for name in names]
    nothing = numbered_pointer(max(max(pointers) + 1, *(generation_number(name) or 0 for name in names)))
    if not folder.store.put_if_absent(nothing, GIVEN_UP):
        return False
    _give_up_uploads(folder, pointer_number(nothing) or 0)
    _remove(folder, names)
    folder.remove(nothing)
    return True


def _remove(folder: ObjectFolder, names: list[str]) -> None:
    """Remove pointers, and then generations, of each the manifest first: an incomplete one is none."""
    for name in sorted(names):
        if generation_number(name) is None and _number(name) is not None:
            folder.remove(name)
    for name in names:
        if generation_number(name) is not None:
            files = _files(folder, name)
            if MANIFEST_NAME in files:
                folder.store.delete(f"{name}/{MANIFEST_NAME}")
            folder.store.delete_all(f"{name}/{file}" for file in files if file != MANIFEST_NAME)


def clear_uploads(url: str, before: int, number: Callable[[str], int | None]) -> None:
    """Give up the uploads of killed saves in a folder of checkpoints, of which nothing else is there: those whose
    `number`, of their checkpoint's name, is less than `before`."""

    def is_old(name: str) -> bool:
        step = number(name.partition("/")[0])
        return step is not None and step < before

    _end_uploads(Store(url), is_old)


def _give_up_uploads(folder: ObjectFolder, upto: int) -> None:
    """Give up the uploads of generations of at most that number: their saves cannot commit any more."""

    def is_old(name: str) -> bool:
        number = generation_number(name.partition("/")[0])
        return number is not None and number <= upto

    _end_uploads(folder.store, is_old)


def _end_uploads(store: Store, is_old: Callable[[str], bool]) -> None:
    side_by_side([partial(store.give_up, name, upload) for name, upload in store.uploads() if is_old(name)])


def _files(folder: ObjectFolder, generation: str) -> list[str]:
    return [name for name, size in folder.store.names(generation).items() if size is not None]


def _number(name: str) -> int | None:
    """The number of a pointer, 0 for that of a directory, or of a generation; None for what is neither."""
    number = pointer_number(name)
    return 0 if name == POINTER_NAME else generation_number(name) if number is None else number


def _newest(folder: ObjectFolder, names: list[str]) -> int:
    """The greatest number of a pointer. Raises `CheckpointDamaged` for one that cannot be read."""
    pointer = readable_pointer(folder)
    numbers = [number for name in names if (number := pointer_number(name)) is not None]
    return max([*numbers, 0 if pointer is None else pointer.number])
