"""Saving: what each rank holds, who writes it, the files, and the commit. See ADR 0012 for the protocol.

1  each rank claims a plan: it knows one for what it holds, or computes it (save_plan.py). If all claim the same,
   and have the same values, the save begins; otherwise ranks declare what they hold, and the first one merges it
2  each writes its files, and sends a record for each; replicas are compared; the first rank commits
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import threading
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor

from ..comm import Messenger
from ..peers import had_losses, loss_over, shown_ranks
from . import files, local_first
from .adapters import described
from .agreement import Heard, Message, Said, agree, is_loss
from .bucket import BucketSaving, begin
from .companions import ROOM, TIED, files_of, tied_names
from .directory import Saving, reach
from .errors import CheckpointError, CheckpointMismatch
from .files import Folder, doing
from .hosts import check as check_hosts
from .linking import generation_of, opened, take_over
from .manifest import BLOCK_NBYTES, FileEntry, Json, ValueEntry, data_name, decode, encode
from .plan import FLATTENED, MODULUS, KeyPath, key_of, together, whole
from .reading import Progress
from .retention import using
from .rules import Rule
from .save_plan import (
    REMEDY,
    Declaration,
    Own,
    Plan,
    Share,
    balance,
    balance_of_values,
    declare,
    merge,
    number_of,
    plan_of,
    share_of,
)
from .staging import Live, Named, Staging, StagingMemory
from .state import Part, Tree, bytes_of, named_tensors, on_host, part_of
from .store import is_url, location
from .wrapped import Kinds, Saved, is_wrapper, saved
from .writing import Advance, manifest_of, spare_cores, write_file

# Of a data file, from its writer to the first rank: rank, volume, bytes of header, table and all, digest of the table.
_RECORD = struct.Struct("<IIIIQ32s")
# Frozen parameters of fewer bytes, all together, are stored with the others.
_APART_NBYTES = 1 << 20
# Plans that a process group keeps, for layouts that take turns.
_KEPT = 4


class Snapshot(NamedTuple):
    """The state that one rank saves: parts of tensors, in its own order, and values as JSON. `apart`: keys of tensors
    that get data files of their own, which a later save may take over; the same on all ranks."""

    parts: list[tuple[KeyPath, Part]]
    values: dict[str, tuple[KeyPath, Json]]
    problems: list[str]
    apart: frozenset[str] = frozenset()


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
    return Snapshot(parts, values, problems, _apart(tree))


def _apart(tree: Tree) -> frozenset[str]:
    """Keys of the frozen parameters of its models, if they are worth files of their own."""
    found: dict[str, int] = {}
    for path, owner in tree.owners:
        if isinstance(owner, torch.nn.Module) and not all(each.requires_grad for each in owner.parameters()):
            for name, value in named_tensors(owner).items():
                if isinstance(value, torch.nn.Parameter) and not value.requires_grad:
                    found[key_of((*path, name))] = value.numel() * value.element_size()
    return frozenset(found if sum(found.values()) >= _APART_NBYTES else ())


def stored_part(data: bytes) -> Part:
    """A file as a tensor of bytes."""
    made = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return Part("uint8", (len(data),), whole((len(data),)), made)


class SaveOptions(NamedTuple):
    """Arguments of `save`, as this rank gave them."""

    take_first: tuple[str, ...] = ()
    # A checkpoint whose files may be linked.
    base: str | None = None
    # Called with the bytes that this rank has written, and those that it writes; on any thread.
    progress: Progress | None = None
    # A directory of this host for the files of a save to a store, until they are there.
    local: str | None = None


class SaveJob:
    """One save on one rank. All ranks of `messenger` call `run`."""

    def __init__(self, path: str, messenger: Messenger, options: SaveOptions) -> None:
        self.path, self.messenger, self.options = location(path), messenger, options
        self.what = f"saving {self.path}"
        # The copies of a save in the background.
        self.staging: Staging | None = None
        # The save in the directory: on the first rank, from the plan until the end.
        self._saving: Saving | BucketSaving | None = None
        # The checksums of each part that this rank holds.
        self._crcs: dict[int, Sequence[int]] = {}

    def run(self, mine: Snapshot) -> str:
        """Write and commit the checkpoint; returns the path of its generation. On an error nothing has changed."""
        self._mine = mine
        with contextlib.ExitStack() as stack:
            if self.options.base is not None:
                stack.enter_context(using(self.options.base))
            stack.callback(self._end)
            begun = agree(self.messenger, self.what, self._claim, self._begin_or_ask)
            if "ask" in begun:
                begun = agree(self.messenger, self.what, self._declared.message, self._merge)
            if is_url(self.path):
                agree(self.messenger, self.what, lambda: {} if self._prepare(begun) else {}, lambda _: {})
            else:
                check_hosts(self.messenger, self.what, self.path, begun["folder"], lambda: self._prepare(begun))
            local = self.options.local
            try:
                done = agree(self.messenger, self.what, lambda: self._write(begun), self._commit)
                if "differ" in done:
                    self._name_differences()
            except CheckpointError as error:
                # Where a rank was lost the first one may have put the manifest into the store.
                if local is not None and not is_loss(error):
                    local_first.discard(local, self.path, begun["folder"])
                raise
            if local is not None:
                # From now on this save can be finished, after a crash by `RecoverJob`, and no older one is needed.
                local_first.clear(local, self.path, itself=False)
                done = agree(self.messenger, self.what, lambda: self._upload(begun), self._point)
                local_first.clear(local, self.path)
        return str(done["path"])

    def _end(self) -> None:
        if self._saving is not None:
            self._saving.end()

    # ---- the plan ------------------------------------------------------------------------------------------

    def _claim(self) -> Said:
        mine = self._mine
        if mine.problems:
            raise CheckpointMismatch(f"{self.what}: expected state that can be saved, found", mine.problems)
        self._own = _owned(mine.parts, self.messenger.members)
        self._digests = {key: _text_digest(value) for key, (_, value) in mine.values.items()}
        values = [(path, self._digests[key]) for key, (path, _) in mine.values.items()]
        self._declared = declare(self._own, values, self.options.take_first, mine.apart, self.messenger.world)
        self._plan = plan = plans_of(self.messenger).get(self._declared.digest) or self._computed()
        if plan is None:
            return Said({"plan": None})
        return Said({"plan": plan.id}, (balance_of_values(plan, self.messenger.rank, self._digests),))

    def _computed(self) -> Plan | None:
        """The plan, where this rank knows what all others hold if they declare the same."""
        return plan_of(self._declared) if self._declared.is_regular else None

    def _begin_or_ask(self, heard: Heard) -> Message:
        """Begin, on the first rank, or ask for declarations if plans or values differ."""
        if len(heard.groups) > 1 or self._plan is None or any(heard.numbers):
            return {"ask": True}
        return self._begin(self._plan)

    def _merge(self, heard: Heard) -> Message:
        """Make one plan of all declarations, on the first rank, and begin."""
        self._plan = merge(heard.groups, self.messenger.world, self.what)
        return {**self._begin(self._plan), "plan": self._plan.to_json()}

    def _begin(self, plan: Plan) -> Message:
        """Begin, on the first rank, which knows what will be written."""
        base = {} if self.options.base is None else {"base": generation_of(self.options.base)}
        by_disks = {} if self.options.local is None else {"by_disks": True}
        saving = self._saving = begin(self.path, uuid.uuid4().hex)
        # Files of other ranks are about as large as those of this one.
        largest = share_of(plan, self._own, self.messenger.rank).largest_file
        nbytes, names = plan.nbytes, plan.files
        if base:
            apart = [plan.entries[key] for key in self._mine.apart if key in plan.entries]
            nbytes -= sum(entry.nbytes for entry in apart)
            volumes = {entry.volume for entry in apart}
            names = names - {data_name(rank, volume) for volume in volumes for rank in range(self.messenger.world)}
        saving.prove_room(nbytes, len(names), largest, max(plan.files, key=len, default=data_name(0, 0)))
        return {"save_id": saving.save_id, "folder": saving.name, **base, **by_disks}

    # ---- the files -----------------------------------------------------------------------------------------

    def _prepare(self, begun: Message) -> int:
        """This rank's share of the plan. Returns the bytes of its largest file."""
        if ("by_disks" in begun) != (self.options.local is not None):
            first, here = ("a directory", "none") if "by_disks" in begun else ("none", "a directory")
            raise CheckpointError(
                f"{self.what}: expected `local` on all ranks or on none, found {first} on the first and {here} here"
            )
        if "plan" in begun:
            self._plan = Plan.from_json(begun["plan"], self.messenger.world)
        assert self._plan is not None
        keep_plan(self.messenger, self._declared, self._plan)
        self._share = share_of(self._plan, self._own, self.messenger.rank)
        return self._share.largest_file

    def _write(self, begun: Message) -> Said:
        plan, share, rank = self._plan, self._share, self.messenger.rank
        assert plan is not None
        staging = self.staging or Staging(StagingMemory())
        parts = staging.after_plan(self._mine.parts, [*share.compare, *share.order])
        local = self.options.local
        advance = _counted(None if local else self.options.progress, share.nbytes)
        # Ranks that hold the same part as its writer read it too, because replicas have to be equal.
        for i in share.compare:
            self._crcs[i] = files.of_blocks(_bytes_of_part(parts[i][1]), BLOCK_NBYTES)
            staging.live.read(i)
        records, written = list[bytes](), 0
        for volume, indices in share.write.items():
            name = data_name(rank, volume)
            where = local_first.place(local, self.path, begun["folder"]) if local else f"{self.path}/{begun['folder']}"
            with doing(f"writing {where}/{name}"), self._target(begun["folder"]) as saving:
                entry, crcs = self._file(saving, name, indices, parts, begun, staging.live, advance)
                if local:
                    saving.sync()
            self._crcs.update(zip(indices, crcs, strict=True))
            records.append(_record(rank, volume, entry))
            written += entry.data_nbytes
        staging.live.check()
        unequal = sum(
            balance(plan, rank, self._holders(place), place, number_of(_joined(self._crcs[i] for i in indices)))
            for place, indices in share.replicated.items()
        )
        return Said({"values": self._sent()}, (written, unequal % MODULUS), b"".join(records))

    def _target(self, name: str) -> Folder:
        """The directory, or the objects, that this rank writes."""
        if self.options.local is not None:
            return local_first.made(self.options.local, self.path, name)
        with reach(self.path) as folder:
            return folder.sub(name)

    def _upload(self, begun: Message) -> Message:
        """Send the files that this rank has on its host's disk."""
        if not self._share.write:
            return {}
        advance = _counted(self.options.progress, self._share.nbytes)
        with self._target(begun["folder"]) as files, reach(f"{self.path}/{begun['folder']}") as objects:
            for volume in self._share.write:
                name = data_name(self.messenger.rank, volume)
                with doing(f"uploading {files.path}/{name}"):
                    local_first.upload(files, objects, name, advance)
        return {}

    def _point(self, _: Heard) -> Message:
        """Commit what was uploaded, on the first rank."""
        assert isinstance(self._saving, BucketSaving)
        self._look_at(self._entries)
        return {"path": self._saving.point()}

    def _look_at(self, entries: Sequence[FileEntry]) -> None:
        """Raise unless the files that ranks wrote have their sizes, as the first rank sees them."""
        assert self._saving is not None
        for file, nbytes in zip(entries, self._saving.sizes([file.name for file in entries]), strict=True):
            if nbytes != file.nbytes:
                raise OSError(0, f"{file.name}: {file.nbytes} bytes were written, the file has {nbytes}")

    def _file(
        self,
        into: Folder,
        name: str,
        indices: Sequence[int],
        parts: Sequence[Named],
        begun: Message,
        live: Live,
        advance: Advance,
    ) -> tuple[FileEntry, list[tuple[int, ...]]]:
        """One data file: a link to that of the base where it is the same, else written."""
        places = [self._share.place[i] for i in indices]

        def data(i: int) -> memoryview:
            return _bytes_of_part(parts[indices[i]][1])

        def read(i: int) -> None:
            live.read(indices[i])

        if self.options.base is not None and places[0].key in self._mine.apart:
            with opened(self.options.base, begun["base"]) as base:
                linked = None if base is None else take_over(base, into, name, places, data)
            if linked is not None:
                for i in range(len(indices)):
                    read(i)
                advance(linked[0].data_nbytes)
                return linked
        threads = spare_cores(self.messenger.world)
        return write_file(into, name, places, data, begun["save_id"], threads, read, advance)

    def _holders(self, place: tuple[int, int]) -> tuple[int, ...]:
        """The ranks that hold a part of tensors of one rule."""
        assert self._plan is not None
        return list(self._plan.rules)[place[0]].holders(place[1])

    def _sent(self) -> list[Any]:
        """The values that this rank, not the first one, sends."""
        plan, rank = self._plan, self.messenger.rank
        assert plan is not None
        values = self._mine.values
        senders = {key: [ranks[0] for ranks in groups] for key, (_, groups) in plan.values.items()}
        return [[key, rank, values[key][1]] for key, ranks in senders.items() if rank and rank in ranks]

    # ---- the commit ----------------------------------------------------------------------------------------

    def _commit(self, heard: Heard) -> Message:
        """Compare what was written with the plan, on the first rank, and commit."""
        plan, saving = self._plan, self._saving
        assert plan is not None and saving is not None
        written, unequal = heard.numbers
        if unequal:
            return {"differ": True}
        if written != plan.nbytes % MODULUS:
            raise CheckpointMismatch(
                f"{self.what}: expected ranks to write what the plan says, found",
                [f"{written} bytes of {plan.nbytes}"],
                "this is a fault of fullshard, please report it",
            )
        entries = self._entries = sorted(map(_file_entry, _RECORD.iter_unpack(heard.records)))
        if self.options.local is None:
            self._look_at(entries)
        sent = {(key, rank): value for message in heard.messages for key, rank, value in message["values"]}
        sent |= {(key, 0): value for key, (_, value) in self._mine.values.items()}
        values = [
            ValueEntry(path, self._together(key, [decode(sent[key, ranks[0]]) for ranks in groups], groups))
            for key, (path, groups) in plan.values.items()
        ]
        values += [ValueEntry(path, [*rows]) for path, rows in plan.computed.values()]
        data = manifest_of(saving.save_id, self.path, self.messenger.world, plan.entries.values(), values, entries)
        if self.options.local is None:
            return {"path": saving.commit(data)}
        assert isinstance(saving, BucketSaving)
        saving.announce(data)
        saving.can_continue = True
        return {}

    def _together(self, key: str, values: list[Any], groups: list[tuple[int, ...]]) -> Any:
        try:
            return together(values)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            ranks = [group[0] for group in groups]
            found = [f"{key}: one value on rank {ranks[0]}, another on rank {rank}" for rank in ranks[1:]]
            text = f"{self.what}: expected consistent state on all ranks, found"
            raise CheckpointMismatch(text, found, REMEDY) from None

    # ---- replicas that differ ------------------------------------------------------------------------------

    def _name_differences(self) -> None:
        """Raise an error that names tensors and ranks. First ranks say which of their parts, all tensors of a rule
        together; then one of each kind says which tensors."""
        share = self._share

        def all_of(place: tuple[int, int]) -> int:
            return number_of(_joined(self._crcs[i] for i in share.replicated[place]))

        def each() -> Message:
            return {"parts": [[*place, all_of(place)] for place in share.replicated]}

        def choose(heard: Heard) -> Message:
            kinds: dict[tuple[int, int], dict[int, list[int]]] = {}
            for ranks, message in heard.groups:
                for rule, part, digest in message["parts"]:
                    kinds.setdefault((rule, part), {}).setdefault(digest, []).extend(ranks)
            different = {place: list(by.values()) for place, by in kinds.items() if len(by) > 1}
            return {"asked": [[*place, groups] for place, groups in list(different.items())[:_SHOWN]]}

        asked = agree(self.messenger, self.what, each, choose)["asked"]

        def tensors() -> Message:
            said = []
            for rule, part, groups in asked:
                for group in groups:
                    if self.messenger.rank == group[0]:
                        indices = share.replicated[rule, part]
                        found = [[*_named(share, i), _digest(self._crcs[i])] for i in indices]
                        said.append([group, found])
            return {"tensors": said}

        def name(heard: Heard) -> Message:
            digests: dict[tuple[str, str], dict[int, int]] = {}
            for message in heard.messages:
                for group, found in message["tensors"]:
                    for key, box, digest in found:
                        digests.setdefault((key, box), {}).update(dict.fromkeys(group, digest))
            found = different_replicas(digests)
            raise CheckpointMismatch(f"{self.what}: expected equal replicas, found", found, REMEDY)

        agree(self.messenger, self.what, tensors, name)


