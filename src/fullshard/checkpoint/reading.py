"""Reading a checkpoint by one process: the parts that overlap what is wanted, and of those the blocks that do. Each
returned byte was compared with its checksum.

A rank that loads reads the manifest, then the tables of the files in which it has parts, then ranges of those files:
neighbours in one call, files in parallel.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layout import itemsize
from . import files
from .errors import CheckpointDamaged
from .files import Buffer, Folder, ReadFile, doing
from .manifest import MANIFEST_NAME, FileEntry, Manifest, TensorEntry, Value
from .plan import Box, KeyPath, Take, takes, whole
from .resident import ResidentFile
from .safetensors import FilePart, name_of, save_id_of
from .state import bytes_of, dtype_of, nested
from .table import OldTable, Place, Table

# Called with the bytes read so far, and those to read; from one thread at a time.
Progress = Callable[[int, int], object]
# A part of a tensor to be filled, and what to copy into it.
Copy = tuple[Tensor, Tensor]
# The limit of open files; a checkpoint of a large world has thousands.
_MAX_OPEN = 64
# The limit of the memory of tables, in bytes.
_TABLES_NBYTES = 512 << 20
# Bytes per system call, and its pieces.
_BATCH_NBYTES, _BATCH_PIECES = 8 << 20, 512
# Bytes that are read into separate memory, because only some of them are wanted, until they are copied.
_SPARE_NBYTES = 64 << 20


class _Wanted(NamedTuple):
    """A range of a part that is read into `buffer`, and a last step once it was."""

    file: int
    key: str
    place: Place
    start: int  # in the part
    buffer: Buffer
    nbytes: int  # that are wanted
    spare: int  # bytes of separate memory
    finish: Callable[[], object] | None


class CheckpointReader:
    """One generation of a checkpoint, read by one process, tensor by tensor; every returned byte was checked.
    `folder` is open, and closed with the reader.

    Memory is bounded by the largest tensor, not by the checkpoint.
    """

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._numbers = manifest.numbers()
        self._open: dict[int, ReadFile] = {}
        # The tables of files whose size, header and table were checked.
        self._tables: dict[int, Table | OldTable] = {}
        self._tables_nbytes = 0
        self._lock = threading.Lock()
        # Locks by file, held while it is opened first and checked: once for all threads that read parts of it.
        self._checking: dict[int, threading.Lock] = {}

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()
        self.folder.close()

    # ---- tensors and values --------------------------------------------------------------------------------

    def tensor(self, key: str, box: Box | None = None) -> Tensor:
        """A stored tensor, or `box` of it: on the host, contiguous, owned by the caller. `KeyError` for no such key."""
        entry = self.manifest.tensors[key]
        return self.read(entry, whole(entry.shape) if box is None else box)

    def value(self, key: str) -> Value:
        """The value stored under a key that is not a tensor. `KeyError` for no such key."""
        return self.manifest.values[key].value

    def state_dict(self) -> dict[str, Any]:
        """Everything, nested as it was saved, with full tensors: for small checkpoints."""
        leaves: dict[KeyPath, Any] = {entry.path: self.tensor(key) for key, entry in self.manifest.tensors.items()}
        leaves |= {entry.path: entry.value for entry in self.manifest.values.values()}
        return nested(leaves)

    def read(self, entry: TensorEntry, box: Box, into: Tensor | None = None) -> Tensor:
        """`box` of a tensor: contiguous, on the host, in the stored dtype, owned by the caller.

        `into`: such a tensor, to be filled instead of a new one.
        """
        made = torch.empty(box.lengths, dtype=dtype_of(entry.dtype)) if into is None else into
        self.read_each([(entry, box, made)])
        return made

    def read_each(
        self,
        requests: Sequence[tuple[TensorEntry, Box, Tensor]],
        threads: int = 1,
        progress: Progress | None = None,
    ) -> None:
        """Fill each tensor with the box of its entry, as `read`, with `threads` that read files side by side."""
        self._each(requests, threads, progress, None)

    def lend_each(
        self,
        requests: Sequence[tuple[TensorEntry, Box, Tensor]],
        threads: int = 1,
        progress: Progress | None = None,
    ) -> list[Copy]:
        """Check what `read_each` reads, and write nothing to the tensors: returns what to copy into them, in any dtype.
        That is in locked pages of the files until it is no longer referred to, and must not be written to. Raises
        `NotResident` where that cannot be."""
        copies: list[Copy] = []
        try:
            self._each(requests, threads, progress, copies)
        except BaseException:
            copies.clear()  # and their pages, if the error is kept
            raise
        return copies

    def _each(
        self,
        requests: Sequence[tuple[TensorEntry, Box, Tensor]],
        threads: int,
        progress: Progress | None,
        copies: list[Copy] | None,
    ) -> None:
        total = sum(box.numel * itemsize(entry.dtype) for entry, box, _ in requests)
        done = 0

        def advance(nbytes: int) -> None:
            nonlocal done
            if progress is not None:
                with self._lock:
                    done += nbytes
                    progress(done, total)

        parts = [
            (self._number(writer, entry), entry, box, part, made)
            for entry, box, made in requests
            for writer, part in (entry.parts(box) if made.numel() else ())
        ]
        parts.sort(key=lambda one: one[0])
        shares = [share for share in _shares(parts, threads) if share]
        if len(shares) < 2:
            for share in shares:
                if copies is None:
                    self._read_share(self._opened, share, advance, None)
                else:
                    self._read_alone(share, advance, copies)
            return
        with ThreadPoolExecutor(len(shares), "fullshard-load") as pool:
            futures = [pool.submit(self._read_alone, share, advance, copies) for share in shares]
        try:
            while futures:
                futures.pop(0).result()
        finally:
            futures.clear()  # or an error that is kept would keep what all of them mapped

    def _read_alone(self, share: Sequence[Any], advance: Callable[[int], None], copies: list[Copy] | None) -> None:
        """Each thread opens its own files."""
        opened: dict[int, ReadFile] = {}

        def file(number: int) -> ReadFile:
            if number not in opened:
                while opened:
                    opened.popitem()[1].close()
                opened[number] = self._open_file(self.manifest.files[number])
                if copies is not None:
                    opened[number] = ResidentFile(opened[number])
            return opened[number]

        try:
            self._read_share(file, share, advance, copies)
        finally:
            while opened:
                opened.popitem()[1].close()

    def _read_share(
        self,
        file: Callable[[int], ReadFile],
        share: Sequence[tuple[int, TensorEntry, Box, Box, Tensor]],
        advance: Callable[[int], None],
        copies: list[Copy] | None,
    ) -> None:
        """Read what is wanted of parts, in the order of files."""
        waiting, spare = list[_Wanted](), 0
        try:
            for number, entry, box, part, made in share:
                # Before the next file is opened, and this one closed.
                if waiting and (waiting[0].file != number or spare > _SPARE_NBYTES):
                    self._read_file(file(waiting[0].file), waiting, advance)
                    waiting, spare = [], 0
                waiting.append(self._wanted(file, number, entry, box, part, made, copies))
                spare += waiting[-1].spare
            if waiting:
                self._read_file(file(waiting[0].file), waiting, advance)
        finally:
            waiting.clear()

    def _wanted(
        self,
        file: Callable[[int], ReadFile],
        number: int,
        entry: TensorEntry,
        box: Box,
        part: Box,
        made: Tensor,
        copies: list[Copy] | None,
    ) -> _Wanted:
        (take,) = takes(box, [part])
        place = self._place(file, number, entry, part)
        region = made
        for dim, (start, length) in enumerate(zip(take.target, take.lengths, strict=True)):
            region = region.narrow(dim, start, length)
        size = itemsize(entry.dtype)
        start, nbytes = take.first * size, region.numel() * size
        if copies is not None:
            return self._lent(file(number), number, entry, place, take, region, copies)
        if take.contiguous and region.is_contiguous():
            return _Wanted(number, entry.key, place, start, bytes_of(region), nbytes, 0, None)
        held = torch.empty(take.stop - take.first, dtype=made.dtype)
        finish = partial(_copy, region, held, take)
        return _Wanted(number, entry.key, place, start, bytes_of(held), nbytes, held.numel() * size, finish)

    def _lent(
        self,
        file: ReadFile,
        number: int,
        entry: TensorEntry,
        place: Place,
        take: Take,
        region: Tensor,
        copies: list[Copy],
    ) -> _Wanted:
        """Whole blocks of a file's own pages."""
        assert isinstance(file, ResidentFile)
        size, block = itemsize(entry.dtype), self.manifest.block_nbytes
        start, stop = take.first * size, take.stop * size
        held = torch.frombuffer(file.at(place.start + start, stop - start), dtype=torch.uint8)
        first, last = start // block * block, min(-(-stop // block) * block, place.nbytes)
        buffer = file.at(place.start + first, last - first)
        finish = partial(_lend, copies, region, held, take, dtype_of(entry.dtype))
        return _Wanted(number, entry.key, place, first, buffer, region.numel() * size, 0, finish)

    def _read_file(self, file: ReadFile, wanted: Sequence[_Wanted], advance: Callable[[int], None]) -> None:
        """Read ranges of one file: neighbours in one call, and then compare each block with its checksum. Checksums
        cover whole blocks, so whole blocks are read; one that is only partly needed is read into separate memory."""
        with doing(f"reading {file.path} for {wanted[0].key}"):
            for batch in _batches(_blocks_of(wanted, self.manifest.block_nbytes)):
                file.read_each([block.buffer for block in batch], batch[0].start)
                for block in batch:
                    files.compare(block.buffer, block.crc, f"{file.path}: {block.key}", block.start)
                    if block.into is not None:
                        block.into[:] = block.buffer[block.skip : block.skip + len(block.into)]
        for one in wanted:
            if one.finish is not None:
                one.finish()
        advance(sum(one.nbytes for one in wanted))

    # ---- files ---------------------------------------------------------------------------------------------

    def _number(self, writer: int, entry: TensorEntry) -> int:
        number = self._numbers.get((writer, entry.volume))
        if number is None:
            raise CheckpointDamaged(
                f"{self.folder.path}: expected a file of rank {writer} for {entry.key}, found none in the manifest"
            )
        return number

    def _place(self, file: Callable[[int], ReadFile], number: int, entry: TensorEntry, part: Box) -> Place:
        found = self._table(file, number).find(name_of(entry.key, entry.shape, part))
        where = f"{self.folder.path}/{self.manifest.files[number].name}"
        if found is None:
            raise CheckpointDamaged(f"{where}: expected {part} of {entry.key}, found that it was saved in other parts")
        expected = part.numel * itemsize(entry.dtype)
        if found.nbytes != expected:
            raise CheckpointDamaged(f"{where}: expected {expected} bytes of {entry.key}, found {found.nbytes}")
        return found

    def _opened(self, number: int) -> ReadFile:
        """A data file, open."""
        found = self._open.get(number)
        if found is None:
            found = self._open_file(self.manifest.files[number])
            while len(self._open) >= _MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[number] = found
        return found

    def _open_file(self, entry: FileEntry) -> ReadFile:
        with doing(f"opening {self.folder.path}/{entry.name}"):
            try:
                return self.folder.reading(entry.name)
            except FileNotFoundError:
                raise CheckpointDamaged(
                    f"{self.folder.path}/{entry.name}: expected this file of the checkpoint, found none"
                ) from None

    def _table(self, file: Callable[[int], ReadFile], number: int) -> Table | OldTable:
        """The table of a data file, after checking the file's size, header and table."""
        with self._checking.setdefault(number, threading.Lock()):
            with self._lock:
                known = self._tables.get(number)
            if known is not None:
                return known
            found = self._prove(file(number), number)
            with self._lock:
                while self._tables and self._tables_nbytes + found.nbytes > _TABLES_NBYTES:
                    self._tables_nbytes -= self._tables.pop(next(iter(self._tables))).nbytes
                self._tables[number] = found
                self._tables_nbytes += found.nbytes
            return found

    def _prove(self, file: ReadFile, number: int) -> Table | OldTable:
        entry = self.manifest.files[number]
        if file.nbytes != entry.nbytes:
            raise CheckpointDamaged(f"{file.path}: expected {entry.nbytes} bytes, found {file.nbytes}")
        head, data = bytearray(entry.header_nbytes), bytearray(entry.table_nbytes)
        with doing(f"reading {file.path}"):
            file.read_into(memoryview(head), 0)
            file.read_into(memoryview(data), entry.nbytes - len(data))
        if self.manifest.schema == 1:
            table: Table | OldTable = self.manifest.old_tables[number]
        elif hashlib.sha256(data).hexdigest() != entry.digest:
            raise self._foreign(file, head, "table")
        else:
            table = Table.parse(bytes(data), self.manifest.block_nbytes, file.path)
        if files.crc32(head) != table.header_crc:
            raise self._foreign(file, head, "header")
        if (table.start, table.end) != (len(head), entry.nbytes - len(data)):
            raise CheckpointDamaged(f"{file.path}: expected parts between header and table, found another table")
        return table

    def _foreign(self, file: ReadFile, head: bytearray, what: str) -> CheckpointDamaged:
        other = save_id_of(bytes(head))
        known = other is not None and other != self.manifest.save_id
        return CheckpointDamaged(
            f"{file.path}: expected the {what} that was saved, found "
            + (f"a file of another save, {other}" if known else "another one")
        )

    def where(self, key: str) -> list[tuple[Box, int, str]]:
        """The parts of a tensor: the box, the rank that wrote it (of schema 1 the number of the file), the file."""
        entry = self.manifest.tensors[key]
        names = [file.name for file in self.manifest.files]
        return [(box, writer, names[self._number(writer, entry)]) for writer, box in entry.parts()]

    def verify(self, progress: Callable[[str, int], object] | None = None) -> None:
        """Read everything. Raises `CheckpointDamaged` for any byte that differs from the saved one, and for files in
        the directory that the manifest does not list. `progress`: called with the name of each finished file, and the
        bytes of tensors in it."""
        known = {MANIFEST_NAME, *(file.name for file in self.manifest.files)}
        if foreign := sorted(set(self.folder.names()) - known):
            raise CheckpointDamaged(
                f"{self.folder.path}: expected only the files of the manifest, found also {foreign}"
            )
        by_place = {number: place for place, number in self._numbers.items()}
        for number, file in enumerate(self.manifest.files):
            self._verify_file(number, *by_place[number])
            if progress is not None:
                progress(file.name, file.data_nbytes)

    def _verify_file(self, number: int, rank: int, volume: int) -> None:
        file, table = self._opened(number), self._table(self._opened, number)
        count = 0
        for part in self._parts_of(rank, volume):
            self._place(self._opened, number, self.manifest.tensors[part.key], part.box)
            count += 1
        if count != len(table):
            raise CheckpointDamaged(f"{file.path}: expected {count} parts of tensors, found {len(table)}")
        block = bytes_of(torch.empty(self.manifest.block_nbytes, dtype=torch.uint8))
        for place in table.places():
            with doing(f"reading {file.path}"):
                for index, crc in enumerate(place.crcs):
                    first = index * len(block)
                    piece = block[: place.nbytes - first]
                    file.read_into(piece, place.start + first)
                    files.compare(piece, crc, file.path, place.start + first)

    def _parts_of(self, rank: int, volume: int) -> Iterator[FilePart]:
        """The parts that the file of `rank` for `volume` has to have."""
        for entry in self.manifest.tensors.values():
            at = entry.rule.place_of(rank) if entry.volume == volume else None
            boxes = []
            if self.manifest.schema == 1:
                boxes = [box for writer, box in entry.parts() if writer == rank]
            elif at is not None and entry.rule.writer(at[1], entry.replica) == rank:
                boxes = [entry.rule.box(entry.shape, at[1])]
            for box in boxes:
                if box.numel:
                    yield FilePart(entry.key, entry.dtype, itemsize(entry.dtype), entry.shape, box)

    def sizes_problem(self) -> str | None:
        """The reason why data files cannot be complete, by their sizes alone; None if there is none."""
        for entry in self.manifest.files:
            try:
                nbytes = self.folder.nbytes(entry.name)
            except (OSError, CheckpointDamaged) as error:
                return f"{entry.name}: {error}"
            if nbytes != entry.nbytes:
                return f"{entry.name}: expected {entry.nbytes} bytes, found {nbytes}"
        return None


