"""Reading parts of tensors out of a generation, every byte checked against its checksum before anybody sees it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import itemsize
from . import checksums
from .errors import CheckpointDamaged
from .files import Folder, ReadFile, doing
from .manifest import MANIFEST_NAME, Chunk, Manifest, TensorEntry
from .plan import Box, Take, takes
from .safetensors import save_id_of
from .tensors import bytes_of, dtype_of

# Files that are open at a time; a checkpoint of a large world has thousands.
_MAX_OPEN = 64


class Reader:
    """The data of one generation. `folder` is open, and closed with the reader."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._open: dict[int, ReadFile] = {}
        # Files whose size and header were looked at.
        self._proven: set[int] = set()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()
        self.folder.close()

    # ---- tensors -------------------------------------------------------------------------------------------

    def read(self, entry: TensorEntry, box: Box, into: Tensor | None = None) -> Tensor:
        """`box` of a tensor: contiguous, on the host, in the stored dtype, owned by the caller.

        `into`: a tensor that is all of this already, to be filled; without it a new one.
        """
        made = torch.empty(box.lengths, dtype=dtype_of(entry.dtype)) if into is None else into
        if made.numel():
            for take in takes(box, [chunk.box for chunk in entry.chunks]):
                self._fill(made, entry, take)
        return made

    def _fill(self, made: Tensor, entry: TensorEntry, take: Take) -> None:
        chunk, size, block = entry.chunks[take.part], itemsize(entry.dtype), self.manifest.block_nbytes
        region = made
        for dim, (start, length) in enumerate(zip(take.target, take.lengths, strict=True)):
            region = region.narrow(dim, start, length)
        if take.contiguous and region.is_contiguous():
            self._read_bytes(bytes_of(region), chunk, take.first * size, entry.key)
            return
        # What has to be read: whole blocks, since they are what has a checksum.
        first = take.first * size // block
        last = -(-take.stop * size // block)
        start, stop = first * block, min(last * block, chunk.nbytes)
        buffer = torch.empty(stop - start, dtype=torch.uint8)
        self._read_blocks(bytes_of(buffer), chunk, first, last, entry.key)
        # Elements begin at a multiple of their size: blocks are multiples of every itemsize.
        elements = buffer.view(made.dtype)
        region.copy_(elements.as_strided(take.lengths, take.strides, take.first - start // size))

    def _read_bytes(self, buffer: memoryview, chunk: Chunk, start: int, key: str) -> None:
        """Fill `buffer` from byte `start` of a chunk. Blocks of which it takes all are read into it, the first and the
        last one beside it where it takes a part of them."""
        block = self.manifest.block_nbytes
        stop = start + len(buffer)
        # Blocks `inner` to `outer` lie in the buffer; the last one of a chunk is shorter.
        inner = -(-start // block)
        outer = max(inner, -(-stop // block) if stop == chunk.nbytes else stop // block)
        if inner < outer:
            self._read_blocks(buffer[inner * block - start : outer * block - start], chunk, inner, outer, key)
        for index in sorted({start // block, (stop - 1) // block} - set(range(inner, outer))):
            first, last = index * block, min((index + 1) * block, chunk.nbytes)
            whole = memoryview(bytearray(last - first))
            self._read_blocks(whole, chunk, index, index + 1, key)
            begin, end = max(start, first), min(stop, last)
            buffer[begin - start : end - start] = whole[begin - first : end - first]

    def _read_blocks(self, buffer: memoryview, chunk: Chunk, first: int, last: int, key: str) -> None:
        """Blocks `first` to `last` of a chunk into `buffer`, compared."""
        block = self.manifest.block_nbytes
        file = self.file(chunk.file)
        start = chunk.start + first * block
        with doing(f"reading {file.path} for {key}"):
            for index in range(first, last):
                offset = (index - first) * block
                piece = buffer[offset : offset + block]
                file.read_into(piece, start + offset)
                checksums.compare(piece, chunk.crcs[index : index + 1], block, f"{file.path}: {key}", start + offset)

    # ---- files ---------------------------------------------------------------------------------------------

    def file(self, number: int) -> ReadFile:
        """A data file, open; its size and header are those that were saved."""
        found = self._open.get(number)
        if found is None:
            entry = self.manifest.files[number]
            with doing(f"opening {self.folder.path}/{entry.name}"):
                try:
                    found = self.folder.reading(entry.name)
                except FileNotFoundError:
                    raise CheckpointDamaged(
                        f"{self.folder.path}/{entry.name}: expected this file of the checkpoint, found none"
                    ) from None
            while len(self._open) >= _MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[number] = found
        if number not in self._proven:
            self._prove(found, number)
            self._proven.add(number)
        return found

    def _prove(self, file: ReadFile, number: int) -> None:
        entry = self.manifest.files[number]
        if file.nbytes != entry.nbytes:
            raise CheckpointDamaged(f"{file.path}: expected {entry.nbytes} bytes, found {file.nbytes}")
        head = bytearray(entry.header_nbytes)
        with doing(f"reading {file.path}"):
            file.read_into(memoryview(head), 0)
        if checksums.crc32(head) != entry.header_crc:
            other = save_id_of(bytes(head))
            known = other is not None and other != self.manifest.save_id
            raise CheckpointDamaged(
                f"{file.path}: expected the header that was saved, found "
                + (f"a file of another save, {other}" if known else "another one")
            )

    def verify(self) -> None:
        """Read everything. Raises `CheckpointDamaged` for any byte that is not what was saved, and for files in the
        directory that the manifest does not know."""
        known = {MANIFEST_NAME, *(file.name for file in self.manifest.files)}
        if foreign := sorted(set(self.folder.names()) - known):
            raise CheckpointDamaged(f"{self.folder.path}: expected the files of the manifest, found also {foreign}")
        by_file: list[list[tuple[int, str, Chunk]]] = [[] for _ in self.manifest.files]
        for key, entry in self.manifest.tensors.items():
            for chunk in entry.chunks:
                by_file[chunk.file].append((chunk.start, key, chunk))
        buffer = torch.empty(self.manifest.block_nbytes, dtype=torch.uint8)
        for number, chunks in enumerate(by_file):
            self.file(number)
            for _, key, chunk in sorted(chunks, key=lambda one: one[0]):
                self._verify_chunk(key, chunk, buffer)

    def _verify_chunk(self, key: str, chunk: Chunk, buffer: Tensor) -> None:
        block = self.manifest.block_nbytes
        for index in range(len(chunk.crcs)):
            nbytes = min(block, chunk.nbytes - index * block)
            self._read_blocks(bytes_of(buffer)[:nbytes], chunk, index, index + 1, key)

    def sizes_problem(self) -> str | None:
        """Why data files cannot be whole, by their sizes alone; None when they may be."""
        return _sizes_problem(self.folder, self.manifest)


def _sizes_problem(folder: Folder, manifest: Manifest) -> str | None:
    for entry in manifest.files:
        try:
            nbytes = folder.nbytes(entry.name)
        except (OSError, CheckpointDamaged) as error:
            return f"{entry.name}: {error}"
        if nbytes != entry.nbytes:
            return f"{entry.name}: expected {entry.nbytes} bytes, found {nbytes}"
    return None


def in_file_order(manifest: Manifest, keys: Sequence[str]) -> list[str]:
    """`keys` of tensors, so that files are read one after another."""
    chunks = {key: manifest.tensors[key].chunks for key in keys}
    return sorted(keys, key=lambda key: min(((c.file, c.start) for c in chunks[key]), default=(0, 0)))
