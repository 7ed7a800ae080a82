"""The directory of a checkpoint from the outside: which generation is current, and how a new one replaces it.

    step-100/CURRENT                     the pointer: {"generation", "save_id", "manifest_sha256"}
    step-100/g000002-<save id>/          the generation that it names
    step-100/.saving-<save id>/          a save in progress
    step-100/LOCK                        held by the saver

A save fills `.saving-*`, syncs it, renames it to the next generation, and replaces CURRENT. The pointer contains the
digest of the manifest, and the manifest those of all other bytes, so a reader finds exactly one save, or an error.

In an object store pointers have numbers (bucket.py), CURRENT-000002, and the greatest counts. Files that were copied
from there to a directory, or the other way round, are read in both.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
import threading
from collections.abc import Iterator
from typing import NamedTuple

from .errors import CheckpointBusy, CheckpointDamaged, CheckpointError, CheckpointNotFound
from .files import Folder, doing
from .limits import Need, problems, refuse, room_in
from .manifest import MANIFEST_NAME, MAX_NBYTES, Manifest, is_save_id, parse, parse_json
from .objects import ObjectFolder
from .store import is_url

POINTER_NAME = "CURRENT"
LOCK_NAME = "LOCK"
NEXT_POINTER = ".CURRENT.next"
# The pointer to nothing, in an object store: a save was removed.
GIVEN_UP = b'{"given_up": true}\n'
_SAVING = ".saving-"
_GENERATION = re.compile(r"g([0-9]{6,12})-([0-9a-f]{32})", re.ASCII)
_NUMBERED = re.compile(r"CURRENT-([0-9]{6,12})", re.ASCII)
_POINTER_NBYTES = 4096
# From how many files on their sizes are asked for by several threads, and how many those are.
_MANY, _LOOKS = 64, 16

_log = logging.getLogger("fullshard")


class Pointer(NamedTuple):
    """The name of the current generation. `digest`: SHA-256 of its manifest, hexadecimal."""

    generation: str
    save_id: str
    digest: str

    def to_bytes(self) -> bytes:
        fields = {"generation": self.generation, "save_id": self.save_id, "manifest_sha256": self.digest}
        return (json.dumps(fields) + "\n").encode()

    @property
    def number(self) -> int:
        return int(self.generation[1:].partition("-")[0])


def numbered_pointer(number: int) -> str:
    """The name of the pointer of that number."""
    return f"{POINTER_NAME}-{number:06d}"


def pointer_number(name: str) -> int | None:
    """The number of the pointer `name`; None if it is none with a number."""
    found = _NUMBERED.fullmatch(name)
    return None if found is None else int(found[1])


def generation_number(name: str) -> int | None:
    """The number of the generation `name`; None if it is none."""
    found = _GENERATION.fullmatch(name)
    return None if found is None else int(found[1])


def _read_pointer(folder: Folder) -> tuple[str, bytes] | None:
    """The name and bytes of the pointer that counts. A store first lists what it has; a directory has one name."""
    if not isinstance(folder, ObjectFolder):
        with contextlib.suppress(FileNotFoundError):
            return POINTER_NAME, folder.read(POINTER_NAME, _POINTER_NBYTES)
    names = folder.names()
    numbered = [name for name in names if pointer_number(name) is not None]
    name = max(numbered, key=pointer_number, default=POINTER_NAME)  # type: ignore[arg-type]
    return (name, folder.read(name, _POINTER_NBYTES)) if name in names else None


def read_pointer(folder: Folder) -> Pointer | None:
    """None if no save to `folder` ever completed. Raises `CheckpointDamaged` for a pointer that no save writes."""
    try:
        read = _read_pointer(folder)
    except FileNotFoundError:
        return None
    if read is None or read[1] == GIVEN_UP:
        return None
    name, data = read
    where = f"{folder.path}/{name}"
    raw = parse_json(data, where)
    match raw:
        case {"generation": str(generation), "save_id": str(save_id), "manifest_sha256": str(digest)}:
            pointer = Pointer(generation, save_id, digest)
            found = _GENERATION.fullmatch(generation)
            # Byte for byte as a save writes it, so that no change goes unnoticed.
            if found and found[2] == save_id and re.fullmatch("[0-9a-f]{64}", digest) and pointer.to_bytes() == data:
                if pointer_number(name) in (None, pointer.number):
                    return pointer
    raise CheckpointDamaged(f"{where}: expected the pointer that a save writes, found {data[:200]!r}")


class Generation(NamedTuple):
    """The current generation of a checkpoint: its pointer, and its manifest as bytes and parsed."""

    pointer: Pointer
    data: bytes
    manifest: Manifest


def read_current(folder: Folder, manifest_sha256: str | None = None) -> Generation:
    """The current generation of the checkpoint in `folder`. Its manifest is checked, its data files are not.

    `manifest_sha256`: the required digest, from a source that an attacker does not control. Raises
    `CheckpointNotFound` or `CheckpointDamaged`.
    """
    pointer = read_pointer(folder)
    if pointer is None:
        raise not_found(folder)
    return read_generation(folder, pointer, manifest_sha256)


def read_generation(folder: Folder, pointer: Pointer, manifest_sha256: str | None = None) -> Generation:
    """The generation that `pointer` names, otherwise as `read_current`."""
    where = f"{folder.path}/{pointer.generation}/{MANIFEST_NAME}"
    try:
        with folder.sub(pointer.generation) as generation:
            data = generation.read(MANIFEST_NAME, MAX_NBYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointDamaged(f"{where}: expected the manifest that CURRENT names, found none") from None
    return Generation(pointer, data, proven(pointer, data, where, manifest_sha256))


def proven(pointer: Pointer, data: bytes, where: str, manifest_sha256: str | None) -> Manifest:
    """The manifest in `data`, after checking that it is the one that `pointer` names."""
    digest = hashlib.sha256(data).hexdigest()
    if manifest_sha256 is not None and manifest_sha256.lower() != digest:
        raise CheckpointDamaged(
            f"{where}: expected the requested digest {manifest_sha256}, found {digest}: "
            f"this is another checkpoint, or it was changed"
        )
    if digest != pointer.digest:
        raise CheckpointDamaged(f"{where}: expected the digest in CURRENT, {pointer.digest}, found {digest}")
    manifest = parse(data, where)
    if manifest.save_id != pointer.save_id:
        raise CheckpointDamaged(f"{where}: expected save {pointer.save_id}, found {manifest.save_id}")
    return manifest


def not_found(folder: Folder) -> CheckpointNotFound:
    """The error for a missing pointer, by what is there instead."""
    names = folder.names()
    if any(name.startswith(_SAVING) or _GENERATION.fullmatch(name) for name in names):
        return CheckpointNotFound(f"{folder.path}: expected a checkpoint, found only an unfinished save")
    if ".metadata" in names:
        return CheckpointNotFound(
            f"{folder.path}: expected a checkpoint of fullshard, found one of torch.distributed.checkpoint; convert it"
        )
    return CheckpointNotFound(f"{folder.path}: expected a checkpoint, found no {POINTER_NAME}")


def reach(path: str) -> Folder:
    """The directory or the URL `path`, of which nothing need be there."""
    return ObjectFolder(path) if is_url(path) else Folder.open(path)


def open_folder(path: str) -> Folder:
    """The directory or the URL `path`; `CheckpointNotFound` when there is no such directory."""
    try:
        return reach(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFound(f"{path}: expected a checkpoint, found no directory of that name") from None


# ---- saving ----------------------------------------------------------------------------------------------------


class Saving:
    """One save in progress, on the rank that commits. `name`: the directory that all ranks fill."""

    def __init__(self, folder: Folder, lock: int | None, before: Pointer | None, save_id: str) -> None:
        self._folder, self._lock, self._before = folder, lock, before
        self.save_id = save_id
        self.name = _SAVING + save_id
        self._committed: Pointer | None = None

    @classmethod
    def begin(cls, path: str, save_id: str) -> Saving:
        """Lock the directory at `path` (created if missing), remove the remains of killed saves, and open a new save.
        Raises `CheckpointBusy` while another save is running."""
        assert is_save_id(save_id)
        with doing(f"making {path}"):
            _make_folders(path)
            folder = Folder.open(path)
        try:
            with doing(f"beginning a save in {path}"):
                lock = folder.lock(LOCK_NAME)
                try:
                    before = readable_pointer(folder)
                    # Remove other generations only when the pointer is sure to survive a power loss.
                    folder.sync()
                    _clear(folder, before)
                    made = cls(folder, lock, before, save_id)
                    folder.make_folder(made.name)
                    folder.sync()
                except BaseException:
                    _unlock(lock)
                    raise
        except BaseException:
            folder.close()
            raise
        return made

    def prove_room(self, nbytes: int, num_files: int, largest: int, name: str) -> None:
        """Raise `CheckpointIOError` if the files of all ranks cannot fit: their bytes, their number, the bytes of the
        largest, and the longest of their names. What is stored beside them counts as files alone."""
        # The manifest and the pointer, which replaces one of the same size; and the longest name of the save itself.
        need = Need(nbytes, num_files + 2, largest, f"{self.name}/{name}")
        with doing(f"looking for room in {self._folder.path}"):
            found = problems(self._folder.path, need, room_in(self._folder, LOCK_NAME, largest))
        refuse(self._folder.path, found)

    def sizes(self, names: list[str]) -> list[int]:
        """Sizes of the files that ranks reported as written, as this rank sees them; of many, several at a time: on a
        network each is a question to the server."""
        sizes, errors = [0] * len(names), dict[int, Exception]()
        with self._folder.sub(self.name) as saving:

            def look(first: int, step: int) -> None:
                for index in range(first, len(names), step):
                    try:
                        sizes[index] = saving.nbytes(names[index])
                    except Exception as error:
                        errors[index] = error
                        return

            if len(names) < _MANY:
                look(0, 1)
            else:
                threads = [threading.Thread(target=look, args=(n, _LOOKS), daemon=True) for n in range(_LOOKS)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        if errors:
            index, error = min(errors.items())
            if not isinstance(error, FileNotFoundError):
                raise error
            raise CheckpointError(
                f"{saving.path}/{names[index]}: expected the file that another rank wrote, found none: "
                f"the directory must be one that all ranks share"
            )
        return sizes

    def commit(self, manifest: bytes) -> str:
        """Make the save the checkpoint; returns the path of its generation. Its files are written and synced."""
        number = self._before.number + 1 if self._before else 1
        generation = f"g{number:06d}-{self.save_id}"
        folder = self._folder
        with doing(f"committing {folder.path}"):
            with folder.sub(self.name) as saving:
                saving.write(MANIFEST_NAME, manifest)
                saving.sync()
            if readable_pointer(folder) != self._before:
                raise CheckpointBusy(
                    f"{folder.path}: expected to be the only saver, found that another save completed meanwhile"
                )
            folder.rename(self.name, generation)
            # The generation must be durable before the pointer names it.
            folder.sync()
            pointer = Pointer(generation, self.save_id, hashlib.sha256(manifest).hexdigest())
            with contextlib.suppress(FileNotFoundError):
                folder.remove(NEXT_POINTER)
            folder.write(NEXT_POINTER, pointer.to_bytes())
            folder.replace(NEXT_POINTER, POINTER_NAME)
            folder.sync()
        self._committed = pointer
        return f"{folder.path}/{generation}"

    def end(self) -> None:
        """Remove everything but the checkpoint, and release the lock. Errors are only logged: the outcome of the save
        stands.

        After a commit that failed at its last sync, either pointer may survive a power loss. Both generations then stay
        until the next save.
        """
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(self._folder.close)
                stack.callback(_unlock, self._lock)
                if self._committed is not None:
                    _clear(self._folder, self._committed)
                elif self.name in self._folder.names():
                    remove_generation(self._folder, self.name)
        except (OSError, CheckpointError) as error:
            _log.warning("fullshard: %s: could not clear what older saves left: %s", self._folder.path, error)


def readable_pointer(folder: Folder) -> Pointer | None:
    """`read_pointer` for a save, which leaves a pointer that it cannot read where it is."""
    try:
        return read_pointer(folder)
    except CheckpointDamaged:
        raise CheckpointDamaged(
            f"{folder.path}: expected no checkpoint or a whole one, found an unreadable pointer; it is kept: save "
            f"to another directory, or rename this one (fullshard.checkpoint.set_aside)"
        ) from None


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def _make_folders(path: str) -> None:
    """Create `path` and its missing parents, each entry synced in its parent."""
    missing = []
    current = os.path.abspath(path)
    while not os.path.isdir(current):
        missing.append(current)
        current = os.path.dirname(current)
    for made in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(made)
        with Folder.open(os.path.dirname(made)) as parent:
            parent.sync()


# ---- clearing --------------------------------------------------------------------------------------------------


def _clear(folder: Folder, current: Pointer | None) -> None:
    """Remove generations that are not current, and the remains of unfinished saves. The caller holds the lock."""
    for name in folder.names():
        ours = name.startswith(_SAVING) and is_save_id(name.removeprefix(_SAVING)) or _GENERATION.fullmatch(name)
        if ours and (current is None or name != current.generation):
            remove_generation(folder, name)


def clear_older(path: str) -> None:
    """Remove the generations before the current one, which a killed save left. Nothing while another save is running,
    which does it itself; in a store, whose saves always do."""
    if is_url(path):
        return
    with Folder.open(path) as folder, contextlib.suppress(CheckpointBusy):
        if len([*generations(folder)]) < 2:
            return
        lock = folder.lock(LOCK_NAME)
        try:
            current = readable_pointer(folder)
            folder.sync()
            _clear(folder, current)
        finally:
            _unlock(lock)


def remove_generation(folder: Folder, name: str) -> None:
    """Remove the directory `name` with its plain files, the manifest first: an incomplete one is no generation. If it
    contains anything else, that and the directory stay. Links are not followed."""
    with folder.sub(name) as inner:
        names = inner.names()
        for file in sorted(names, key=lambda one: one != MANIFEST_NAME):
            if stat.S_ISREG(os.stat(file, dir_fd=inner.fd, follow_symlinks=False).st_mode):
                inner.remove(file)
        left = bool(inner.names())
    if not left:
        folder.remove_folder(name)


def is_free(path: str) -> bool:
    """Whether a first save to `path` replaces nothing: nothing is there, or what a killed first save left."""
    if is_url(path):
        objects = ObjectFolder(path)
        return set(objects.names()) <= set(generations(objects))
    if not os.path.lexists(path):
        return True
    if os.path.islink(path) or not os.path.isdir(path):
        return False
    with Folder.open(path) as folder:
        return set(folder.names()) <= {LOCK_NAME, NEXT_POINTER, *generations(folder)}


def generations(folder: Folder) -> Iterator[str]:
    """Names of the generations in `folder`, and of unfinished saves."""
    for name in folder.names():
        if name.startswith(_SAVING) or _GENERATION.fullmatch(name):
            yield name