def _copy(region: Tensor, held: Tensor, take: Take) -> None:
    """Copy what is wanted of what was read."""
    region.copy_(held.as_strided(take.lengths, take.strides))


def _lend(copies: list[Copy], region: Tensor, held: Tensor, take: Take, dtype: torch.dtype) -> None:
    """Add the copy of what is wanted of bytes that were read."""
    if held.data_ptr() % dtype.itemsize:
        held = held.clone()  # of a file whose parts are not aligned, which no save writes
    copies.append((region, held.view(dtype).as_strided(take.lengths, take.strides)))


class _Block(NamedTuple):
    """A block to read from byte `start` of the file. If it is needed in part: `into` is filled from its byte `skip`."""

    start: int
    buffer: Buffer
    crc: int
    key: str
    into: Buffer | None
    skip: int


def _blocks_of(wanted: Sequence[_Wanted], block_nbytes: int) -> list[_Block]:
    """The blocks in the order of the file."""
    found = []
    for one in wanted:
        start, stop = one.start, one.start + len(one.buffer)
        for index in range(start // block_nbytes, -(-stop // block_nbytes)):
            first, last = index * block_nbytes, min((index + 1) * block_nbytes, one.place.nbytes)
            inside = one.buffer[max(first - start, 0) : min(last, stop) - start]
            if start <= first and last <= stop:
                found.append(_Block(one.place.start + first, inside, one.place.crcs[index], one.key, None, 0))
            else:
                piece = memoryview(bytearray(last - first))
                skip = max(start - first, 0)
                found.append(_Block(one.place.start + first, piece, one.place.crcs[index], one.key, inside, skip))
    return sorted(found, key=lambda block: block.start)


def _batches(blocks: Sequence[_Block]) -> Iterator[list[_Block]]:
    """Neighbours in the file, as many as one call reads."""
    batch, end, nbytes = list[_Block](), -1, 0
    for block in blocks:
        if batch and (block.start != end or len(batch) == _BATCH_PIECES or nbytes >= _BATCH_NBYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(block)
        nbytes += len(block.buffer)
        end = block.start + len(block.buffer)
    if batch:
        yield batch


def _shares(parts: Sequence[Any], threads: int) -> list[Sequence[Any]]:
    """`parts` in so many shares of neighbours, with about as many bytes each."""
    if threads < 2:
        return [parts]
    sizes = [part.numel * made.itemsize for _, _, _, part, made in parts]
    total, done, shares = sum(sizes), 0, [list[Any]() for _ in range(threads)]
    for part, nbytes in zip(parts, sizes, strict=True):
        shares[min(done * threads // max(total, 1), threads - 1)].append(part)
        done += nbytes
    return list(shares)
