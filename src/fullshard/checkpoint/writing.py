"""Data files: written part after part, with a table of checksums at the end. Also here: a checkpoint written by one
process, tensor by tensor, for converters and tools."""

from __future__ import annotations

import hashlib
import os
import queue
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from ..layout import itemsize
from . import files
from .bucket import begin
from .directory import reach
from .errors import CheckpointMismatch
from .files import Folder, doing
from .manifest import (
    BLOCK_NBYTES,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    TensorEntry,
    ValueEntry,
    data_name,
    decode,
    encode,
    parse,
    to_bytes,
)
from .plan import KeyPath, TensorSpec, key_of, whole
from .rules import on
from .safetensors import FilePart, data_header, file_order
from .save_plan import FILE_NBYTES
from .state import bytes_of, dtype_name, on_host
from .store import location
from .table import Table, nbytes_of

# Called with the bytes that were written since the last call.
Advance = Callable[[int], object]
WRITER = f"fullshard {__version__}, torch {torch.__version__}"


class DataFile:
    """A data file under construction, of announced parts in this order."""

    def __init__(
        self, folder: Folder, name: str, parts: Sequence[FilePart], save_id: str, advance: Advance | None = None
    ) -> None:
        self.name, self._entries = name, [part.entry for part in parts]
        table_nbytes = nbytes_of([entry.nbytes for entry in self._entries], BLOCK_NBYTES)
        self._head = data_header(parts, save_id, name, table_nbytes)
        self._starts, self._crcs = [len(self._head)], list[Future[tuple[int, ...]]]()
        self._file = folder.writing(name)
        if advance is not None:
            self._file.advance = advance
        self._file.write(memoryview(self._head))

    def add(self, data: memoryview, beside: ChecksumThreads | None = None) -> Future[tuple[int, ...]]:
        """The bytes of the next part. Its checksums, which are returned, are computed on the way, or by `beside`."""
        entry = self._entries[len(self._crcs)]
        if len(data) != entry.nbytes:
            raise ValueError(f"{self.name}: expected {entry.nbytes} bytes of {entry.name}, found {len(data)}")
        if beside is None:
            crcs: Future[tuple[int, ...]] = Future()
            crcs.set_result(self._file.write_summed(data, BLOCK_NBYTES))
        else:
            crcs = beside.submit(data)
            self._file.write(data)
        self._crcs.append(crcs)
        self._starts.append(self._file.nbytes)
        return crcs

    def end(self) -> tuple[FileEntry, list[tuple[int, ...]]]:
        """Write the table, and sync. Returns the file's entry, and the checksums of each part."""
        assert len(self._crcs) == len(self._entries)
        crcs = [each.result() for each in self._crcs]
        names = [entry.name for entry in self._entries]
        flat = [crc for each in crcs for crc in each]
        table = Table.of(files.crc32(self._head), names, self._starts, flat, BLOCK_NBYTES).to_bytes()
        self._file.write(memoryview(table))
        self._file.sync()
        digest = hashlib.sha256(table).hexdigest()
        return FileEntry(self.name, self._file.nbytes, len(self._head), len(table), digest), crcs

    def close(self) -> None:
        self._file.close()


def write_file(
    folder: Folder,
    name: str,
    parts: Sequence[FilePart],
    data: Callable[[int], memoryview],
    save_id: str,
    threads: int = 1,
    read: Callable[[int], None] = lambda _: None,
    advance: Advance | None = None,
) -> tuple[FileEntry, list[tuple[int, ...]]]:
    """A data file of `parts`, synced. `data(i)`: the bytes of `parts[i]`; `read(i)`: called on any thread, when they
    are no longer used; `advance(n)`: likewise, when n more bytes were written. Returns its entry and, for each part,
    its checksums.

    With a fast checksum library, checksums are computed block by block on the way to the file. Those of the standard
    library are computed by `threads` in parallel with the writing: both release the interpreter lock, and the disk is
    the bottleneck. A part on a device is copied to the host only for that time.
    """
    order = file_order(parts)
    with ChecksumThreads(0 if files.FAST else threads) as beside:
        file = DataFile(folder, name, [parts[i] for i in order], save_id, advance)
        try:
            for i in order:
                crcs_of = file.add(data(i), None if files.FAST else beside)
                crcs_of.add_done_callback(lambda _, i=i: read(i))  # type: ignore[misc]
            entry, crcs = file.end()
        finally:
            file.close()
    by_part = dict(zip(order, crcs, strict=True))
    return entry, [by_part[i] for i in range(len(parts))]


class ChecksumThreads:
    """Threads that compute checksums until the `with` block ends.

    Not an executor: those reject work at interpreter shutdown, when the last save may still be running.
    """

    # The limit of waiting parts: for a tensor on a device each is a copy on the host.
    _WAITING = 4

    def __init__(self, threads: int) -> None:
        self._given: queue.Queue[tuple[Future[tuple[int, ...]], memoryview] | None] = queue.Queue(self._WAITING)
        self._threads = [
            threading.Thread(target=self._compute, name="fullshard-checksums", daemon=True) for _ in range(threads)
        ]

    def submit(self, data: memoryview) -> Future[tuple[int, ...]]:
        future: Future[tuple[int, ...]] = Future()
        self._given.put((future, data))
        return future

    def _compute(self) -> None:
        while (given := self._given.get()) is not None:
            future, data = given
            try:
                future.set_result(files.of_blocks(data, BLOCK_NBYTES))
            except Exception as error:
                future.set_exception(error)

    def __enter__(self) -> ChecksumThreads:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for _ in self._threads:
            self._given.put(None)
        for thread in self._threads:
            thread.join()


