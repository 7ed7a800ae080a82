"""Saving: what each rank holds, who writes what, the files, and the commit. See ADR 0022 for the protocol."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._version import __version__
from ..comm import Messenger
from ..layout import itemsize
from . import checksums
from .directory import Saving
from .errors import CheckpointMismatch
from .files import Folder, doing
from .manifest import (
    BLOCK_NBYTES,
    MANIFEST_NAME,
    Chunk,
    FileEntry,
    Manifest,
    Path,
    TensorEntry,
    ValueEntry,
    key_of,
    parse,
    to_bytes,
)
from .merge import REMEDY, Merged, merge
from .plan import Box, choose_writers
from .safetensors import Stored, file_order, header
from .tensors import Part, bytes_of, on_host, part_of
from .together import Message, agree
from .tree import Tree
from .values import Json, decode, encode

WRITER = f"fullshard {__version__}, torch {torch.__version__}"


class Snapshot(NamedTuple):
    """What one rank has to save: parts of tensors, in an order of its own, and values as JSON."""

    parts: list[tuple[Path, Part]]
    values: dict[str, tuple[Path, Json]]
    problems: list[str]


def snapshot(tree: Tree, copy: Callable[[Tensor], Tensor] | None = None) -> Snapshot:
    """The leaves of `tree`; with `copy`, of tensors that nobody else writes. Raises nothing for what is in it."""
    parts, problems = list[tuple[Path, Part]](), list(tree.problems)
    for leaf in tree.tensors.values():
        part = part_of(leaf.value)
        if isinstance(part, str):
            problems.append(f"{leaf.key}: {part}")
        else:
            copied = part.local if copy is None or part.local is None else copy(part.local)
            parts.append((leaf.path, part._replace(local=copied)))
    values = {key: (leaf.path, encode(leaf.value)) for key, leaf in tree.values.items()}
    return Snapshot(parts, values, problems)


class SaveJob:
    """One save on one rank. `run` is a call of all ranks of `messenger`."""

    def __init__(self, path: str, messenger: Messenger, take_first: Sequence[str]) -> None:
        self.path, self.messenger, self.take_first = os.path.abspath(path), messenger, tuple(take_first)
        self.what = f"saving {self.path}"
        # On the first rank, from the plan to the end.
        self._saving: Saving | None = None
        self._merged = Merged({}, [], [], {})

    def run(self, mine: Snapshot) -> str:
        """Write, and let it be the checkpoint; the path of its generation. On an error nothing has changed."""
        try:
            plan = agree(self.messenger, self.what, lambda: self._holdings(mine), self._plan)
            rank = self.messenger.rank
            done = agree(
                self.messenger,
                self.what,
                lambda: self._write(mine, plan, plan["write"][rank], plan["compare"][rank], plan["send"][rank]),
                self._commit,
            )
        finally:
            if self._saving is not None:
                self._saving.end()
        return str(done["path"])

    # ---- the plan ------------------------------------------------------------------------------------------

    def _holdings(self, mine: Snapshot) -> Message:
        if mine.problems:
            raise CheckpointMismatch(f"{self.what}: expected state that can be saved, found", mine.problems)
        tensors = [[path, part.dtype, part.shape, part.box] for path, part in mine.parts]
        values = [[path, _text_digest(value)] for path, value in mine.values.values()]
        return {"tensors": tensors, "values": values}

    def _plan(self, messages: list[Message]) -> Message:
        """On the first rank."""
        self._merged = merge(messages, self.take_first, self.what)
        self._saving = Saving.begin(self.path, uuid.uuid4().hex)
        write = choose_writers(self._merged.held)
        writers = [set(indices) for indices in write]
        # Who holds the same as a writer reads it, too: the replicas have to be equal.
        compare = [
            [i for i in range(len(parts)) if parts[i].nbytes and compared[i] and i not in writers[rank]]
            for rank, (parts, compared) in enumerate(zip(self._merged.held, self._merged.compared, strict=True))
        ]
        send: list[list[str]] = [[] for _ in write]
        for key, (_, holder) in self._merged.values.items():
            send[holder].append(key)
        return {
            "save_id": self._saving.save_id,
            "folder": self._saving.name,
            "write": write,
            "compare": compare,
            "send": send,
        }

    # ---- the files -----------------------------------------------------------------------------------------

    def _write(self, mine: Snapshot, plan: Message, write: list[int], compare: list[int], send: list[str]) -> Message:
        name = f"data-{self.messenger.rank:05d}.safetensors"
        parts = [mine.parts[index] for index in write]
        stored, written = None, list[Any]()
        if parts:
            with doing(f"writing {self.path}/{plan['folder']}/{name}"), Folder.open(self.path) as folder:
                with folder.sub(plan["folder"]) as saving:
                    stored, chunks = write_file(saving, name, parts, plan["save_id"], spare_cores(self.messenger.world))
            written = [[index, *chunk] for index, chunk in zip(write, chunks, strict=True)]
        digests = [[index, _digest_of_part(mine.parts[index][1])] for index in compare]
        return {
            "file": stored,
            "written": written,
            "compared": digests,
            "values": [[key, mine.values[key][1]] for key in send],
        }

    # ---- the commit ----------------------------------------------------------------------------------------

    def _commit(self, messages: list[Message]) -> Message:
        """On the first rank."""
        assert self._saving is not None
        merged, held = self._merged, self._merged.held
        files, chunks = list[FileEntry](), dict[str, list[Chunk]]()
        digests: dict[tuple[str, Box], dict[int, int]] = {}
        for rank, message in enumerate(messages):
            if message["file"] is not None:
                for index, start, nbytes, crcs in message["written"]:
                    part = held[rank][index]
                    chunks.setdefault(part.key, []).append(Chunk(part.box, len(files), start, nbytes, tuple(crcs)))
                    digests.setdefault((part.key, part.box), {})[rank] = _digest(crcs)
                files.append(FileEntry(*message["file"]))
            for index, digest in message["compared"]:
                part = held[rank][index]
                digests.setdefault((part.key, part.box), {})[rank] = digest
        if different := different_replicas(digests):
            raise CheckpointMismatch(f"{self.what}: expected replicas that are equal, found", different, REMEDY)
        sizes = self._saving.sizes([file.name for file in files])
        for file, nbytes in zip(files, sizes, strict=True):
            if nbytes != file.nbytes:
                raise OSError(0, f"{file.name}: {file.nbytes} bytes were written, {nbytes} are there")
        sent = {key: value for message in messages for key, value in message["values"]}
        manifest = Manifest(
            save_id=self._saving.save_id,
            world=self.messenger.world,
            writer=WRITER,
            tensors={
                key: TensorEntry(path, dtype, shape, tuple(sorted(chunks.get(key, ()))))
                for key, (path, dtype, shape) in merged.tensors.items()
            },
            values={key: ValueEntry(path, decode(sent[key])) for key, (path, _) in merged.values.items()},
            files=tuple(files),
        )
        data = to_bytes(manifest)
        # What could not be read is not committed.
        parse(data, f"{self.path}/{MANIFEST_NAME}")
        return {"path": self._saving.commit(data)}


def write_file(
    folder: Folder, name: str, parts: Sequence[tuple[Path, Part]], save_id: str, threads: int = 1
) -> tuple[FileEntry, list[tuple[int, int, tuple[int, ...]]]]:
    """A data file of `parts`, synced. Returns its entry and, for each part, (start, nbytes, checksums).

    Checksums that are fast are computed block by block on the way to the file. Those of the standard library are
    computed beside the writing, by `threads`: all of it leaves the interpreter to others, and the disk is what is
    waited for. A part on a device is copied to the host for just as long as that takes.
    """
    stored = [_stored(path, part) for path, part in parts]
    order = file_order(stored)
    head = header([stored[i] for i in order], save_id, name)
    found: dict[int, tuple[int, int, tuple[int, ...]]] = {}
    with Beside(0 if checksums.FAST else threads) as beside, folder.writing(name) as file:
        file.write(memoryview(head))
        for i in order:
            start, data = file.nbytes, _bytes_of_part(parts[i][1])
            if checksums.FAST:
                found[i] = (start, len(data), file.write_summed(data, BLOCK_NBYTES))
            else:
                found[i] = (start, len(data), ())
                beside.submit(data)
                file.write(data)
        file.sync()
        entry = FileEntry(name, file.nbytes, len(head), checksums.crc32(head))
    if not checksums.FAST:
        for i, crcs in zip(order, beside.results, strict=True):
            found[i] = (*found[i][:2], crcs)
    return entry, [found[i] for i in range(len(parts))]


class Beside:
    """Threads that compute checksums until the `with` block ends.

    Not an executor: those refuse work when the process is about to end, when the last save may still be under way.
    """

    # Parts that wait: of a tensor on a device each is a copy on the host.
    _WAITING = 4

    def __init__(self, threads: int) -> None:
        # In the order in which parts were given.
        self.results: list[tuple[int, ...]] = []
        self._errors: list[Exception] = []
        self._given: queue.Queue[tuple[int, memoryview] | None] = queue.Queue(self._WAITING)
        self._threads = [
            threading.Thread(target=self._compute, name="fullshard-checksums", daemon=True) for _ in range(threads)
        ]

    def submit(self, data: memoryview) -> None:
        self.results.append(())
        self._given.put((len(self.results) - 1, data))

    def _compute(self) -> None:
        while (given := self._given.get()) is not None:
            index, data = given
            try:
                self.results[index] = checksums.of_blocks(data, BLOCK_NBYTES)
            except Exception as error:
                self._errors.append(error)

    def __enter__(self) -> Beside:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for _ in self._threads:
            self._given.put(None)
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]


def spare_cores(world: int) -> int:
    """How many threads of this rank find a core when all ranks of the machine do the same: 1 to 4."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(local) if local.isdigit() and int(local) else world
    return min(4, max(1, (os.cpu_count() or 1) // ranks))


def _stored(path: Path, part: Part) -> Stored:
    assert part.box is not None
    return Stored(key_of(path), part.dtype, itemsize(part.dtype), part.shape, part.box)


def _bytes_of_part(part: Part) -> memoryview:
    assert part.local is not None
    return bytes_of(on_host(part.local))


def _text_digest(value: Json) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _digest_of_part(part: Part) -> int:
    return _digest(checksums.of_blocks(_bytes_of_part(part), BLOCK_NBYTES))


def _digest(crcs: Sequence[int]) -> int:
    return checksums.crc32(b"".join(crc.to_bytes(4, "little") for crc in crcs))


def different_replicas(digests: dict[tuple[str, Box], dict[int, int]]) -> list[str]:
    """Parts whose holders do not have the same bytes. `digests`: of a part, by rank."""
    return [
        f"{key}: {', '.join(f'rank {rank} has {digest:08x}' for rank, digest in sorted(by_rank.items()))} at {box}"
        for (key, box), by_rank in sorted(digests.items())
        if len(set(by_rank.values())) > 1
    ]
