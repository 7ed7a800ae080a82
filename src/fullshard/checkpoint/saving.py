"""Saving: what each rank holds, who writes it, the files, and the commit. See ADR 0012 for the protocol. Also here:
a checkpoint written by one process, tensor by tensor, for converters and tools."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._version import __version__
from ..comm import Messenger
from ..layout import itemsize
from ..peers import had_losses, loss_over, shown_ranks
from . import files
from .adapters import described
from .agreement import Message, agree
from .companions import ROOM, TIED, files_of, tied_names
from .directory import Saving
from .errors import CheckpointMismatch
from .files import Folder, WriteFile, doing
from .hosts import check as check_hosts
from .manifest import (
    BLOCK_NBYTES,
    MANIFEST_NAME,
    Chunk,
    FileEntry,
    Json,
    Manifest,
    TensorEntry,
    ValueEntry,
    decode,
    encode,
    parse,
    to_bytes,
)
from .plan import FLATTENED, REMEDY, Box, Holdings, KeyPath, TensorSpec, choose_writers, key_of, merge, together, whole
from .safetensors import FilePart, data_header, file_order
from .staging import Staging, StagingMemory
from .state import Part, Tree, bytes_of, dtype_name, named_tensors, on_host, part_of
from .wrapped import Kinds, Saved, is_wrapper, saved

WRITER = f"fullshard {__version__}, torch {torch.__version__}"
# CheckpointWriter starts a new data file after this many bytes.
_FILE_NBYTES = 4 << 30


class Snapshot(NamedTuple):
    """The state that one rank saves: parts of tensors, in its own order, and values as JSON."""

    parts: list[tuple[KeyPath, Part]]
    values: dict[str, tuple[KeyPath, Json]]
    problems: list[str]


def snapshot(tree: Tree, *, companions: bool = False) -> Snapshot:
    """The leaves of `tree`, whose tensors share its memory; with `companions`, on one rank, also the files that belong
    to its models. Problems of its contents are listed, not raised."""
    parts, problems = list[tuple[KeyPath, Part]](), list(tree.problems)
    values = {key: (leaf.path, encode(leaf.value)) for key, leaf in tree.values.items()}
    kinds = dict[type, Kinds | None]()
    for leaf in tree.tensors.values():
        found: Saved | Part | str
        found = saved(leaf.path, leaf.value, kinds) if is_wrapper(leaf.value) else part_of(leaf.value)
        if isinstance(found, str):
            problems.append(f"{leaf.key}: {found}")
            continue
        if isinstance(found, Part):
            found = Saved([(leaf.path, found)], None)
        parts += found.parts
        if found.layout is not None:
            path = (*leaf.path, FLATTENED)
            values[key_of(path)] = path, encode(found.layout)
    if had_losses:
        meshes = {leaf.value.device_mesh for leaf in tree.tensors.values() if isinstance(leaf.value, DTensor)}
        for loss in dict.fromkeys(loss_over(mesh.mesh.flatten().tolist()) for mesh in meshes):
            if loss is not None:
                problems.append(f"a model that was lost on a device: on {shown_ranks(loss.ranks)} {loss.text}; load it")
    for path, owner in tree.owners if companions else ():
        stored = files_of(owner) | described(owner)
        for name, data in stored.items():
            parts.append(((ROOM, *path, name), stored_part(data)))
        if stored and isinstance(owner, torch.nn.Module):
            tied: KeyPath = (ROOM, *path, TIED)
            values[key_of(tied)] = (tied, encode(tied_names(named_tensors(owner), owner)))
    return Snapshot(parts, values, problems)


def stored_part(data: bytes) -> Part:
    """A file as a tensor of bytes."""
    made = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return Part("uint8", (len(data),), whole((len(data),)), made)


class SaveJob:
    """One save on one rank. All ranks of `messenger` call `run`."""

    def __init__(self, path: str, messenger: Messenger, take_first: Sequence[str]) -> None:
        self.path, self.messenger, self.take_first = os.path.abspath(path), messenger, tuple(take_first)
        self.what = f"saving {self.path}"
        # Of a save in the background.
        self.staging: Staging | None = None
        # On the first rank, from the plan until the end.
        self._saving: Saving | None = None

    def run(self, mine: Snapshot) -> str:
        """Write and commit the checkpoint; returns the path of its generation. On an error nothing has changed."""
        try:
            plan = agree(self.messenger, self.what, lambda: self._holdings(mine), self._plan)
            largest = sum(mine.parts[i][1].nbytes for i in plan["write"][self.messenger.rank])
            check_hosts(self.messenger, self.what, self.path, plan["folder"], largest)
            done = agree(self.messenger, self.what, lambda: self._write(mine, plan), self._commit)
        finally:
            if self._saving is not None:
                self._saving.end()
        return str(done["path"])

    # ---- the plan ------------------------------------------------------------------------------------------

    def _holdings(self, mine: Snapshot) -> Message:
        if mine.problems:
            raise CheckpointMismatch(f"{self.what}: expected state that can be saved, found", mine.problems)
        tensors = [[path, part.dtype, part.shape, part.box, *(part.around or ())] for path, part in mine.parts]
        values = [[path, _text_digest(value)] for path, value in mine.values.values()]
        return {"tensors": tensors, "values": values}

    def _plan(self, messages: list[Message]) -> Message:
        """On the first rank."""
        self._merged: Holdings = merge(messages, self.take_first, self.what)
        self._saving = Saving.begin(self.path, uuid.uuid4().hex)
        write = choose_writers(self._merged.held)
        nbytes = [
            sum(parts[i].nbytes for i in each) for parts, each in zip(self._merged.held, write, strict=True) if each
        ]
        self._saving.prove_room(sum(nbytes), len(nbytes), max(nbytes, default=0), "data-00000.safetensors")
        # Ranks that hold the same part as its writer read it too, because replicas have to be equal.
        compare = [
            sorted({i for i, part in enumerate(parts) if part.nbytes}.difference(written))
            for parts, written in zip(self._merged.held, write, strict=True)
        ]
        send: list[list[str]] = [[] for _ in write]
        for key, (_, holders) in self._merged.values.items():
            for holder in holders:
                send[holder].append(key)
        plan = {"write": write, "compare": compare, "send": send}
        return {"save_id": self._saving.save_id, "folder": self._saving.name, **plan}

    # ---- the files -----------------------------------------------------------------------------------------

    def _write(self, mine: Snapshot, plan: Message) -> Message:
        rank = self.messenger.rank
        write, compare, send = plan["write"][rank], plan["compare"][rank], plan["send"][rank]
        staging = self.staging or Staging(StagingMemory())
        in_file = file_order([_file_part(*mine.parts[i]) for i in write])
        mine = mine._replace(parts=staging.after_plan(mine.parts, [*compare, *(write[i] for i in in_file)]))
        read = staging.live.read
        sums = {}
        for index in compare:
            sums[index] = files.of_blocks(_bytes_of_part(mine.parts[index][1]), BLOCK_NBYTES)
            read(index)
        name = f"data-{rank:05d}.safetensors"
        parts = [mine.parts[index] for index in write]
        stored, written = None, list[Any]()
        if parts:
            with doing(f"writing {self.path}/{plan['folder']}/{name}"), Folder.open(self.path) as folder:
                with folder.sub(plan["folder"]) as saving:
                    stored, chunks = write_file(
                        saving,
                        name,
                        parts,
                        plan["save_id"],
                        spare_cores(self.messenger.world),
                        lambda i: read(write[i]),
                    )
            written = [[index, *chunk] for index, chunk in zip(write, chunks, strict=True)]
        staging.live.check()
        compared = [[index, _digest(crcs)] for index, crcs in sums.items()]
        values = [[key, mine.values[key][1]] for key in send]
        return {"file": stored, "written": written, "compared": compared, "values": values}

    # ---- the commit ----------------------------------------------------------------------------------------

    def _commit(self, messages: list[Message]) -> Message:
        """On the first rank."""
        assert self._saving is not None
        merged, held = self._merged, self._merged.held
        entries, chunks = list[FileEntry](), dict[str, list[Chunk]]()
        digests: dict[tuple[str, Box], dict[int, int]] = {}
        for rank, message in enumerate(messages):
            for index, start, nbytes, crcs in message["written"]:
                key, box, _ = held[rank][index]
                chunks.setdefault(key, []).append(Chunk(box, len(entries), start, nbytes, tuple(crcs)))
                digests.setdefault((key, box), {})[rank] = _digest(crcs)
            for index, digest in message["compared"]:
                digests.setdefault(held[rank][index][:2], {})[rank] = digest
            if message["file"] is not None:
                entries.append(FileEntry(*message["file"]))
        if different := different_replicas(digests):
            raise CheckpointMismatch(f"{self.what}: expected equal replicas, found", different, REMEDY)
        sizes = self._saving.sizes([file.name for file in entries])
        for file, nbytes in zip(entries, sizes, strict=True):
            if nbytes != file.nbytes:
                raise OSError(0, f"{file.name}: {file.nbytes} bytes were written, the file has {nbytes}")
        sent: dict[str, list[Any]] = {}
        for message in messages:
            for key, value in message["values"]:
                sent.setdefault(key, []).append(decode(value))
        tensors = [TensorEntry(*spec, tuple(sorted(chunks.get(key, ())))) for key, spec in merged.tensors.items()]
        values = [
            ValueEntry(path, self._together(key, sent[key], ranks)) for key, (path, ranks) in merged.values.items()
        ]
        values += [ValueEntry(path, [*rows]) for path, rows in merged.computed.values()]
        return {"path": commit(self._saving, self.path, self.messenger.world, tensors, values, entries)}

    def _together(self, key: str, values: list[Any], ranks: list[int]) -> Any:
        try:
            return together(values)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            found = [f"{key}: one value on rank {ranks[0]}, another on rank {rank}" for rank in ranks[1:]]
            text = f"{self.what}: expected consistent state on all ranks, found"
            raise CheckpointMismatch(text, found, REMEDY) from None


def commit(
    saving: Saving,
    path: str,
    world: int,
    tensors: Sequence[TensorEntry],
    values: Sequence[ValueEntry],
    entries: Sequence[FileEntry],
) -> str:
    """Make the written files the checkpoint; returns the path of its generation."""
    by_key, values_by_key = {entry.key: entry for entry in tensors}, {entry.key: entry for entry in values}
    data = to_bytes(Manifest(saving.save_id, world, WRITER, by_key, values_by_key, tuple(entries)))
    # Never commit a manifest that could not be read.
    parse(data, f"{path}/{MANIFEST_NAME}")
    return saving.commit(data)


def write_file(
    folder: Folder,
    name: str,
    parts: Sequence[tuple[KeyPath, Part]],
    save_id: str,
    threads: int = 1,
    read: Callable[[int], None] = lambda _: None,
) -> tuple[FileEntry, list[tuple[int, int, tuple[int, ...]]]]:
    """A data file of `parts`, synced. Returns its entry and, for each part, (start, nbytes, checksums). `read`: called
    with the number of each part, on any thread, when its memory is no longer used.

    With a fast checksum library, checksums are computed block by block on the way to the file. Those of the standard
    library are computed by `threads` in parallel with the writing: both release the interpreter lock, and the disk is
    the bottleneck. A part on a device is copied to the host only for that time.
    """
    described = [_file_part(path, part) for path, part in parts]
    order = file_order(described)
    head = data_header([described[i] for i in order], save_id, name)
    found, pending = dict[int, tuple[int, int, tuple[int, ...]]](), dict[int, Future[tuple[int, ...]]]()
    with ChecksumThreads(0 if files.FAST else threads) as beside, folder.writing(name) as file:
        file.write(memoryview(head))
        for i in order:
            start, data = file.nbytes, _bytes_of_part(parts[i][1])
            if files.FAST:
                found[i] = (start, len(data), file.write_summed(data, BLOCK_NBYTES))
                read(i)
            else:
                found[i], pending[i] = (start, len(data), ()), beside.submit(data)
                file.write(data)
                pending[i].add_done_callback(lambda _, i=i: read(i))  # type: ignore[misc]
        file.sync()
        entry = FileEntry(name, file.nbytes, len(head), files.crc32(head))
    for i, crcs in pending.items():
        found[i] = (*found[i][:2], crcs.result())
    return entry, [found[i] for i in range(len(parts))]


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


def _file_part(path: KeyPath, part: Part) -> FilePart:
    assert part.box is not None
    return FilePart(key_of(path), part.dtype, itemsize(part.dtype), part.shape, part.box)


def _bytes_of_part(part: Part) -> memoryview:
    assert part.local is not None
    return bytes_of(on_host(part.local))


def _text_digest(value: Json) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _digest(crcs: Sequence[int]) -> int:
    return files.crc32(b"".join(crc.to_bytes(4, "little") for crc in crcs))


def different_replicas(digests: dict[tuple[str, Box], dict[int, int]]) -> list[str]:
    """Parts whose holders have different bytes. `digests`: by part and rank."""
    return [
        f"{key}: {', '.join(f'rank {rank} has {digest:08x}' for rank, digest in sorted(by_rank.items()))} at {box}"
        for (key, box), by_rank in sorted(digests.items())
        if len(set(by_rank.values())) > 1
    ]


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
        file_nbytes: int = _FILE_NBYTES,
    ) -> None:
        self._path = os.path.abspath(os.fspath(checkpoint_id))
        self._specs = [TensorSpec(tuple(s.path), s.dtype, tuple(s.shape)) for s in tensors]
        self._values = [ValueEntry(tuple(path), decode(encode(value))) for path, value in (values or {}).items()]
        keys = Counter(key_of(path) for path, *_ in [*self._specs, *self._values])
        twice = sorted(key for key, count in keys.items() if count > 1)
        if twice:
            raise CheckpointMismatch(f"saving {self._path}: expected each key once, found", twice)
        self._groups = _grouped(self._specs, file_nbytes)
        self._tensors: list[TensorEntry] = []
        self._files: list[FileEntry] = []
        self._file: WriteFile | None = None

    def __enter__(self) -> CheckpointWriter:
        self._saving = Saving.begin(self._path, uuid.uuid4().hex)
        with Folder.open(self._path) as folder:
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
        chunks: tuple[Chunk, ...] = ()
        if tensor.numel():
            with doing(f"writing {key} to {self._path}"):
                chunks = (self._write(whole(spec.shape), bytes_of(on_host(tensor.detach()))),)
        self._tensors.append(TensorEntry(*spec, chunks))

    def _write(self, box: Box, data: memoryview) -> Chunk:
        number = len(self._files)
        name, group = f"data-{number:05d}.safetensors", self._groups[number]
        if self._file is None:
            parts = [FilePart(s.key, s.dtype, itemsize(s.dtype), s.shape, whole(s.shape)) for s in group]
            self._head, self._left = data_header(parts, self._saving.save_id, name), len(group)
            self._file = self._folder.writing(name)
            self._file.write(memoryview(self._head))
        file = self._file
        chunk = Chunk(box, number, file.nbytes, len(data), file.write_summed(data, BLOCK_NBYTES))
        self._left -= 1
        if not self._left:
            file.sync()
            self._files.append(FileEntry(name, file.nbytes, len(self._head), files.crc32(self._head)))
            file.close()
            self._file = None
        return chunk

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                if left := [spec.key for spec in self._specs[len(self._tensors) :]]:
                    raise CheckpointMismatch(f"saving {self._path}: expected all announced tensors, missing", left)
                commit(self._saving, self._path, 1, self._tensors, self._values, self._files)
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
