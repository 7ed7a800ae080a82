"""A bucket that processes share, for URLs of any protocol: its objects are files of a folder.

    with shared_bucket(tmp_path / "store"):         # on each process
        checkpoint.save(..., checkpoint_id="s3://bucket/run/step-1")

It takes no parts. Conditional writes are atomic, as `os.link` is. An empty folder goes, because a store has none.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import _registry

from fullshard.checkpoint import bucket, store


class FolderFileSystem(LocalFileSystem):  # type: ignore[misc]
    """See the module."""

    protocol = "s3"
    root: ClassVar[str] = ""

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        text = os.fspath(path)
        return cls.root + "/" + text.partition("://")[2].rstrip("/") if "://" in text else text.rstrip("/")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        path = self._strip_protocol(path)
        while True:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            part = Path(path).parent / f".{uuid.uuid4().hex}"
            with suppress(FileNotFoundError):  # another process has just removed the empty folder
                part.write_bytes(value)
                break
        if mode == "create":
            try:
                os.link(part, path)
            finally:
                part.unlink()
        else:
            os.replace(part, path)

    def ls(self, path: str, detail: bool = False, **more: Any) -> list[Any]:
        return [one for one in super().ls(path, detail=True, **more) if "/." not in one["name"][len(path) :]]

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        os.remove(path)
        with suppress(OSError):
            while (path := os.path.dirname(path)) != self.root:
                os.rmdir(path)

    def rm(self, path: list[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        for one in path:
            self.rm_file(one)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        self.pipe_file(path2, Path(self._strip_protocol(path1)).read_bytes())


@contextmanager
def shared_bucket(folder: Path, protocol: str = "s3") -> Iterator[None]:
    """URLs of `protocol` are files of `folder` inside."""
    known = _registry.get(protocol)
    _forget(protocol)
    FolderFileSystem.root = str(folder)
    fsspec.register_implementation(protocol, FolderFileSystem, clobber=True)
    try:
        yield
    finally:
        _forget(protocol)
        del _registry[protocol]
        if known is not None:
            _registry[protocol] = known


def _forget(protocol: str) -> None:
    for key in [key for key in store._systems if key[1] == protocol]:
        del store._systems[key]
    bucket._proven.clear()