def spare_cores(world: int) -> int:
    """The number of threads for this rank that find a core when all ranks of the machine do the same: 1 to 4."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(local) if local.isdigit() and int(local) else world
    return min(4, max(1, (os.cpu_count() or 1) // ranks))


def manifest_of(
    save_id: str,
    path: str,
    world: int,
    tensors: Iterable[TensorEntry],
    values: Iterable[ValueEntry],
    entries: Iterable[FileEntry],
) -> bytes:
    """The manifest of the written files of a save to `path`."""
    by_key, values_by_key = {entry.key: entry for entry in tensors}, {entry.key: entry for entry in values}
    data = to_bytes(Manifest(save_id, world, WRITER, by_key, values_by_key, tuple(entries)))
    # Never commit a manifest that could not be read.
    parse(data, f"{path}/{MANIFEST_NAME}")
    return data


# ---- one process, tensor by tensor ---------------------------------------------------------------------------


class CheckpointWriter:
    """Writes a checkpoint, one full tensor after another, and commits it if the `with` block ends without an error.

    Tensors are announced first, because a file begins with its table of contents, and are written in that order.
    `values`: by path. Raises the same errors as `save`.
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str],
        tensors: Sequence[TensorSpec],
        values: Mapping[KeyPath, Any] | None = None,
        *,
        file_nbytes: int = FILE_NBYTES,
    ) -> None:
        self._path = location(checkpoint_id)
        self._specs = [TensorSpec(tuple(s.path), s.dtype, tuple(s.shape)) for s in tensors]
        self._values = [ValueEntry(tuple(path), decode(encode(value))) for path, value in (values or {}).items()]
        keys = Counter(key_of(path) for path, *_ in [*self._specs, *self._values])
        twice = sorted(key for key, count in keys.items() if count > 1)
        if twice:
            raise CheckpointMismatch(f"saving {self._path}: expected each key once, found", twice)
        self._groups = _grouped(self._specs, file_nbytes)
        self._tensors: list[TensorEntry] = []
        self._files: list[FileEntry] = []
        self._file: DataFile | None = None

    def __enter__(self) -> CheckpointWriter:
        self._saving = begin(self._path, uuid.uuid4().hex)
        with reach(self._path) as folder:
            self._folder = folder.sub(self._saving.name)
        return self

    def write(self, key: str, tensor: Tensor) -> None:
        """Write the next announced tensor, on any device; the caller may change it afterwards."""
        if len(self._tensors) == len(self._specs):
            raise ValueError(f"expected no more than the announced tensors, found {key}")
        spec = self._specs[len(self._tensors)]
        found = TensorSpec(spec.path, dtype_name(tensor.dtype), tuple(tensor.shape))
        if key != spec.key or found != spec:
            raise ValueError(
                f"expected {spec.key} {spec.dtype} {spec.shape} next, found {key} {found.dtype} {found.shape}"
            )
        volume = len(self._files)
        if tensor.numel():
            with doing(f"writing {key} to {self._path}"):
                self._write(bytes_of(on_host(tensor.detach())))
        self._tensors.append(TensorEntry(*spec, on((0,)), 0, volume))

    def _write(self, data: memoryview) -> None:
        number = len(self._files)
        if self._file is None:
            group = self._groups[number]
            parts = [FilePart(s.key, s.dtype, itemsize(s.dtype), s.shape, whole(s.shape)) for s in group]
            self._file, self._left = (
                DataFile(self._folder, data_name(0, number), parts, self._saving.save_id),
                len(group),
            )
        self._file.add(data)
        self._left -= 1
        if not self._left:
            self._files.append(self._file.end()[0])
            self._file.close()
            self._file = None

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                if left := [spec.key for spec in self._specs[len(self._tensors) :]]:
                    raise CheckpointMismatch(f"saving {self._path}: expected all announced tensors, missing", left)
                save_id = self._saving.save_id
                data = manifest_of(save_id, self._path, 1, self._tensors, self._values, self._files)
                self._saving.commit(data)
        finally:
            if self._file is not None:
                self._file.close()
            self._folder.close()
            self._saving.end()


def _grouped(specs: Sequence[TensorSpec], file_nbytes: int) -> list[list[TensorSpec]]:
    """The tensors of each file, in order; tensors without elements are in no file."""
    groups: list[list[TensorSpec]] = []
    nbytes = file_nbytes
    for spec in specs:
        if not spec.nbytes:
            continue
        if nbytes + spec.nbytes > file_nbytes:
            groups.append([])
            nbytes = 0
        groups[-1].append(spec)
        nbytes += spec.nbytes
    return groups
