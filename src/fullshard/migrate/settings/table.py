"""The table of `rows.toml`, loaded: subjects with their cases, the keys under which libraries have them, and formats.

A case belongs to a subject, not to a key, so a subject has one verdict for each value, whatever library names it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..schedules import find_schedule
from ..verdict import DROPPED, EXACT, UNSUPPORTED

# Values that a case may be for, beside literal ones. A pattern is a regular expression of names alone (`names_of`).
ANY, WHOLE, NUMBER, TEXT, NAMES, TABLE = "<any>", "<whole number>", "<number>", "<text>", "<names>", "<table>"
PATTERN, ABSENT, PARTS = "<pattern>", "<absent>", "<lists of names>"
KINDS = {
    ANY: "any value",
    WHOLE: "a whole number",
    NUMBER: "a number",
    TEXT: "a text",
    NAMES: "a name or a list of names",
    TABLE: "a table",
    PATTERN: "names of modules with | between them and .* for any text",
    ABSENT: "the key is not there",
    PARTS: "a list of lists of names",
}
GIVEN = "<given>"  # in the new settings: the old value
TRAIN = "train."  # before settings of the trainer
_DTYPES = {"bf16": "bfloat16", "bfp16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_DTYPES |= {name: name for name in ("bfloat16", "float16", "float32")}
RANKS = {"yields": 0, "": 1, "forces": 2, "decides": 3}


@dataclass(frozen=True)
class Case:
    """`when`: old values, or kinds of values. `settings`: the new ones, by `section.key`; those of the trainer, which
    takes what a configuration of sharding cannot hold, begin with `TRAIN`."""

    when: tuple[Any, ...]
    verdict: str
    settings: Mapping[str, Any]
    reason: str


@dataclass(frozen=True)
class Subject:
    """One thing that configurations say. `rank`: one of `RANKS`, who goes before whom that sets the same. `loop`: of a
    training loop that stays with the program."""

    name: str
    cases: tuple[Case, ...]
    rank: str = ""
    loop: bool = False

    def case(self, value: Any) -> Case | None:
        """The case of a value, None if it is of none."""
        return next((case for case in self.cases if any(matches(when, value) for when in case.when)), None)

    @property
    def expected(self) -> str:
        """Returns the values that there are, for an error."""
        shown = [KINDS.get(when, _shown(when)) if isinstance(when, str) else _shown(when) for when in self._values()]
        return " or ".join(dict.fromkeys(shown))

    def _values(self) -> Iterator[Any]:
        return (when for case in self.cases for when in case.when if when != ABSENT)


@dataclass(frozen=True, eq=False)
class Row:
    """A key of a vocabulary, and what it is about. `absent`: what the library takes where the key is not written, by
    format or vocabulary. `versions`: of the library that has the key, "" for all."""

    vocabulary: str
    names: tuple[str, ...]
    subject: Subject
    absent: Mapping[str, Any]
    versions: str = ""


@dataclass(frozen=True)
class Format:
    """The configuration files of one library; the fields are those of `rows.toml`."""

    name: str
    title: str
    versions: str
    suffixes: tuple[str, ...]
    signs: tuple[str, ...]
    mounts: tuple[tuple[str, str], ...]
    closed: tuple[str, ...]
    files: tuple[tuple[str, str], ...] = ()


@cache
def keys_of(format: Format, version: int = 0) -> dict[str, tuple[str, Row]]:
    """Each spelling of each key of a format, dotted, with its prefix and its row. `version`: of FSDP, for vocabularies
    that depend on it; 0 for all."""
    found: dict[str, tuple[str, Row]] = {}
    parts = ("", *(f"-v{each}" for each in (1, 2) if version in (0, each)))
    for prefix, vocabulary in format.mounts:
        for inner, name in (("", vocabulary), *INSIDE.get(vocabulary, ())):
            for row in (row for part in parts for row in ROWS.get(f"{name}{part}", ())):
                for key in row.names:
                    found.setdefault(f"{prefix}{inner}{key}", (f"{prefix}{inner}", row))
    return found


def matches(when: Any, value: Any) -> bool:
    """Whether a case is for this value. Texts are compared without case and without the name of an enum before them,
    and "true" and "1" are true and 1, as in YAML that a person wrote."""
    if isinstance(when, str) and when in KINDS:
        whole = isinstance(value, int) and not isinstance(value, bool) or _reads_as(int, value)
        fits: dict[str, bool] = {
            ANY: value != ABSENT,
            WHOLE: whole,
            NUMBER: whole or isinstance(value, float) or _reads_as(float, value),
            TEXT: isinstance(value, str) and value != ABSENT,
            NAMES: isinstance(value, str) or _are_names(value),
            PARTS: isinstance(value, list) and all(_are_names(each) for each in value),
            TABLE: isinstance(value, dict),
            PATTERN: isinstance(value, str) and names_of(value) is not None,
            ABSENT: value == ABSENT,
        }
        return fits[when]
    if isinstance(when, bool):
        return value is when or (isinstance(value, str) and value.lower() == str(when).lower())
    if isinstance(when, str):
        return isinstance(value, str) and value.upper().rpartition(".")[2] == when.upper()
    if isinstance(value, str):
        return value == str(when)
    return type(value) in (int, float) and bool(value == when)


def given(value: Any, name: str) -> Any:
    """The old value in the form of the new key `name`."""
    if name == "wrap.classes" and isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if name == "wrap.ignored" and isinstance(value, str):
        return names_of(value)
    if name == "parallelism.pipeline_parallel_schedule":
        return find_schedule(value).name
    if name.startswith("precision."):
        return _DTYPES.get(str(value).removeprefix("torch."), value)
    if _reads_as(int, value):
        return int(value)
    return float(value) if name.startswith(TRAIN) and _reads_as(float, value) else value


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _reads_as(kind: type, value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(kind(value) or True)
    except ValueError:
        return False


def names_of(pattern: str) -> list[str] | None:
    """The names that a regular expression stands for, with * for `.*`; None for one that says more. A bare dot is one,
    although the expression means any character."""
    grouped = re.fullmatch(r"\^?(?:\((?:\?:)?([^()]*)\)|([^()]*?))\$?", pattern)
    names = (grouped[1] or grouped[2] or "").split("|") if grouped else [""]
    if not all(re.fullmatch(r"(?:\w|\.\*|\\?\.)+", name) for name in names):
        return None
    return [name.replace(".*", "*").replace("\\.", ".") for name in names]


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---- loading ---------------------------------------------------------------------------------------------------------


def _subject(name: str, table: Mapping[str, Any]) -> Subject:
    cases = [[True, *table["on"]], [False, EXACT, {}, "the default"]] if "on" in table else table["cases"]
    made = tuple(
        Case(tuple(when) if isinstance(when, list) else (when,), verdict, _flat(settings), reason)
        for when, verdict, settings, reason in cases
    )
    return Subject(name, made, table.get("rank", ""), table.get("loop", False))


def _short(tables: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lists what has a short form: keys that are dropped or refused, by the reason, switches, and those of a loop, by
    the trainer's key."""
    for reason, keys in tables["drop"].items():
        yield reason, {"cases": [[ANY, DROPPED, {}, reason]], "keys": keys}
    for reason, keys in tables["refuse"].items():
        yield reason, {"cases": [[ANY, UNSUPPORTED, {}, reason]], "keys": keys}
    for name, (*on, keys) in tables["switch"].items():
        yield name, {"on": on, "keys": keys}
    for key, keys in tables["loop"].items():
        kind = WHOLE if key.endswith("_steps") else NUMBER
        cases = [[kind, DROPPED, {TRAIN[:-1]: {key: GIVEN}}, _LOOP], [ANY, DROPPED, {}, _LOOP]]
        yield key, {"cases": cases, "keys": keys, "loop": True}


_LOOP = "of the training loop, which stays with your program"


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _rows(subject: Subject, table: Mapping[str, Any]) -> Iterator[Row]:
    for line in table.get("keys", ()):
        vocabulary, _, names = line.partition(": ")
        for key in names.split(", "):
            spelled, _, versions = key.partition(" @ ")
            yield Row(vocabulary, tuple(spelled.split(" | ")), subject, table.get("absent", {}), versions)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


_TABLE = tomllib.loads(Path(__file__).with_name("rows.toml").read_text(encoding="utf-8"))
_SUBJECTS = {**_TABLE["subject"], **dict(_short(_TABLE))}
SUBJECTS = {name: _subject(name, table) for name, table in _SUBJECTS.items()}
ROWS: dict[str, list[Row]] = {}  # by vocabulary
for _name, _each in _SUBJECTS.items():
    for _row in _rows(SUBJECTS[_name], _each):
        ROWS.setdefault(_row.vocabulary, []).append(_row)
INSIDE = _TABLE["inside"]  # vocabularies within others, by prefix
FORMATS = {
    name: Format(**{"name": name} | {k: tuple(map(_frozen, v)) if isinstance(v, list) else v for k, v in each.items()})
    for name, each in _TABLE["format"].items()
}
