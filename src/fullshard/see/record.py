"""The record of a run: a file of JSON lines per rank and session, what is in it, and how it is read.

    see/from1-rank0.jsonl       rank 0, from step 1 on
    see/from101-rank0.jsonl     the same rank after the run was continued with step 101

The first line is the header, the others are steps, notes (checkpoints) and the end. Every step has its times and
figures; those recorded in full also have `detail`: events and commands of the schedule, messages, and bytes. A step
that failed has `failed`, and what was held then: `held`, and `memory` of the process or the device. Times are
nanoseconds: `begin` and `end` of a step on the rank's clock, all others since the step's begin. A field that is not
known is null. A last line without its end is what a process left that was killed while it wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

FORMAT, VERSION = "fullshard-record", 1
FOLDER = "see"
_NAME = re.compile(r"from(\d+)-rank(\d+)\.jsonl")

# Kinds of bytes, in the order in which pictures stack them.
KINDS = ("shards", "optimizer", "sharded gradients", "full", "secondary", "gradients", "held", "messages", "staging")


class RecordError(Exception):
    """Raised where there is no record, or it cannot be read. The text is one line."""


class EmptyRecordError(RecordError):
    """A file has no whole header: its process was killed before, or while, it wrote that."""


def file_name(first_step: int, rank: int) -> str:
    """The name of the file of one rank.

    >>> file_name(1, 0)
    'from1-rank0.jsonl'
    """
    return f"from{first_step}-rank{rank}.jsonl"


def parts_of(name: str) -> tuple[int, int]:
    """First step and rank of a file's name; (-1, -1) for another file.

    >>> parts_of("from101-rank2.jsonl"), parts_of("metrics.jsonl")
    ((101, 2), (-1, -1))
    """
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else (-1, -1)


# ---- rows ------------------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """An event that the runtime reported (schedule/events.py). `unit`: index in the header. `device`: when the device
    came to it, on the device's clock since its first event of the step; None on a CPU."""

    at: int
    kind: str
    unit: int
    flags: str
    device: int | None = None


class Command(NamedTuple):
    """One command. `rule`: the [Rn] of schedule/rules.py; `event`: index of the event that it followed, -1 if none."""

    kind: str
    unit: int
    rule: str
    begin: int
    end: int
    event: int


class Message(NamedTuple):
    """The `number`th message of a data group (`group`), the same on all of its ranks.

    `purpose`: the command that issued it, or what the program did. `unit`: -1 if it belongs to none. `nbytes`: what
    this rank receives of others, at the least. `issue`; `need`: a wait for it began; `arrival`: it was complete, if the
    backend tells; `ready`: the wait was over. `device_need`, `device_ready`: the same two on the device's clock."""

    group: str
    number: int
    unit: int
    purpose: str
    nbytes: int
    issue: int
    need: int | None = None
    arrival: int | None = None
    ready: int | None = None
    device_need: int | None = None
    device_ready: int | None = None

    @property
    def exposed(self) -> int:
        """How long the compute waited for it, in nanoseconds: on the device where there is one."""
        if self.device_need is not None and self.device_ready is not None:
            return self.device_ready - self.device_need
        return 0 if self.need is None or self.ready is None else self.ready - self.need

    @property
    def arrived(self) -> int | None:
        """When it was complete, at the latest."""
        return self.arrival if self.arrival is not None else self.ready


class Level(NamedTuple):
    """The bytes held from `at` on: `unit` (-1: no single one) holds `nbytes` of `kind`."""

    at: int
    unit: int
    kind: str
    nbytes: int


@dataclass(frozen=True)
class Detail:
    """The record of one step in full: each kind in the order of its times."""

    events: tuple[Event, ...] = ()
    commands: tuple[Command, ...] = ()
    messages: tuple[Message, ...] = ()
    levels: tuple[Level, ...] = ()


class Held(NamedTuple):
    """`unit` (-1: no single one) holds `nbytes` of `kind`."""

    unit: int
    kind: str
    nbytes: int


