"""The directory of a checkpoint, from outside of it: what is current, and how a new generation takes its place.

    step-100/CURRENT                     the pointer: {"generation", "save_id", "manifest_sha256"}
    step-100/g000002-<save id>/          the generation that it names
    step-100/.saving-<save id>/          a save under way
    step-100/LOCK                        held by the saver

A save fills `.saving-*`, syncs it, renames it to the next generation, and replaces CURRENT. The pointer names the
manifest by its digest, and the manifest all other bytes by theirs: so whatever is found is one save, or an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Iterator
from typing import NamedTuple

from .errors import CheckpointBusy, CheckpointDamaged, CheckpointError, CheckpointNotFound
from .files import Folder, doing
from .manifest import MANIFEST_NAME, MAX_NBYTES, Manifest, is_save_id, parse, parse_json

POINTER_NAME = "CURRENT"
LOCK_NAME = "LOCK"
_NEXT_POINTER = ".CURRENT.next"
_SAVING = ".saving-"
_GENERATION = re.compile(r"g([0-9]{6,12})-([0-9a-f]{32})", re.ASCII)
_POINTER_NBYTES = 4096

_log = logging.getLogger("fullshard")


class Pointer(NamedTuple):
    """Which generation is the checkpoint. `digest`: SHA-256 of its manifest, hexadecimal."""

    generation: str
    save_id: str
    digest: str

    def to_bytes(self) -> bytes:
        fields = {"generation": self.generation, "save_id": self.save_id, "manifest_sha256": self.digest}
        return (json.dumps(fields) + "\n").encode()

    @property
    def number(self) -> int:
        return int(self.generation[1:].partition("-")[0])


def read_pointer(folder: Folder) -> Pointer | None:
    """None when no save to `folder` ever ended. Raises `CheckpointDamaged` for a pointer that no save writes."""
    where = f"{folder.path}/{POINTER_NAME}"
    try:
        data = folder.read(POINTER_NAME, _POINTER_NBYTES)
    except FileNotFoundError:
        return None
    raw = parse_json(data, where)
    match raw:
        case {"generation": str(generation), "save_id": str(save_id), "manifest_sha256": str(digest)}:
            pointer = Pointer(generation, save_id, digest)
            found = _GENERATION.fullmatch(generation)
            # Byte for byte what a save writes, so that no change of it goes unseen.
            if found and found[2] == save_id and re.fullmatch("[0-9a-f]{64}", digest) and pointer.to_bytes() == data:
                return pointer
    raise CheckpointDamaged(f"{where}: expected the pointer that a save writes, found {data[:200]!r}")


class Generation(NamedTuple):
    """The current generation of a checkpoint: its pointer, and its manifest as bytes and as what they say."""

    pointer: Pointer
    data: bytes
    manifest: Manifest


def read_current(folder: Folder, manifest_sha256: str | None = None) -> Generation:
    """The current generation of the checkpoint in `folder`, its manifest proven, its data files not looked at.

    `manifest_sha256`: what the digest has to be, from a source that an attacker does not control. Raises
    `CheckpointNotFound` or `CheckpointDamaged`.
    """
    pointer = read_pointer(folder)
    if pointer is None:
        raise not_found(folder)
    where = f"{folder.path}/{pointer.generation}/{MANIFEST_NAME}"
    try:
        with folder.sub(pointer.generation) as generation:
            data = generation.read(MANIFEST_NAME, MAX_NBYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointDamaged(f"{where}: expected the manifest that CURRENT names, found none") from None
    return Generation(pointer, data, proven(pointer, data, where, manifest_sha256))


def proven(pointer: Pointer, data: bytes, where: str, manifest_sha256: str | None) -> Manifest:
    """The manifest in `data`, when it is the one that `pointer` names."""
    digest = hashlib.sha256(data).hexdigest()
    if manifest_sha256 is not None and manifest_sha256.lower() != digest:
        raise CheckpointDamaged(
            f"{where}: expected the digest that was asked for, {manifest_sha256}, found {digest}: "
            f"this is another checkpoint, or it was changed"
        )
    if digest != pointer.digest:
        raise CheckpointDamaged(f"{where}: expected the digest that CURRENT names, {pointer.digest}, found {digest}")
    manifest = parse(data, where)
    if manifest.save_id != pointer.save_id:
        raise CheckpointDamaged(f"{where}: expected save {pointer.save_id}, found {manifest.save_id}")
    return manifest


def not_found(folder: Folder) -> CheckpointNotFound:
    """No pointer: what is there instead?"""
    names = folder.names()
    if any(name.startswith(_SAVING) or _GENERATION.fullmatch(name) for name in names):
        return CheckpointNotFound(f"{folder.path}: expected a checkpoint, found a save that did not come to its end")
    if ".metadata" in names:
        return CheckpointNotFound(
            f"{folder.path}: expected a checkpoint of fullshard, found one of torch.distributed.checkpoint; convert it"
        )
    return CheckpointNotFound(f"{folder.path}: expected a checkpoint, found no {POINTER_NAME}")


def open_folder(path: str) -> Folder:
    """The directory at `path`; `CheckpointNotFound` when there is none."""
    try:
        return Folder.open(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFound(f"{path}: expected a checkpoint, found no directory of that name") from None


# ---- saving ----------------------------------------------------------------------------------------------------


class Saving:
    """One save under way, on the rank that commits. `name`: of the directory that all ranks fill."""

    def __init__(self, folder: Folder, lock: int | None, before: Pointer | None, save_id: str) -> None:
        self._folder, self._lock, self._before = folder, lock, before
        self.save_id = save_id
        self.name = _SAVING + save_id
        self._committed: Pointer | None = None

    @classmethod
    def begin(cls, path: str, save_id: str) -> Saving:
        """Lock the directory at `path`, which is made when it is missing, clear what killed saves left, and open a new
        save in it. Raises `CheckpointBusy` while another saver is at work."""
        assert is_save_id(save_id)
        with doing(f"making {path}"):
            _make_folders(path)
            folder = Folder.open(path)
        try:
            with doing(f"beginning a save in {path}"):
                lock = folder.lock(LOCK_NAME)
                try:
                    before = _readable_pointer(folder)
                    # What it names may go only when it is sure to be the pointer after a loss of power, too.
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

    def sizes(self, names: list[str]) -> list[int]:
        """Of the files that ranks say they wrote, as this rank sees them."""
        with self._folder.sub(self.name) as saving:
            sizes = []
            for name in names:
                try:
                    sizes.append(saving.nbytes(name))
                except FileNotFoundError:
                    raise CheckpointError(
                        f"{saving.path}/{name}: expected the file that another rank wrote, found none: "
                        f"the directory has to be one that all ranks share"
                    ) from None
            return sizes

    def commit(self, manifest: bytes) -> str:
        """Let the save be the checkpoint; the path of its generation. Its files are written and synced."""
        number = self._before.number + 1 if self._before else 1
        generation = f"g{number:06d}-{self.save_id}"
        folder = self._folder
        with doing(f"committing {folder.path}"):
            with folder.sub(self.name) as saving:
                saving.write(MANIFEST_NAME, manifest)
                saving.sync()
            if _readable_pointer(folder) != self._before:
                raise CheckpointBusy(
                    f"{folder.path}: expected to be the only saver, found that another one ended meanwhile"
                )
            folder.rename(self.name, generation)
            # The generation is there for good before the pointer names it.
            folder.sync()
            pointer = Pointer(generation, self.save_id, hashlib.sha256(manifest).hexdigest())
            with contextlib.suppress(FileNotFoundError):
                folder.remove(_NEXT_POINTER)
            folder.write(_NEXT_POINTER, pointer.to_bytes())
            folder.replace(_NEXT_POINTER, POINTER_NAME)
            folder.sync()
        self._committed = pointer
        return f"{folder.path}/{generation}"

    def end(self) -> None:
        """Clear what is not the checkpoint, and let others save. Trouble is a line in the log, and no more: whatever
        the save came to stands.

        After a commit that failed at its last sync nobody knows which pointer outlasts a loss of power: then both
        generations stay until the next save.
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


