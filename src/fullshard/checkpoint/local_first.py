"""Saves to an object store by way of the disks of hosts: written there, sent afterwards, and finished after a crash.

    /scratch/run/step-100/g000001-<save id>/data-00003.safetensors     on the host of rank 3, until the save committed

When all ranks have written, the first one puts the manifest of the generation into the store, where no reader finds it
without a pointer. From then on whoever has the files can finish the save: `RecoverJob` looks, from the newest such
generation on, whether the store and the disks of the hosts that are there have each file of the manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from ..comm import Messenger
from ..peers import shown_ranks
from .agreement import Heard, Message, agree
from .bucket import BucketSaving
from .directory import generation_number, read_pointer
from .errors import CheckpointDamaged
from .files import Folder, doing
from .manifest import MANIFEST_NAME, MAX_NBYTES, Manifest, is_file_name, parse
from .objects import ObjectFolder
from .retention import number_in, numbered
from .writing import Advance

# Bytes that are read from a disk at a time.
_PIECE_NBYTES = 8 << 20

_log = logging.getLogger("fullshard")


def place(local: str, path: str, generation: str) -> str:
    """The directory of this host for the files of a save to the URL `path`."""
    return f"{local}/{os.path.basename(path)}/{generation}"


def made(local: str, path: str, generation: str) -> Folder:
    """That directory, open; made if it is missing. Several ranks of a host call it."""
    os.makedirs(place(local, path, generation), exist_ok=True)
    return Folder.open(place(local, path, generation))


def upload(files: Folder, objects: Folder, name: str, advance: Advance = lambda _: None) -> None:
    """Send the file `name` of a directory to the store."""
    with files.reading(name) as file, objects.writing(name) as target:
        target.advance = advance
        buffer = memoryview(bytearray(min(_PIECE_NBYTES, file.nbytes)))
        for start in range(0, file.nbytes, _PIECE_NBYTES):
            piece = buffer[: file.nbytes - start]
            file.read_into(piece, start)
            target.write(piece)
        target.sync()


def clear(local: str, path: str, *, itself: bool = True) -> None:
    """Remove the files on this host's disk of saves before that of the URL `path`, and with `itself` of that too.
    What fails is logged: nothing needs them."""
    step = number_in(os.path.basename(path))
    older = [folder for number, folder in numbered(local) if step is not None and number < step]
    for folder in [*older, f"{local}/{os.path.basename(path)}"] if itself else older:
        try:
            _clear(folder)
        except OSError as error:
            _log.warning("fullshard: %s: could not remove what was sent: %s", folder, error)


def discard(local: str, path: str, generation: str) -> None:
    """Remove the files on this host's disk of a save that failed, and that nobody can finish."""
    with contextlib.suppress(OSError):
        _clear(os.path.dirname(place(local, path, generation)), generation)


def _clear(path: str, generation: str = "") -> None:
    """Several ranks of a host call it."""
    with contextlib.suppress(FileNotFoundError), Folder.open(path) as folder:
        for name in folder.names():
            if generation_number(name) is not None and generation in ("", name):
                with contextlib.suppress(FileNotFoundError), folder.sub(name) as inner:
                    for file in inner.names():
                        with contextlib.suppress(FileNotFoundError):
                            inner.remove(file)
                    folder.remove_folder(name)
        if not folder.names():
            os.rmdir(path)


# ---- after a crash ---------------------------------------------------------------------------------------------------


class Unfinished(NamedTuple):
    """A generation that has a manifest and no pointer, and what of its files the store has not."""

    path: str
    name: str
    data: bytes
    manifest: Manifest
    lacks: dict[str, int]