@dataclass(frozen=True)
class Step:
    """One step. `figures`: loss, norm and what else the program gave; `failed`: why it did not end; `held`: bytes of
    the library at that moment, by unit and kind; `memory`: those of the device's allocator ("allocated", "reserved",
    "free", "total"), or of the process ("resident")."""

    number: int
    begin: int
    end: int
    figures: dict[str, float | None] = field(default_factory=dict)
    detail: Detail | None = None
    failed: str = ""
    held: tuple[Held, ...] = ()
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def nanoseconds(self) -> int:
        return self.end - self.begin


class Note(NamedTuple):
    """An event between steps: a checkpoint. `at`: on the rank's clock."""

    what: str
    at: int
    nanoseconds: int
    step: int
    text: str


@dataclass(frozen=True)
class Unit:
    """One unit, as the header has it."""

    name: str
    module_class: str
    numel: int
    local_numel: int
    full_nbytes: int
    shard_nbytes: int
    dtypes: str
    reshard_after_forward: bool


@dataclass(frozen=True)
class Header:
    """The part of a record that does not change. `clock`: one moment in nanoseconds of Unix time, and on the rank's
    clock; `host`: equal on ranks that share a clock."""

    rank: int
    world: int
    first_step: int
    versions: dict[str, str]
    device: str
    host: str
    clock: tuple[int, int]
    units: tuple[Unit, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class RankRecord:
    """All that one rank recorded. `ended`: the run closed its record. `cut`: of files whose last line has no end, what
    is lost."""

    header: Header
    steps: tuple[Step, ...]
    notes: tuple[Note, ...]
    ended: bool
    cut: tuple[str, ...] = ()

    def name_of(self, unit: int) -> str:
        return self.header.units[unit].name if unit >= 0 else "(no unit)"

    def detailed(self, *, failed: bool = False) -> list[Step]:
        """The steps that were recorded in full and ended; `failed`: those that did not end."""
        return [step for step in self.steps if step.detail is not None and bool(step.failed) == failed]

    def step(self, number: int) -> Step | None:
        return next((step for step in self.steps if step.number == number), None)


@dataclass(frozen=True)
class Run:
    """The records of one run. `ranks`: of its last session, in order; `missing`: those without a file here; `unread`:
    files in which not even the header is whole."""

    path: Path
    ranks: tuple[RankRecord, ...]
    missing: tuple[int, ...]
    unread: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        return self.ranks[0].header.world

    @property
    def name(self) -> str:
        where = self.path.resolve()
        return where.parent.name if where.name == FOLDER else where.name

    def rank(self, number: int) -> RankRecord:
        """Raises `RecordError` for a rank without a record."""
        for record in self.ranks:
            if record.header.rank == number:
                return record
        has = ", ".join(str(record.header.rank) for record in self.ranks)
        raise RecordError(f"{self.path}: expected a record of rank {number}, found those of {has}")

    def common(self, *, failed: bool = False) -> list[int]:
        """The steps that all ranks recorded in full and ended, or that `failed` on a rank; in order."""
        ended = set.intersection(*({step.number for step in rank.detailed()} for rank in self.ranks))
        if not failed:
            return sorted(ended)
        either = ({step.number for f in (False, True) for step in rank.detailed(failed=f)} for rank in self.ranks)
        return sorted(set.intersection(*either) - ended)

    def shown_step(self, number: int | None = None) -> int:
        """The step to show: `number`, or the last one that all ranks recorded in full; of those that ended, if there
        are any. Raises `RecordError`."""
        ended, failed = self.common(), self.common(failed=True)
        if number is None and (ended or failed):
            return (ended or failed)[-1]
        if number is not None and number in (*ended, *failed):
            return number
        wanted = "a step" if number is None else f"step {number}"
        found = ", ".join(map(str, sorted((*ended, *failed)))) or "none"
        raise RecordError(
            f"{self.path}: expected {wanted} recorded in full on all ranks, found {found}{self._lacking()}"
        )

    def _lacking(self) -> str:
        """Returns the ranks that have no step in full, where others have some."""
        without = [rank.header.rank for rank in self.ranks if not (rank.detailed() or rank.detailed(failed=True))]
        if not 0 < len(without) < len(self.ranks):
            return ""
        return f"; none of {ranks_named(without)}: without the files of these the others are shown"

    @property
    def remarks(self) -> list[str]:
        """Names what is not whole: ranks without a record, files without an end."""
        found = []
        if self.missing:
            found.append(f"no record here of {ranks_named(self.missing)}")
        found += [*self.unread, *(text for rank in self.ranks for text in rank.cut)]
        if open_ones := [rank.header.rank for rank in self.ranks if not rank.ended]:
            found.append(f"the record of {ranks_named(open_ones)} has no end: it runs, or was killed")
        return found


def ranks_named(ranks: Sequence[int], shown: int = 8) -> str:
    """
    >>> ranks_named([1]), ranks_named([0, 2]), ranks_named(range(100), 2)
    ('rank 1', 'ranks 0, 2', 'ranks 0, 1 and 98 more')
    """
    more = f" and {len(ranks) - shown} more" if len(ranks) > shown else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:shown]))}{more}"