def _readable_pointer(folder: Folder) -> Pointer | None:
    try:
        return read_pointer(folder)
    except CheckpointDamaged:
        raise CheckpointDamaged(
            f"{folder.path}: expected no checkpoint or a whole one, found a pointer that cannot be read; it is kept: "
            f"save to another directory, or remove this one"
        ) from None


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def _make_folders(path: str) -> None:
    """`path` and what is missing above it, each entry synced in its parent."""
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
    """Remove generations that are not current, and what saves left that did not end. The caller holds the lock."""
    for name in folder.names():
        ours = name.startswith(_SAVING) and is_save_id(name.removeprefix(_SAVING)) or _GENERATION.fullmatch(name)
        if ours and (current is None or name != current.generation):
            remove_generation(folder, name)


def remove_generation(folder: Folder, name: str) -> None:
    """The directory `name` with the plain files in it, the manifest first: half of it is no generation. Whatever else
    is in there stays, and so does the directory then. Links are not followed."""
    with folder.sub(name) as inner:
        names = inner.names()
        for file in sorted(names, key=lambda one: one != MANIFEST_NAME):
            if stat.S_ISREG(os.stat(file, dir_fd=inner.fd, follow_symlinks=False).st_mode):
                inner.remove(file)
        left = bool(inner.names())
    if not left:
        folder.remove_folder(name)


def generations(folder: Folder) -> Iterator[str]:
    """Names of the generations in `folder`, and of saves that did not end."""
    for name in folder.names():
        if name.startswith(_SAVING) or _GENERATION.fullmatch(name):
            yield name
