"""Converts a configuration: which format it is in, a finding for each key, and the `ShardingConfig` that the new
settings make."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fullshard.keys import ConfigError, show

from ..config import ShardingConfig
from ..reading import read_config, read_table
from ..verdict import DROPPED, EQUIVALENT, EXACT, UNSUPPORTED, Finding, MigrationError, Place, in_order
from .composer import COMPOSER, CONFIG, FOUNDRY
from .deepspeed import DEEPSPEED
from .hugging import ACCELERATE, HUGGING_FACE
from .rules import (
    AC,
    CLASSES,
    COPIES,
    FULL_STATE,
    GIVEN,
    HELD,
    IGNORED,
    KIND,
    LEAST,
    MODE,
    OFFLOAD,
    PARAM,
    PIN,
    REDUCE,
    WRAP,
    Case,
    Format,
    Rule,
    names_of,
)
from .titan import TITAN

# ---- formats ---------------------------------------------------------------------------------------------------------

FORMATS = (ACCELERATE, HUGGING_FACE, COMPOSER, FOUNDRY, TITAN, DEEPSPEED)


def find_format(path: str, suffix: str, table: Mapping[str, Any], name: str | None) -> Format:
    """The format `name`, or the one whose keys the table has. Raises `MigrationError`."""
    if name is not None:
        return next(each for each in FORMATS if each.name == name)
    given = table.get("fsdp")  # true, or in older versions the names of a strategy
    trainer = "output_dir" in table or ("fsdp_config" in table and isinstance(given, str | list | bool))
    if trainer and ("fsdp" in table or "fsdp_config" in table):
        write = "write the table fsdp_config" if table.get("fsdp_config") else 'write {"version": 2}'
        named = (
            f", with the strategy of fsdp = {given!r} as its key sharding_strategy" if given not in (True, None) else ""
        )
        raise MigrationError(
            f"{path}: expected the Trainer's fsdp_config by itself, found all arguments of a Trainer; "
            f"{write} to a file{named}"
        )
    scores = {each.name: _score(each, table) for each in FORMATS if suffix in each.suffixes}
    best = max(scores, key=lambda each: scores[each], default="")
    if not best or scores[best] == 0:
        shown = ", ".join(list(table)[:4]) or "nothing"
        titles = ", ".join(each.title for each in FORMATS)
        raise MigrationError(
            f"{path}: expected a configuration of one of these: {titles}; found keys {shown}; if it is one of them, "
            f"name it by fullshard migrate --format"
        )
    return next(each for each in FORMATS if each.name == best)


def _score(each: Format, table: Mapping[str, Any]) -> int:
    """How surely a table is in this format: its signs count most, then other keys that it has rules for."""
    keys = {str(key) for key in table}
    known = {name.partition(".")[0] for rule in each.rules for name in (rule.key, *rule.names)}
    if each is COMPOSER:  # also the table itself, without a block around it
        known |= {rule.key for rule in CONFIG}
    score = 10 * len(keys & set(each.signs)) + len(keys & known)
    block = table.get("fsdp_config")
    if isinstance(block, Mapping) and block:  # Accelerate's keys have a prefix, LLM Foundry's have none
        prefixed = any(str(key).startswith("fsdp_") for key in block)
        score += 5 if prefixed == (each is ACCELERATE) else -100 if each in (ACCELERATE, FOUNDRY) else 0
    return max(score, 0)


# ---- conversion ------------------------------------------------------------------------------------------------------

_RECOMPUTE = "activation_checkpointing.recompute"
_EVERY, _SAVE = "activation_checkpointing.every", "activation_checkpointing.save"
_HYBRIDS = ("4", "5", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2")


@dataclass(frozen=True)
class Conversion:
    """`settings`: the new ones, by `section.key`. `trains`: what the trainer takes beside them, by the old key."""

    format: Format
    findings: list[Finding]
    settings: dict[str, Any]
    config: ShardingConfig
    trains: dict[str, dict[str, Any]]


def convert_file(path: Path, name: str | None = None) -> Conversion:
    """Convert the configuration in a file, of the format `name` or the one that it looks like. Writes nothing. Raises
    `MigrationError` with the place of the mistake: unreadable, of no known format, unknown keys, wrong types, settings
    that contradict each other."""
    try:
        table = read_table(path)
        text = path.read_text(encoding="utf-8")
    except ConfigError as error:
        raise MigrationError(str(error)) from None
    return convert(table, str(path), path.suffix, text, name)


def convert(table: Mapping[str, Any], path: str, suffix: str, text: str = "", name: str | None = None) -> Conversion:
    """As `convert_file`, of a table that was read; `text` is for line numbers."""
    found = find_format(path, suffix, table, name)
    return _Converter(found, table, path, text).convert()


@dataclass
class _Setting:
    value: Any
    key: str
    forces: bool


@dataclass
class _Converter:
    format: Format
    table: Mapping[str, Any]
    path: str
    text: str
    findings: list[Finding] = field(default_factory=list)
    settings: dict[str, _Setting] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    trains: dict[str, dict[str, Any]] = field(default_factory=dict)

    def convert(self) -> Conversion:
        for key, value in self._keys():
            self._convert_key(key, value)
        self._convert_absent()
        self._check_reduction()
        self._check_buffers()
        self._check_hybrid()
        self._check_dependent()
        settings = {key: each.value for key, each in self.settings.items()}
        nested: dict[str, dict[str, Any]] = {}
        for key, value in settings.items():
            section, _, name = key.partition(".")
            nested.setdefault(section, {})[name] = value
        try:
            config = read_config(nested)
        except ConfigError as error:
            old = self.settings.get(str(error).partition(" ")[0])
            place = f"{self.path}" if old is None else f"{self._place(old.key)}: {old.key}"
            raise MigrationError(f"{place}: {error}") from None
        return Conversion(self.format, in_order(self.findings), settings, config, self.trains)

    # ---- keys ----------------------------------------------------------------------------------------------------

    def _keys(self) -> Iterator[tuple[str, Any]]:
        """(dotted key, value), in the form of the rules."""
        table = dict(self.table)
        if self.format is COMPOSER:
            inner = table.pop("parallelism_config", None)
            self._expect_table("parallelism_config", inner)
            table.update(inner or {})
            if "fsdp2" in table:
                table["fsdp"] = table.pop("fsdp2")
            own = {key: table.pop(key) for key in list(table) if any(key == rule.key for rule in CONFIG)}
            if own:
                table["fsdp"] = {**own, **(table.get("fsdp") or {})}
        yield from self._flat("", table)

    def _flat(self, prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in table.items():
            key = f"{prefix}{name}"
            inside = any(rule_name.startswith(f"{key}.") for rule in self.format.rules for rule_name in _names(rule))
            if inside and self.format.rule(key) is None:  # a table or nothing, as of keys that are commented out
                self._expect_table(key, value)
                yield from self._flat(f"{key}.", value or {})
            elif isinstance(value, Mapping) and value and inside:
                yield from self._flat(f"{key}.", value)
            else:
                yield key, value

    def _expect_table(self, key: str, value: Any) -> None:
        if value is not None and not isinstance(value, Mapping):
            raise MigrationError(f"{self._place(key)}: {key} = {show(value)}: expected a table")

    def _convert_key(self, key: str, value: Any) -> None:
        rule = self.format.rule(key)
        if rule is None:
            self._not_ours(key, value)
            return
        value = self._resolved(key, value)
        self.given[rule.key] = value
        case = rule.case(value)
        if case is None:
            raise MigrationError(f"{self._place(key)}: {key} = {show(value)}: expected {rule.expected}")
        self._apply(rule, case, key, value)

    def _apply(self, rule: Rule, case: Case, key: str, value: Any, *, default: bool = False) -> None:
        new = {name: _given(value, name) if each is GIVEN else each for name, each in case.settings.items()}
        self._say(key, value, case.verdict, case.reason, new, default)
        if case.trains:
            self.trains[key] = {name: _given(value, name) if v is GIVEN else v for name, v in case.trains.items()}
        for name, setting in new.items():
            before = self.settings.get(name)
            if before is not None and before.value != setting and before.forces == case.forces:
                if default:
                    continue
                raise MigrationError(
                    f"{self._place(key)}: {key} = {show(value)} contradicts {before.key}: {name} would be "
                    f"{show(setting)} and {show(before.value)}; leave one out"
                )
            if before is None or case.forces or not before.forces:
                self.settings[name] = _Setting(setting, key, case.forces)

    def _not_ours(self, key: str, value: Any) -> None:
        """A key that is not about sharding, or a mistake."""
        top, _, inner = key.partition(".")
        names = [name for rule in self.format.rules for name in _names(rule)]
        close = difflib.get_close_matches(key, names, n=1, cutoff=0.85)
        if top in self.format.elsewhere and (key == top or not close):
            if not any(each.key == top for each in self.findings):
                self._say(top, None, DROPPED, "not about sharding: it stays with your program", {}, False)
            return
        nearest = close or difflib.get_close_matches(key, [*names, *self.format.elsewhere], n=1, cutoff=0.0)
        raise MigrationError(
            f"{self._place(key)}: {key} = {show(value)}: {self.format.title} has no such key; nearest valid: "
            f"{nearest[0]}"
        )

    def _resolved(self, key: str, value: Any) -> Any:
        """Interpolations of OmegaConf: ${variables.x}."""
        if not (isinstance(value, str) and (found := re.fullmatch(r"\$\{([\w.]+)\}", value))):
            return value
        here: Any = self.table
        for part in found[1].split("."):
            here = here.get(part) if isinstance(here, Mapping) else None
        if here is None:
            raise MigrationError(
                f"{self._place(key)}: {key} = {value}: found no {found[1]} in this file; write the value"
            )
        return here

    # ---- what depends on several keys ----------------------------------------------------------------------------

    def _convert_absent(self) -> None:
        """Defaults of the old library that mean something else than the new ones."""
        if self.format is ACCELERATE and self._has_block() and self._is_version_1():
            rule = self._rule("state_dict_type")
            if rule.key not in self.given:
                reason = "version 1 of the plugin keeps full state dicts; the default here is sharded"
                case = Case("FULL_STATE_DICT", EQUIVALENT, FULL_STATE, reason)
                self._apply(rule, case, rule.key, "FULL_STATE_DICT", default=True)
        if self.format is COMPOSER and (
            "fsdp2" in self.table or "fsdp2" in (self.table.get("parallelism_config") or {})
        ):
            return  # version 2 has the same defaults
        for rule in self.format.rules:
            if rule.absent is None or rule.key in self.given or not self._applies(rule):
                continue
            absent = rule.case(rule.absent)
            assert absent is not None
            if absent.settings or absent.verdict != EXACT:
                self._apply(rule, absent, rule.key, rule.absent, default=True)

    def _check_reduction(self) -> None:
        """Sources that leave the dtype of reductions out reduce in that of compute, as FSDP1 and FSDP2 up to torch 2.14
        do; here it would be that of the parameters."""
        compute = self.settings.get(PARAM)
        mode = self.settings.get(MODE)
        if compute is None or REDUCE in self.settings or (mode is not None and mode.value != "FULL"):
            return
        key = next((r.key for r in self.format.rules if any(REDUCE in c.settings for c in r.cases)), compute.key)
        self.settings[REDUCE] = _Setting(compute.value, key, False)
        reason = "gradients are averaged in the dtype of compute, as there"
        self._say(key, None, EXACT, reason, {REDUCE: compute.value}, True)

    def _applies(self, rule: Rule) -> bool:
        name = rule.key.rpartition(".")[2]
        if name == "mixed_precision" and any(key.startswith(f"{rule.key}.") for key in self.given):
            return False
        if name == "activation_checkpointing_reentrant":
            return _true(self._given("activation_checkpointing"))
        if name == "selective_ac_option":
            return bool(self.given.get("activation_checkpoint.mode", "selective") == "selective")
        if name == "auto_wrap_policy" or name.endswith("fsdp_auto_wrap_policy"):
            return self._has_block() and CLASSES not in self.settings
        return self._has_block()

    def _has_block(self) -> bool:
        """Whether the file has the table with FSDP's settings at all."""
        block = {"accelerate": "fsdp_config.", "composer": "fsdp.", "foundry": "fsdp_config."}.get(self.format.name, "")
        return any(key.startswith(block) for key in self.given)

    def _is_version_1(self) -> bool:
        """Of Accelerate's plugin."""
        return self._given("version") not in (2, "2")

    def _check_buffers(self) -> None:
        """Version 1 of Accelerate's plugin casts buffers with the parameters."""
        if self.format is not ACCELERATE or not self._has_block() or not self._is_version_1():
            return
        for i, each in enumerate(self.findings):
            if each.key == "mixed_precision" and MODE in self.settings and self.settings[MODE].value == "PURE":
                reason = f"{each.reason}; version 1 casts buffers too, which keep their dtype here"
                self.findings[i] = replace(each, reason=reason)

    def _check_hybrid(self) -> None:
        """Hybrid sharding needs the number of copies."""
        for name in ("sharding_strategy", "reshard_after_forward"):
            value = self._given(name)
            if (
                value is None
                or (name, type(value)) == ("reshard_after_forward", int)
                or str(value).upper().rpartition(".")[2] not in _HYBRIDS
            ):
                continue
            rule = self._rule(name)
            machines = self.table.get("num_machines") if self.format is ACCELERATE else None
            if COPIES in self.settings:
                continue
            if type(machines) is int and machines > 1:
                self.settings[COPIES] = _Setting(machines, "num_machines", False)
                self._say("num_machines", machines, EXACT, "a copy on each machine", {COPIES: machines}, False)
            elif machines != 1:
                reason = f"give {COPIES}, the number of machines: without it there is one copy"
                self._say(rule.key, value, UNSUPPORTED, reason, {}, False)

    def _check_dependent(self) -> None:
        """Settings that have no effect without another one."""
        value = {key: each.value for key, each in self.settings.items()}
        if LEAST in value and value.get(WRAP) != "size":
            self._forget(LEAST, "has no effect with this policy")
        if value.get(WRAP) == "no_split_modules" and CLASSES in value:
            del self.settings[WRAP]
        if PIN in value and not value.get(OFFLOAD):
            self._forget(PIN, "has no effect without offload")
        if value.get(AC, "none") == "none":
            if value.get(HELD) and self.format is ACCELERATE:
                key = self.settings[HELD].key
                needed = "expected fsdp_activation_checkpointing = true beside it, which Accelerate asks for"
                raise MigrationError(f"{self._place(key)}: {key} = true: {needed}")
            if value.get(HELD):
                self.settings[AC] = _Setting("children", self.settings[HELD].key, False)
                self.settings[_RECOMPUTE] = _Setting(False, self.settings[HELD].key, False)
            for name in (_EVERY, _SAVE):
                self._forget(name, "has no effect without checkpointing")
        elif self.format is TITAN and self.given.get("activation_checkpoint.mode", "selective") != "selective":
            for name in (_EVERY, _SAVE):
                self._forget(name, "has no effect in this mode")
        if value.get(KIND) == "sharded":
            for name in ("state_dict.rank0_only", "state_dict.offload_to_cpu"):
                self.settings.pop(name, None)

    def _forget(self, name: str, reason: str) -> None:
        gone = self.settings.pop(name, None)
        for i, each in enumerate(self.findings):
            if gone is not None and each.key == gone.key:
                self.findings[i] = Finding(each.place, each.key, each.value, DROPPED, reason)

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _rule(self, name: str) -> Rule:
        """The rule of FSDP's key `name`, whatever stands before it in this format."""
        ends = (f"fsdp_config.fsdp_{name}", f"fsdp.{name}", f"fsdp_config.{name}", name)
        return next(rule for end in ends for rule in self.format.rules if rule.key == end)

    def _given(self, name: str) -> Any:
        try:
            return self.given.get(self._rule(name).key)
        except StopIteration:
            return None

    def _say(self, key: str, value: Any, verdict: str, reason: str, new: Mapping[str, Any], default: bool) -> None:
        setting = ", ".join(f"{name} = {show(each)}" for name, each in new.items())
        shown = "" if value is None else show(value)
        self.findings.append(Finding(self._place(key), key, shown, verdict, reason, setting, default))

    def _place(self, key: str) -> Place:
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
        return Place(self.path, at + 1 if lines and key and self._is_written(key) else 0)

    def _is_written(self, key: str) -> bool:
        return re.search(rf"\b{re.escape(key.rpartition('.')[2])}\b", self.text) is not None


def _names(rule: Rule) -> tuple[str, ...]:
    return rule.key, *rule.names


def _given(value: Any, name: str) -> Any:
    """The old value in the form of the new key."""
    if name == CLASSES and isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if name == IGNORED and isinstance(value, str):
        return names_of(value)
    return int(value) if isinstance(value, str) and value.isdigit() else value


def _true(value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.lower() == "true")