# ---- writing ---------------------------------------------------------------------------------------------------------


def line(fields: dict[str, Any]) -> bytes:
    """One line of the file. Raises `ValueError` for a number that JSON does not have."""
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def header_fields(header: Header) -> dict[str, Any]:
    """The header as its line has it."""
    return {"format": FORMAT, "version": VERSION, **vars(header), "units": [vars(unit) for unit in header.units]}


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_run(path: Path) -> Run:
    """The records below `path`: a run's folder, or the folder of records in it.

    What is whole of a file is read. Raises `RecordError`, one line: no record, a damaged one, or of another version.
    """
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    files: dict[int, dict[int, Path]] = {}
    for file in sorted(folder.glob("from*-rank*.jsonl")) if folder.is_dir() else ():
        first, rank = parts_of(file.name)
        if first >= 0:
            files.setdefault(first, {})[rank] = file
    if not files:
        raise RecordError(f"{path}: expected the record of a run (from1-rank0.jsonl), found none; see docs/see.md")
    unread: list[str] = []
    sessions = [list(_readable(files[first], unread)) for first in sorted(files)]
    sessions = [session for session in sessions if session]
    if not sessions:
        raise RecordError(unread[0])
    last = sessions[-1]
    worlds = {record.header.world for record in last}
    if len(worlds) > 1:
        raise RecordError(f"{path}: expected the records of one run, found worlds of {sorted(worlds)} ranks")
    ranks = tuple(_joined(record, sessions[:-1]) for record in last)
    there = {record.header.rank for record in ranks}
    missing = tuple(rank for rank in range(ranks[0].header.world) if rank not in there)
    return Run(folder, ranks, missing, tuple(unread))


def _readable(files: dict[int, Path], unread: list[str]) -> Iterator[RankRecord]:
    """The records of a session, in order of ranks. A process that was killed before its header was written left
    nothing: that is noted in `unread`."""
    for _, file in sorted(files.items()):
        try:
            yield read_rank(file)
        except EmptyRecordError as error:
            unread.append(str(error))


def _joined(record: RankRecord, earlier: Sequence[Sequence[RankRecord]]) -> RankRecord:
    """`record` with the steps of the same rank in earlier sessions, as far as they were not taken again."""
    steps: dict[int, Step] = {}
    notes: list[Note] = []
    cut: list[str] = []
    first = record.header.first_step
    for session in earlier:
        for before in session:
            if before.header.rank != record.header.rank:
                continue
            same = before.header.units == record.header.units
            for step in before.steps:
                if step.number < first:
                    steps[step.number] = step if same else replace(step, detail=None, held=())
            notes += [note for note in before.notes if note.step < first]
            cut += before.cut
    steps.update({step.number: step for step in record.steps})
    ordered = tuple(steps[number] for number in sorted(steps))
    return RankRecord(record.header, ordered, (*notes, *record.notes), record.ended, (*cut, *record.cut))


