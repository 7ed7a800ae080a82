"""The files of a checkpoint as objects of a store: read, written and listed as those of a directory. No torch."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from typing import Any

from .errors import CheckpointDamaged
from .files import Buffer, Folder, ReadFile, WriteFile
from .store import Store


class ObjectFolder(Folder):
    """The objects whose names begin with that of a folder, which need not exist. It has no descriptor."""

    def __init__(self, path: str) -> None:
        super().__init__(path, -1)
        self.store = Store(path)
        # Sizes of objects that were looked at: those of a generation do not change.
        self._sizes: dict[str, int] = {}
        self._listed = False
        self._lock = threading.Lock()

    def sub(self, name: str) -> ObjectFolder:
        return ObjectFolder(f"{self.path}/{self._checked(name)}")

    def names(self) -> list[str]:
        found = self.store.names()
        self._sizes, self._listed = {name: size for name, size in found.items() if size is not None}, True
        return sorted(found)

    def nbytes(self, name: str) -> int:
        """The size of the object `name`. The first call lists all: a page has a thousand."""
        self._checked(name)
        with self._lock:
            if not self._listed:
                self.names()
        if name not in self._sizes:
            raise FileNotFoundError(errno.ENOENT, f"{self.path}/{name}: not found")
        return self._sizes[name]

    def read(self, name: str, limit: int) -> bytes:
        data = self.store.read(self._checked(name), 0, limit + 1)
        if len(data) > limit:
            raise CheckpointDamaged(f"{self.path}/{name}: expected at most {limit} bytes, found more")
        return data

    def reading(self, name: str) -> ObjectFile:
        self._checked(name)
        if name not in self._sizes:
            self._sizes[name] = self.store.size(name)
        return ObjectFile(self, name, self._sizes[name])

    def writing(self, name: str) -> ObjectWriter:
        return ObjectWriter(self, self._checked(name))

    def remove(self, name: str) -> None:
        self.store.delete(self._checked(name))

    def saved_at(self, name: str) -> float | None:
        facts: dict[str, Any] = self.store.facts(name)
        for key in ("LastModified", "last_modified", "mtime", "updated", "created"):
            if hasattr(facts.get(key), "timestamp"):
                return float(facts[key].timestamp())
        return None


class ObjectFile(ReadFile):
    """An object, read by ranges."""

    def __init__(self, folder: ObjectFolder, name: str, nbytes: int) -> None:
        super().__init__(f"{folder.path}/{name}", -1, nbytes)
        self._store, self._name = folder.store, name

    def read_into(self, buffer: Buffer, start: int) -> None:
        self.read_each([buffer], start)

    def read_each(self, buffers: Sequence[Buffer], start: int) -> None:
        """One request for all of them."""
        stop = start + sum(map(len, buffers))
        data = memoryview(self._store.read(self._name, start, min(stop, self.nbytes)) if start < self.nbytes else b"")
        if len(data) != stop - start:
            raise CheckpointDamaged(
                f"{self.path}: expected bytes up to {stop}, found that it ends at {start + len(data)}"
            )
        for buffer in buffers:
            buffer[:] = data[: len(buffer)]
            data = data[len(buffer) :]


class ObjectWriter(WriteFile):
    """A new object, which is there after `sync`, and not if it is closed before."""

    def __init__(self, folder: ObjectFolder, name: str) -> None:
        super().__init__(f"{folder.path}/{name}", -1)
        self._upload = folder.store.upload(name)
        self._upload.advance = lambda nbytes: self.advance(nbytes)

    def write(self, buffer: Buffer) -> None:
        self._upload.write(buffer)
        self.nbytes += len(buffer)

    def sync(self) -> None:
        self._upload.end()

    def close(self) -> None:
        self._upload.drop()
