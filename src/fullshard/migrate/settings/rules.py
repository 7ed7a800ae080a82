"""The rows of the tables of settings: one rule a key, one case a value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..verdict import DROPPED, EXACT

# Values that a case may be for, beside literal ones.
ANY, WHOLE, NUMBER, TEXT, NAMES, TABLE = "<any>", "<whole number>", "<number>", "<text>", "<names>", "<table>"
# A regular expression of names alone, as `names_of` reads it; any other one.
PATTERN, REGEX = "<pattern>", "<regular expression>"
KINDS = {
    ANY: "any value",
    WHOLE: "a whole number",
    NUMBER: "a number",
    TEXT: "a text",
    NAMES: "a name or a list of names",
    TABLE: "a table",
    PATTERN: "names of modules with | between them and .* for any text",
    REGEX: "another regular expression",
}
# In the new settings: the old value.
GIVEN = "<given>"
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """`when`: the old value, or a kind of value. `settings`: the new ones, by `section.key`. `forces`: these settings
    hold even if other keys say something else. `trains`: settings of the trainer, which takes what a configuration of
    sharding cannot hold."""

    when: Any
    verdict: str
    settings: Settings
    reason: str
    forces: bool = False
    trains: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """`key`: dotted, as in the old file. `absent`: what the old library takes where the key is not written, if that
    differs from the new default. `names`: other spellings."""

    key: str
    cases: tuple[Case, ...]
    absent: Any = None
    names: tuple[str, ...] = ()

    def case(self, value: Any) -> Case | None:
        """The case of a value, None if it is of none."""
        for case in self.cases:
            if matches(case.when, value):
                return case
        return None

    @property
    def expected(self) -> str:
        """What values there are, for an error."""
        shown = [KINDS[each.when] if each.when in _HASHABLE else _shown(each.when) for each in self.cases]
        return " or ".join(dict.fromkeys(shown))


_HASHABLE = tuple(KINDS)


@dataclass(frozen=True)
class Format:
    """The configuration files of one library. `signs`: outermost keys by which a file is known to be of it.
    `elsewhere`: outermost keys that are not about sharding; any other key without a rule is a mistake."""

    name: str
    title: str
    suffixes: tuple[str, ...]
    rules: tuple[Rule, ...]
    signs: tuple[str, ...]
    elsewhere: tuple[str, ...] = ()

    def rule(self, key: str) -> Rule | None:
        return next((each for each in self.rules if key in (each.key, *each.names)), None)


def matches(when: Any, value: Any) -> bool:
    """Whether a case is for this value. Texts are compared without case, and "true" is true, as in YAML that a person
    wrote."""
    if isinstance(when, str) and when in KINDS:
        whole = isinstance(value, int) and not isinstance(value, bool) or isinstance(value, str) and value.isdigit()
        return {
            ANY: True,
            WHOLE: whole,
            NUMBER: whole or isinstance(value, float),
            TEXT: isinstance(value, str),
            NAMES: isinstance(value, str) or (isinstance(value, list) and all(isinstance(x, str) for x in value)),
            TABLE: isinstance(value, dict),
            PATTERN: isinstance(value, str) and names_of(value) is not None,
            REGEX: isinstance(value, str),
        }[when]
    if isinstance(when, bool):
        return value is when or (isinstance(value, str) and value.lower() == str(when).lower())
    if isinstance(when, str):
        return isinstance(value, str) and value.upper().rpartition(".")[2] == when.upper()
    if isinstance(when, int) and isinstance(value, str):
        return value == str(when)
    return type(value) is type(when) and bool(value == when)


def names_of(pattern: str) -> list[str] | None:
    """The names that a regular expression stands for, with * for `.*`; None for one that says more. A bare dot is one,
    although the expression means any character."""
    grouped = re.fullmatch(r"\^?(?:\((?:\?:)?([^()]*)\)|([^()]*?))\$?", pattern)
    names = (grouped[1] or grouped[2] or "").split("|") if grouped else [""]
    if not all(re.fullmatch(r"(?:\w|\.\*|\\?\.)+", name) for name in names):
        return None
    return [name.replace(".*", "*").replace("\\.", ".") for name in names]


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


# ---- rules that many tables have -------------------------------------------------------------------------------------


def rule(key: str, *cases: Case, absent: Any = None, names: tuple[str, ...] = ()) -> Rule:
    return Rule(key, cases, absent, names)


def dropped(key: str, reason: str, *, names: tuple[str, ...] = ()) -> Rule:
    """Any value has no counterpart and needs none."""
    return Rule(key, (Case(ANY, DROPPED, {}, reason),), None, names)


def switch(key: str, verdict: str, settings: Settings, reason: str, *, names: tuple[str, ...] = ()) -> Rule:
    """A key that is off by default on both sides."""
    return Rule(key, (Case(True, verdict, settings, reason), Case(False, EXACT, {}, "the default")), None, names)


SHARD, COPIES = "sharding.data_parallel_shard_degree", "sharding.data_parallel_replicate_degree"
RESHARD, OFFLOAD, PIN = "sharding.reshard_after_forward", "sharding.cpu_offload", "sharding.pin_memory"
MODE, DTYPE, PARAM, REDUCE = "precision.mode", "precision.dtype", "precision.param", "precision.reduce"
WRAP, CLASSES, LEAST = "wrap.by", "wrap.classes", "wrap.min_params"
INIT, AC = "initialisation.source", "activation_checkpointing.at"
KIND, RANK0, HOST = "state_dict.kind", "state_dict.rank0_only", "state_dict.offload_to_cpu"
MICRO = "micro_batches.size"
IGNORED, HELD = "wrap.ignored", "activation_checkpointing.offload"

FULL_STATE = {KIND: "full", RANK0: True, HOST: True}
REPLICATED = {SHARD: 1, COPIES: -1}
