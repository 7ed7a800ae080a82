"""Reads a table key by key: each entry with its row, in the files that the table names, too; and what has no row."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fullshard.keys import ConfigError, show

from ..reading import read_table
from ..verdict import MigrationError, Place
from .table import ANY, FORMATS, ROWS, Format, Row, keys_of

_COMMENTS = ("_", "//", "#")


@dataclass(frozen=True)
class Entry:
    """A key as it is written, dotted, and its value. `full`: with the keys of the file that names this one's. `closed`:
    tables of its file in which every key has to be known."""

    key: str
    value: Any
    row: Row | None
    place: Place
    full: str = ""
    closed: tuple[str, ...] = ()


@dataclass(frozen=True)
class _File:
    path: str
    text: str

    def place(self, key: str) -> Place:
        """The line on which the last part of the key is a key, after those of the parts before it."""
        at = 0
        lines = self.text.splitlines()
        for part in key.split("."):
            pattern = re.compile(
                rf"""^\s*(?:-\s+)?[{{\s]*\[?["']?{re.escape(part)}["']?\s*[:=\]]|["']{re.escape(part)}["']\s*:"""
            )
            found = next((n for n in range(at, len(lines)) if pattern.search(lines[n])), None)
            if found is not None:
                at = found
        written = re.search(rf"\b{re.escape(key.rpartition('.')[2])}\b", self.text) is not None
        return Place(self.path, at + 1 if lines and key and written else 0)


class Reader:
    """The entries of a file. `others`: names of keys that are not about sharding. `bare`: the file is the Trainer's
    `fsdp_config` by itself. Raises `MigrationError` for keys that the library would not know either, all at once."""

    def __init__(self, format: Format, table: Mapping[str, Any], path: str, text: str) -> None:
        self.format, self.table, self.path = format, dict(table), path
        self._file = _File(path, text)
        self.bare = format.name == "hf" and not {"fsdp", "fsdp_config", "output_dir", "deepspeed"} & table.keys()
        if self.bare:
            mounts = [(prefix, name) for name in ("plugin-trainer", "plugin") for prefix in ("", "fsdp_")]
            self.bare = any(str(key).removeprefix("fsdp_") in _plugin_keys() for key in table)
            if self.bare:
                self.format = format = replace(format, mounts=tuple(mounts), closed=("",), files=())
        self.composer_version = 1
        if format.name == "composer":
            self._unwrap_composer()
        self.version = self._version()
        self.rows = keys_of(self.format, self.version)
        self._tables = {key[:at] for key in self.rows for at in range(len(key)) if key[at] == "."}
        self.others: list[str] = []
        self._unknown: list[Entry] = []
        self.entries = [known for each in self._flat("", self.table, self._file) if (known := self._known(each))]
        if self._unknown:
            raise MigrationError(self._unknown_keys())

    @cached_property
    def keys(self) -> list[str]:
        """Returns the dotted keys that are written and have a row."""
        return [each.full for each in self.entries]

    def has(self, *names: str) -> bool:
        """Whether one of these keys is there, or a key inside it."""
        return any(key == name or key.startswith(f"{name}.") for key in self.keys for name in names)

    def is_repeated(self, prefix: str) -> bool:
        """Whether the same vocabulary has another prefix that comes first: `fsdp_config.fsdp_` where prefixes are
        optional."""
        first = next((p for p, name in self.format.mounts if name == "plugin"), prefix)
        return prefix != first

    def place(self, key: str) -> Place:
        return self._file.place(key)

    # ---- shapes --------------------------------------------------------------------------------------------------

    def _unwrap_composer(self) -> None:
        """Composer's table may be inside `parallelism_config`, under fsdp2, or by itself."""
        inner = self.table.pop("parallelism_config", None)
        if inner is not None and not isinstance(inner, Mapping):
            raise MigrationError(
                f"{self.place('parallelism_config')}: parallelism_config = {show(inner)}: expected a table"
            )
        self.table.update(inner or {})
        if "fsdp2" in self.table:
            self.table["fsdp"] = self.table.pop("fsdp2")
            self.composer_version = 2
        known = {key for row in ROWS["composer"] for key in row.names}
        own = {key: self.table.pop(key) for key in list(self.table) if key in known}
        if own:
            self.table["fsdp"] = {**own, **(self.table.get("fsdp") or {})}

    def _version(self) -> int:
        """Returns the version of FSDP, as the file says or its library takes it."""
        block = self.table.get("fsdp_config")
        tables = [self.table, block if isinstance(block, Mapping) else {}]
        found = [table[key] for table in tables for key in ("fsdp_version", "version") if table.get(key) is not None]
        default = 2 if self.format.name in ("hf", "trl", "llamafactory") else 1
        return next((int(each) for each in found if str(each) in ("1", "2")), default)

    def _flat(self, prefix: str, table: Mapping[str, Any], file: _File, named: str = "") -> Iterator[Entry]:
        """`named`: the key that names this file, if it is not the first."""
        for name, value in table.items():
            key, own = f"{prefix}{name}", f"{prefix}{name}".removeprefix(f"{named}.")
            if str(name).startswith(_COMMENTS):
                self.others.append(own)
                continue
            inner = key in self._tables
            if key in dict(self.format.files) and isinstance(value, str) and (found := self._followed(value, file)):
                yield from self._flat(f"{key}.", *found, key)
            elif inner and isinstance(value, Mapping) and value:
                yield from self._flat(f"{key}.", value, file, named)
            elif value is None or (inner and key not in self.rows and value == {}):
                continue
            elif inner and key not in self.rows and self._is_closed(own, self._closed(named)):
                raise MigrationError(f"{file.place(own)}: {own} = {show(value)}: expected a table")
            else:
                row = self.rows.get(key, ("", None))[1]
                value = value if row is None else self._resolved(own, value, file.place(own))
                for each in _words(value) if row is not None and row.subject.name == "fsdp" else [value]:
                    yield Entry(own, each, row, file.place(own), key, self._closed(named))

    def _closed(self, named: str) -> tuple[str, ...]:
        if not named:
            return self.format.closed
        return FORMATS["deepspeed"].closed if dict(self.format.files)[named] == "zero" else ("",)

    def _followed(self, name: str, file: _File) -> tuple[Mapping[str, Any], _File] | None:
        """Follows another file, relative to the working directory or to the one that names it; None if it is not
        there."""
        for path in (Path(name), Path(file.path).parent / name):
            if path.suffix in (".json", ".yaml", ".yml") and path.is_file():
                try:
                    return read_table(path), _File(str(path), path.read_text(encoding="utf-8"))
                except ConfigError as error:
                    raise MigrationError(str(error)) from None
        return None

    def _resolved(self, key: str, value: Any, place: Place) -> Any:
        """Interpolations of OmegaConf: ${variables.x}."""
        if not (isinstance(value, str) and (found := re.fullmatch(r"\$\{([\w.]+)\}", value))):
            return value
        here: Any = self.table
        for part in found[1].split("."):
            here = here.get(part) if isinstance(here, Mapping) else None
        if here is None:
            raise MigrationError(f"{place}: {key} = {value}: found no {found[1]} in this file; write the value")
        return here

    # ---- keys without a row --------------------------------------------------------------------------------------

    @staticmethod
    def _is_closed(key: str, closed: tuple[str, ...]) -> bool:
        return any(not each or key == each or key.startswith(f"{each}.") for each in closed)

    def _known(self, entry: Entry) -> Entry | None:
        """The entry, with the row of the table around it if that has one reason for all in it; else None, and it is put
        where it belongs."""
        if entry.row is not None:
            return entry
        above = entry.full.rpartition(".")[0]
        while above:
            row = self.rows.get(above, ("", None))[1]
            if row is not None and len(row.subject.cases) == 1 and row.subject.cases[0].when == (ANY,):
                return replace(entry, row=row)
            above = above.rpartition(".")[0]
        if self._is_closed(entry.key, entry.closed) or any(_is_misspelled(entry.full, key) for key in self.rows):
            self._unknown.append(entry)
            return None
        parts = entry.key.split(".")
        partly = parts[0] in self._tables
        self.others.append(".".join(parts[:2]) if partly else parts[0])
        return None

    def _unknown_keys(self) -> str:
        said = []
        for each in self._unknown:
            nearest = difflib.get_close_matches(each.full, list(self.rows), n=1, cutoff=0.0)[0]
            head = f"{each.place}: {each.key} = {show(each.value)}"
            said.append(f"{head}: {self.format.title} has no such key; nearest valid: {nearest}")
        return "; ".join(said)


def _is_misspelled(name: str, known: str) -> bool:
    """Whether one or two letters make `known` of `name`, by insertion, deletion or replacement; another number is
    another name."""
    most = 1 if len(known) < 8 else 2
    same = re.sub(r"\d", "", name) == re.sub(r"\d", "", known)
    if same or abs(len(name) - len(known)) > most or name[:1] != known[:1]:
        return False
    row = list(range(len(known) + 1))
    for i, letter in enumerate(name, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(known, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (letter != other))
    return row[-1] <= most


def _words(value: Any) -> list[Any]:
    """Returns the words of the Trainer's switch: full_shard auto_wrap offload, in a text or a list."""
    if isinstance(value, str):
        return value.split() or [""]
    return value if isinstance(value, list) else [value]


def _plugin_keys() -> set[str]:
    return {key for name in ("plugin", "plugin-v1", "plugin-v2") for row in ROWS[name] for key in row.names}