def read_rank(path: Path) -> RankRecord:
    """One file. Raises `RecordError`."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from error
    lines, rest = _lines(path, content)
    if not lines:
        found = f"{rest} bytes of it" if rest else "an empty file"
        raise EmptyRecordError(f"{path}: expected a header in the first line, found {found}")
    first = lines[0]
    if first.get("format") != FORMAT:
        raise RecordError(f"{path}: expected a record of fullshard, found {_shown(lines[0])}")
    if first.get("version") != VERSION:
        raise RecordError(
            f"{path}: expected version {VERSION} of the record, found {first.get('version')}; read it with the version "
            f"of fullshard that wrote it ({_versions(first)})"
        )
    steps: list[Step] = []
    notes: list[Note] = []
    ended = False
    number = 1
    try:
        header = _header(first)
        for fields in lines[1:]:
            number += 1
            if "step" in fields:
                steps.append(_step(fields))
            elif "note" in fields:
                notes.append(Note(*fields["note"]))
            else:
                ended = bool(fields["ended"])
    except KeyError as error:
        found = f"found none in line {number}, {_shown(lines[number - 1])}"
        raise RecordError(f"{path}: expected a line of a record with {error.args[0]}, {found}") from error
    except (TypeError, ValueError, AttributeError) as error:
        found = f"found another in line {number}: {_shown(lines[number - 1])}"
        raise RecordError(f"{path}: expected a line of a record, {found}") from error
    cut: tuple[str, ...] = ()
    if rest:
        cut = (
            f"the last line of {path.name}, line {len(lines) + 1}, was cut off after {rest} bytes, as a process leaves "
            f"it that is killed while it writes; it is left out",
        )
    return RankRecord(header, tuple(steps), tuple(notes), ended, cut)


def _shown(fields: dict[str, Any]) -> str:
    """The beginning of a line, as the file has it."""
    text = json.dumps(fields)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _versions(first: dict[str, Any]) -> str:
    versions = first.get("versions")
    return ", ".join(f"{name} {v}" for name, v in versions.items()) if isinstance(versions, dict) else "not known"


def _lines(path: Path, content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The whole lines, and the bytes of a last one without its end."""
    lines = content.split(b"\n")
    rest = lines.pop()
    found = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue  # as editors and copies leave at the end
        fields = _fields(text)
        if fields is None:
            raise RecordError(f"{path}: expected a line of JSON, found a damaged line {number} of {len(lines)}")
        found.append(fields)
    if not rest.strip():
        return found, 0
    last = _fields(rest)  # whole, but for the end of the line
    return (found, len(rest)) if last is None else ([*found, last], 0)


def _fields(text: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


def _header(fields: dict[str, Any]) -> Header:
    names = Header.__dataclass_fields__.keys()
    values = {name: fields[name] for name in names}
    unix, own = fields["clock"]
    return Header(**values | {"units": tuple(Unit(**unit) for unit in fields["units"]), "clock": (unix, own)})


def _step(fields: dict[str, Any]) -> Step:
    found = fields.get("detail")
    detail = None
    if found is not None:
        detail = Detail(
            tuple(_rows(Event, found["events"])),
            tuple(_rows(Command, found["commands"])),
            tuple(_rows(Message, found["messages"])),
            tuple(_rows(Level, found["levels"])),
        )
    times = fields["step"], fields["begin"], fields["end"]
    held = tuple(_rows(Held, fields.get("held", ())))
    return Step(*times, fields["figures"], detail, fields.get("failed", ""), held, dict(fields.get("memory", {})))


def _rows(kind: Any, rows: Iterable[Sequence[Any]]) -> Iterator[Any]:
    return (kind(*row) for row in rows)