# Parts whose replicas differ, of which the tensors are named.
_SHOWN = 8

# ---- plans of earlier saves --------------------------------------------------------------------------------------

_plans: WeakKeyDictionary[Any, dict[int, dict[str, Plan]]] = WeakKeyDictionary()
_plans_alone: dict[int, dict[str, Plan]] = {}


def plans_of(messenger: Messenger) -> dict[str, Plan]:
    """The plans that this rank used with its process group, by the digest of what it declared."""
    by_rank = _plans_alone if messenger.group is None else _plans.setdefault(messenger.group, {})
    return by_rank.setdefault(messenger.rank, {})


def keep_plan(messenger: Messenger, declared: Declaration, plan: Plan) -> None:
    """Use `plan` again for what was `declared`."""
    plans = plans_of(messenger)
    plans.pop(declared.digest, None)
    plans[declared.digest] = plan
    for digest in list(plans)[:-_KEPT]:
        plans.pop(digest, None)  # another thread, which saves without a process group too, may have removed it


def _owned(parts: Sequence[tuple[KeyPath, Part]], members: Sequence[int]) -> list[Own]:
    """`members`: the ranks of the group that saves, in the numbers of the default group."""
    numbers = {rank: number for number, rank in enumerate(members)}
    # With ranks in the numbers of the group. None: some of them are not in it.
    known: dict[int, Rule | None] = {}
    found = []
    for path, part in parts:
        rule = part.rule
        if rule is not None and id(rule) not in known:
            ranks = tuple(numbers.get(rank, -1) for rank in rule.ranks)
            known[id(rule)] = rule if ranks == rule.ranks else Rule(rule.sizes, rule.cuts, ranks)
            if -1 in ranks:
                known[id(rule)] = None
        mine = None if rule is None else known[id(rule)]
        found.append(Own(path, part.dtype, part.shape, part.box, mine, part.around))
    return found


