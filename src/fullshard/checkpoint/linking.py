"""Incremental saves: data files of an earlier checkpoint that a save takes over as hard links, instead of writing them.

A file is taken over if it is what writing would make: the same header but for the id of its save, and the same table.
The table has the checksums of every block, which are computed from the state to save; nothing is trusted to be
unchanged. The bytes of the file are not read again: `verify` does that. Each directory has links of its own, so that
the removal of one changes no other.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence

from . import files
from .directory import not_found, open_folder, read_pointer
from .errors import CheckpointDamaged
from .files import Folder, doing
from .manifest import BLOCK_NBYTES, FileEntry, is_save_id
from .safetensors import FilePart, data_header, file_order, save_id_of
from .table import Table, nbytes_of

Checksums = list[tuple[int, ...]]


def generation_of(path: str) -> str:
    """The name of the current generation of the checkpoint at `path`. Raises `CheckpointNotFound` if there is none."""
    with doing(f"looking at {path}"), open_folder(path) as folder:
        pointer = read_pointer(folder)
        if pointer is None:
            raise not_found(folder)
        return pointer.generation


@contextlib.contextmanager
def opened(path: str, generation: str) -> Iterator[Folder | None]:
    """The directory of a generation; None if it is gone, or never was on this host: its files are then written."""
    try:
        folder = Folder.open(path)
    except OSError:
        yield None
        return
    with folder:
        try:
            inner = folder.sub(generation)
        except OSError:
            yield None
            return
        with inner:
            yield inner


def take_over(
    base: Folder, into: Folder, name: str, parts: Sequence[FilePart], data: Callable[[int], memoryview]
) -> tuple[FileEntry, Checksums] | None:
    """Link the file `name` of `base` into `into`, if it is that of `parts`, with these bytes. `data(i)`: of `parts[i]`.

    Returns its entry and the checksums of each part; None if it is another file or cannot be linked (another file
    system, one without links, too many of them).
    """
    order = file_order(parts)
    entries = [parts[i].entry for i in order]
    table_nbytes = nbytes_of([entry.nbytes for entry in entries], BLOCK_NBYTES)
    try:
        with base.reading(name) as file:
            # Ids of saves are equally long.
            head = bytearray(len(data_header([parts[i] for i in order], "0" * 32, name, table_nbytes)))
            nbytes = len(head) + sum(entry.nbytes for entry in entries) + table_nbytes
            if file.nbytes != nbytes:
                return None
            file.read_into(memoryview(head), 0)
            table = bytearray(table_nbytes)
            file.read_into(memoryview(table), nbytes - table_nbytes)
    except (OSError, CheckpointDamaged):
        return None
    save_id = save_id_of(bytes(head))
    if not is_save_id(save_id) or data_header([parts[i] for i in order], str(save_id), name, table_nbytes) != head:
        return None
    found = _checksums(bytes(table), order, data, f"{base.path}/{name}")
    if found is None:
        return None
    starts = [len(head)]
    for entry in entries:
        starts.append(starts[-1] + entry.nbytes)
    flat = [crc for i in order for crc in found[i]]
    names = [entry.name for entry in entries]
    if Table.of(files.crc32(head), names, starts, flat, BLOCK_NBYTES).to_bytes() != table:
        return None
    try:
        os.link(name, name, src_dir_fd=base.fd, dst_dir_fd=into.fd, follow_symlinks=False)
    except OSError:
        return None
    return FileEntry(name, nbytes, len(head), table_nbytes, hashlib.sha256(table).hexdigest()), found


def _checksums(table: bytes, order: Sequence[int], data: Callable[[int], memoryview], where: str) -> Checksums | None:
    """The checksums of all parts; None at the first that differs from the table's."""
    try:
        places = Table.parse(table, BLOCK_NBYTES, where).places()
    except CheckpointDamaged:
        return None
    found: Checksums = [()] * len(order)
    for i, place in zip(order, places, strict=True):
        found[i] = files.of_blocks(data(i), BLOCK_NBYTES)
        if list(found[i]) != list(place.crcs):
            return None
    return found