class RecoverJob:
    """One `recover` on one rank. All ranks of `messenger` call `run`."""

    def __init__(self, folder: str, messenger: Messenger, local: str | None, is_whole: Callable[[str], bool]) -> None:
        self.folder, self.messenger, self.local = folder, messenger, local
        self.what = f"recovering {folder}"
        self._is_whole = is_whole
        # The first rank keeps here which checkpoints it did not look at, the newest at the end; the unfinished
        # generations of the one that it looks at; and the generation that it asks ranks for.
        self._left: list[str] | None = None
        self._candidates: Iterator[Unfinished] = iter(())
        self._unfinished: Unfinished | None = None

    def run(self) -> str | None:
        """The path of the newest complete checkpoint, after what can be finished was finished."""
        while True:
            found = agree(self.messenger, self.what, lambda: {"disk": self.local is not None}, self._next)
            if "newest" in found:
                newest: str | None = found["newest"]
                if newest is not None and self.local is not None:
                    clear(self.local, newest)
                return newest
            path, name = found["path"], found["name"]
            who = agree(self.messenger, self.what, partial(self._on_disk, path, name), self._assign)
            if "senders" in who:
                agree(self.messenger, self.what, partial(self._send, path, name, who["senders"]), self._commit)

    def _next(self, heard: Heard) -> Message:
        """The newest checkpoint that is whole, or an unfinished one that is newer, on the first rank."""
        if self._left is None:
            self._left = [path for _, path in numbered(self.folder)]
        while True:
            self._unfinished = next(self._candidates, None)
            if self._unfinished is not None:
                return {"path": self._unfinished.path, "name": self._unfinished.name}
            if not self._left:
                return {"newest": None}
            path = self._left.pop()
            if self._is_whole(path):
                return {"newest": path}
            if any(message["disk"] for message in heard.messages):
                self._candidates = _unfinished(path)

    def _on_disk(self, path: str, generation: str) -> Message:
        """The files of a generation on the disk of this host, and their sizes."""
        found = {}
        if self.local is not None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                with Folder.open(place(self.local, path, generation)) as folder:
                    for name in filter(is_file_name, folder.names()):
                        with contextlib.suppress(CheckpointDamaged):
                            found[name] = folder.nbytes(name)
        return {"files": found}

    def _assign(self, heard: Heard) -> Message:
        """Assign each file that the store lacks to a rank that sends it, on the first rank; none if one is nowhere."""
        assert self._unfinished is not None
        senders: dict[str, list[str]] = {}
        nowhere = []
        for name, nbytes in self._unfinished.lacks.items():
            # The ranks of a host have the same files, and each sends some.
            able = [str(rank) for ranks, one in heard.groups if one["files"].get(name) == nbytes for rank in ranks]
            if able:
                senders.setdefault(min(able, key=lambda rank: len(senders.get(rank, ()))), []).append(name)
            else:
                nowhere.append(name)
        if not nowhere:
            return {"senders": senders}
        _log.warning(
            "fullshard: %s: not finished, because %d file(s) are neither in the store nor on a disk of %s, such as %s",
            *(self._unfinished.path, len(nowhere), shown_ranks(range(self.messenger.world)), nowhere[0]),
        )
        return {}

    def _send(self, path: str, generation: str, senders: dict[str, list[str]]) -> Message:
        names = senders.get(str(self.messenger.rank), [])
        if names:
            assert self.local is not None
            with Folder.open(place(self.local, path, generation)) as files:
                with ObjectFolder(f"{path}/{generation}") as objects:
                    for name in names:
                        with doing(f"uploading {files.path}/{name}"):
                            upload(files, objects, name)
        return {}

    def _commit(self, _: Heard) -> Message:
        found = self._unfinished
        assert found is not None and self._left is not None
        BucketSaving.again(found.path, found.name, hashlib.sha256(found.data).hexdigest()).finish(
            {file.name: file.nbytes for file in found.manifest.files}
        )
        # It is whole now.
        self._left.append(found.path)
        self._candidates = iter(())
        return {}


def _unfinished(path: str) -> Iterator[Unfinished]:
    """The generations of killed saves at the URL `path` that can be finished if their files are somewhere, the newest
    first."""
    folder = ObjectFolder(path)
    with doing(f"looking at {path}"):
        try:
            pointer = read_pointer(folder)
        except CheckpointDamaged:
            return
        before = 0 if pointer is None else pointer.number
        for name in sorted(folder.names(), reverse=True):
            if (generation_number(name) or 0) > before:
                with folder.sub(name) as inner:
                    try:
                        data = inner.read(MANIFEST_NAME, MAX_NBYTES)
                        manifest = parse(data, f"{inner.path}/{MANIFEST_NAME}")
                    except (FileNotFoundError, CheckpointDamaged):
                        continue
                    sizes = {name: inner.nbytes(name) for name in inner.names()}
                if manifest.save_id == name.partition("-")[2]:
                    lacks = {file.name: file.nbytes for file in manifest.files if sizes.get(file.name) != file.nbytes}
                    yield Unfinished(path, name, data, manifest, lacks)