def _counted(progress: Progress | None, total: int) -> Advance:
    """Counts the bytes of files for `progress`, whose `total` is that of tensors."""
    done, lock = 0, threading.Lock()

    def advance(nbytes: int) -> None:
        nonlocal done
        if progress is not None:
            with lock:
                done = min(done + nbytes, total)
                progress(done, total)

    return advance


def _record(rank: int, volume: int, entry: FileEntry) -> bytes:
    digest = bytes.fromhex(entry.digest)
    return _RECORD.pack(rank, volume, entry.header_nbytes, entry.table_nbytes, entry.nbytes, digest)


def _file_entry(record: tuple[Any, ...]) -> FileEntry:
    rank, volume, header, table, nbytes, digest = record
    return FileEntry(data_name(rank, volume), nbytes, header, table, digest.hex())


def _bytes_of_part(part: Part) -> memoryview:
    assert part.local is not None
    return bytes_of(on_host(part.local))


def _text_digest(value: Json) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _joined(crcs: Any) -> bytes:
    """Checksums of several parts as bytes."""
    return b"".join(_digest(each).to_bytes(4, "little") for each in crcs)


def _digest(crcs: Sequence[int]) -> int:
    return files.crc32(b"".join(crc.to_bytes(4, "little") for crc in crcs))


def _named(share: Share, index: int) -> tuple[str, str]:
    place = share.place[index]
    return place.key, str(place.box)


def different_replicas(digests: dict[tuple[str, str], dict[int, int]]) -> list[str]:
    """Parts whose holders have different bytes. `digests`: by key and box, and by rank."""
    said = []
    for (key, box), by_rank in sorted(digests.items()):
        kinds: dict[int, list[int]] = {}
        for rank, digest in sorted(by_rank.items()):
            kinds.setdefault(digest, []).append(rank)
        if len(kinds) > 1:
            have = (f"{shown_ranks(r)} {'has' if len(r) == 1 else 'have'} {d:08x}" for d, r in kinds.items())
            said.append(f"{key}: {', '.join(have)} at {box}")
    return said
