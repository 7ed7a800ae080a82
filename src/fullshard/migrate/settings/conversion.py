"""Converts a configuration: which format it is in, a finding for each key, and the `ShardingConfig` that the new
settings make. The findings are made from the result: a setting is reported by the keys that it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fullshard.keys import ConfigError, show

from ..config import ShardingConfig
from ..reading import read_config, read_table
from ..verdict import DROPPED, EXACT, UNSUPPORTED, Finding, MigrationError, Place, in_order
from .entries import Entry, Reader
from .formats import find_format
from .optimizers import built
from .table import ABSENT, GIVEN, RANKS, TRAIN, Case, Format, Row, given

SHARD, COPIES = "sharding.data_parallel_shard_degree", "sharding.data_parallel_replicate_degree"
MODE, PARAM, REDUCE = "precision.mode", "precision.param", "precision.reduce"
MASTER, MICRO, KIND = "precision.master", "micro_batches.size", "state_dict.kind"
OTHERS = "not about sharding: it stays with your program"
_AC, _HELD = "activation_checkpointing.at", "activation_checkpointing.offload"
_RECOMPUTE = "activation_checkpointing.recompute"
# Keys of the declaration that need an axis, by its degree.
_OF_AXES = {
    "tensor_parallel_degree": ("enable_sequence_parallel", "enable_loss_parallel"),
    "context_parallel_degree": ("context_parallel_variant",),
    "pipeline_parallel_degree": (
        "pipeline_parallel_schedule",
        "pipeline_parallel_microbatch_size",
        "pipeline_parallel_num_microbatches",
        "module_fqns_per_model_part",
    ),
}


@dataclass(frozen=True)
class Conversion:
    """`settings`: the new ones, by `section.key`. `trains`: what the trainer takes beside them, by the old key.
    `differences`: what the trainer does in another way than the old key says. `loop`: findings of settings of a
    training loop, which stays with the program."""

    format: Format
    findings: list[Finding]
    settings: dict[str, Any]
    config: ShardingConfig
    trains: dict[str, dict[str, Any]]
    differences: dict[str, str]
    loop: dict[str, Finding]


def convert_file(path: Path, name: str | None = None) -> Conversion:
    """Convert the configuration in a file, of the format `name` or the one that it looks like, with the files that it
    names. Writes nothing. Raises `MigrationError` with the place of the mistake: unreadable, of no known format,
    unknown keys, wrong types, settings that contradict each other."""
    try:
        table = read_table(path)
        text = path.read_text(encoding="utf-8")
    except ConfigError as error:
        raise MigrationError(str(error)) from None
    return convert(table, str(path), path.suffix, text, name)


def convert(table: Mapping[str, Any], path: str, suffix: str, text: str = "", name: str | None = None) -> Conversion:
    """Converts a table that was read, as `convert_file` does; `text` is for line numbers."""
    return _Converter(Reader(find_format(path, suffix, table, name), table, path, text)).convert()


@dataclass
class _Setting:
    value: Any
    key: str
    rank: int


@dataclass
class _Record:
    """A key, its case, and the settings that it asks for."""

    entry: Entry
    case: Case
    settings: dict[str, Any]
    default: bool = False
    notes: list[str] = field(default_factory=list)
    verdict: str = ""


@dataclass
class _Converter:
    reader: Reader
    records: list[_Record] = field(default_factory=list)
    settings: dict[str, _Setting] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    trains: dict[str, dict[str, Any]] = field(default_factory=dict)
    differences: dict[str, str] = field(default_factory=dict)
    loop: dict[str, Finding] = field(default_factory=dict)

    @property
    def format(self) -> Format:
        return self.reader.format

    def convert(self) -> Conversion:
        for entry in self.reader.entries:
            self._convert(entry)
        self._convert_absent()
        self._convert_replicas()
        self._convert_reduction()
        self._convert_buffers()
        self._convert_copies()
        self._convert_dependent()
        settings = {key: each.value for key, each in self.settings.items()}
        config, findings = self._config(settings), in_order(self._findings())
        return Conversion(self.format, findings, settings, config, self.trains, self.differences, self.loop)

    def _config(self, settings: Mapping[str, Any]) -> ShardingConfig:
        nested: dict[str, dict[str, Any]] = {}
        for key, value in settings.items():
            section, _, name = key.partition(".")
            nested.setdefault(section, {})[name] = value
        try:
            return read_config(nested)
        except ConfigError as error:
            old = self.settings.get(str(error).partition(" ")[0])
            place = self.reader.path if old is None else f"{self.reader.place(old.key)}: {old.key}"
            raise MigrationError(f"{place}: {error}") from None

    # ---- keys ----------------------------------------------------------------------------------------------------

    def _convert(self, entry: Entry) -> None:
        assert entry.row is not None
        subject = entry.row.subject
        case = subject.case(entry.value)
        if case is None:
            raise MigrationError(f"{entry.place}: {entry.key} = {show(entry.value)}: expected {subject.expected}")
        if subject.name == "engine_optimizer":
            self._convert_optimizer(entry, case)
        elif subject.loop:
            self._train(entry, case)
            self.loop[entry.key] = Finding(entry.place, entry.key, show(entry.value), DROPPED, case.reason)
        else:
            self._train(entry, case)
            self._apply(entry, case)

    def _train(self, entry: Entry, case: Case) -> None:
        new = {name.removeprefix(TRAIN): value for name, value in self._new(entry, case).items() if TRAIN in name}
        if new:
            self.trains[entry.key] = new

    @staticmethod
    def _new(entry: Entry, case: Case) -> dict[str, Any]:
        return {name: given(entry.value, name) if v == GIVEN else v for name, v in case.settings.items()}

    def _convert_optimizer(self, entry: Entry, case: Case) -> None:
        """Converts what DeepSpeed builds from its file; a program has to."""
        try:
            found = built(entry.key.rpartition(".")[2], entry.value)
        except (TypeError, ValueError, IndexError):
            problem = "expected type, and params with numbers and pairs of them"
            raise MigrationError(f"{entry.place}: {entry.key} = {show(entry.value)}: {problem}") from None
        record = _Record(entry, case, {})
        if not found.line:
            case = replace(case, verdict=DROPPED, reason="the outer configuration's own values")
        else:
            case = replace(case, reason=f"{case.reason}; in your program: {found.line}")
            self.trains[entry.key] = found.trains
            self.differences |= {entry.key: found.difference} if found.difference else {}
        record.case = case
        self.records.append(record)

    def _apply(self, entry: Entry, case: Case, *, default: bool = False) -> None:
        assert entry.row is not None
        new = {name: value for name, value in self._new(entry, case).items() if TRAIN not in name}
        rank = -1 if default else RANKS[entry.row.subject.rank]
        self.records.append(_Record(entry, case, new, default))
        for name, value in new.items():
            before = self.settings.get(name)
            if before is not None and before.value != value and before.rank == rank and not default:
                raise MigrationError(
                    f"{entry.place}: {entry.key} = {show(entry.value)} contradicts {before.key}: {name} would be "
                    f"{show(value)} and {show(before.value)}; leave one out"
                )
            if before is None or before.rank < rank:
                self.settings[name] = _Setting(value, entry.key, rank)

    def _add(self, key: str, settings: Mapping[str, Any]) -> None:
        """Settings that follow from what `key` says."""
        for name, value in settings.items():
            self.settings[name] = _Setting(value, key, RANKS[""])
        for record in self.records:
            if record.entry.key == key:
                record.settings |= settings

    def _given(self, subject: str) -> list[_Record]:
        """Returns what was said about a subject."""
        return [r for r in self.records if r.entry.row is not None and r.entry.row.subject.name == subject]

    # ---- what depends on several keys ----------------------------------------------------------------------------

    def _convert_absent(self) -> None:
        """Defaults of the old library that mean something else than the new ones."""
        for prefix, row in dict.fromkeys(self.reader.rows.values()):
            versioned = f"{row.vocabulary}-v{self.reader.version}"
            value = next(
                (row.absent[n] for n in (self.format.name, row.vocabulary, versioned) if n in row.absent), None
            )
            if (
                value is None
                or any(entry.row is row for entry in self.reader.entries)
                or not self._is_default(prefix, row)
            ):
                continue
            case = row.subject.case(value)
            assert case is not None, row
            if case.settings or case.verdict != EXACT or value == ABSENT:
                shown = None if value == ABSENT else value
                key = f"{prefix}{row.names[0]}"
                self._apply(Entry(key, shown, row, self.reader.place(key)), case, default=True)

    def _is_default(self, prefix: str, row: Row) -> bool:
        """Whether the old library asks for this key at all, beside what is written."""
        name, has = row.subject.name, self.reader.has
        if name == "fsdp":
            return not has("fsdp_config") and not has("deepspeed")
        if name == "v1_bf16":
            return not any(r.entry.value == "deepspeed" for r in self._given("plugin_of_v1"))
        if name == "bf16":
            return not has("fp16") and not has("bfloat16") and not has("float16")
        if row.vocabulary == "accelerate-zero":
            return self._is_deepspeed() and not has("deepspeed_config.deepspeed_config_file")
        if name == "stage":
            outer = prefix.removesuffix("zero_optimization.")
            return self.format.name == "deepspeed" or any(key.startswith(outer) for key in self.reader.keys)
        if name == "policy" and "wrap.classes" in self.settings:
            return False
        if row.vocabulary.startswith("plugin"):
            on = has("fsdp_config") or self.reader.bare or any(r.entry.value for r in self._given("fsdp"))
            return on and not self.reader.is_repeated(prefix)
        if name == "pipeline_size":  # earlier versions have their number, in other sections
            return has("parallelism.pipeline_parallel_degree")
        if name == "mode" and has(f"{prefix}mixed_precision"):
            return False
        if name == "reentrant":
            return any(r.settings for r in self._given("recompute_children"))
        if name == "selection":
            return any(r.entry.value == "selective" for r in self._given("recompute"))
        if row.vocabulary == "composer":
            return self.reader.composer_version != 2 and has(prefix.removesuffix("."))
        if name == "reshard_all":
            return any(r.entry.value == "fsdp2" for r in self._given("plugin_of_v1"))
        return True

    def _is_deepspeed(self) -> bool:
        return any(r.entry.value == "DEEPSPEED" for r in self._given("kind_of_run"))

    def _convert_replicas(self) -> None:
        """DDP computes under autocast, reduces gradients in the dtype of the parameters, and converts none."""
        subjects = ("kind_of_run", "fsdp", "plugin_of_v1")
        replicas = any(SHARD in r.settings and r.entry.value != "no_shard" for n in subjects for r in self._given(n))
        for record in [r for name in ("amp", "bf16", "fp16") for r in self._given(name) if MASTER in r.settings]:
            if replicas and self.settings[SHARD].value == 1:
                del self.settings[MASTER], record.settings[MASTER]
                record.settings[MODE] = self.settings[MODE].value = "DEFAULT"
                reason = "DDP's autocast, operator by operator; here whole units compute in it. Gradients are averaged"
                reason += " in the dtype of the parameters, which stay as they are built"
                record.case = replace(record.case, reason=reason)

    def _convert_reduction(self) -> None:
        """Sources that leave the dtype of reductions out reduce in that of compute, as FSDP1 and FSDP2 up to torch 2.14
        do; here it would be that of the parameters."""
        compute, mode = self.settings.get(PARAM), self.settings.get(MODE)
        if compute is None or REDUCE in self.settings or (mode is not None and mode.value != "FULL"):
            return
        rows = self.reader.rows.items()
        key = next((key for key, (_, row) in rows if row.subject.name == "reduce_dtype"), compute.key)
        case = Case(
            (ABSENT,), EXACT, {REDUCE: compute.value}, "gradients are averaged in the dtype of compute, as there"
        )
        entry = Entry(key, None, self.reader.rows[key][1], self.reader.place(key))
        self._apply(entry, case, default=True)

    def _convert_buffers(self) -> None:
        """Version 1 of Accelerate's plugin casts buffers with the parameters."""
        sharded = self.reader.has("fsdp_config") or self.reader.has("fsdp")
        if self.reader.version == 2 or not sharded:
            return
        for record in [r for name in ("amp", "bf16", "fp16") for r in self._given(name) if MASTER in r.settings]:
            record.notes.append("version 1 casts buffers too, which keep their dtype here")

    def _convert_copies(self) -> None:
        """Hybrid strategies: a number of copies has to come from somewhere."""
        hybrid = [r for name in ("strategy", "reshard_by_strategy", "fsdp") for r in self._given(name)]
        hybrid = [r for r in hybrid if any("hybrid" in str(when).lower() for when in r.case.when)]
        if not hybrid or COPIES in self.settings:
            return
        machines = self.reader.table.get("num_machines")
        if type(machines) is int and machines > 1:
            case = Case((machines,), EXACT, {COPIES: machines}, "a copy on each machine")
            self.records = [r for r in self.records if r.entry.key != "num_machines"]
            self._apply(Entry("num_machines", machines, hybrid[0].entry.row, self.reader.place("num_machines")), case)
        elif machines != 1:
            reason = f"give {COPIES}, the number of machines: without it there is one copy"
            self.records.append(_Record(hybrid[0].entry, Case((), UNSUPPORTED, {}, reason), {}))

    def _convert_dependent(self) -> None:
        """Settings that have no effect without another one."""
        value = {key: each.value for key, each in self.settings.items()}
        if value.get("wrap.by") != "size":
            self._forget("wrap.min_params", "has no effect with this policy")
        if not value.get("sharding.cpu_offload"):
            self._forget("sharding.pin_memory", "has no effect without offload")
        if value.get(_AC, "none") == "none":
            if value.get(_HELD):
                key = self.settings[_HELD].key
                if key.endswith("activation_checkpointing_offload"):
                    needed = "expected fsdp_activation_checkpointing = true beside it, which Accelerate asks for"
                    raise MigrationError(f"{self.reader.place(key)}: {key} = true: {needed}")
                self._add(key, {_AC: "children", _RECOMPUTE: False})
            for name in ("activation_checkpointing.every", "activation_checkpointing.save"):
                self._forget(name, "has no effect without checkpointing")
        elif not any(r.case.when == ("selective",) for r in self._given("recompute")):
            for name in ("activation_checkpointing.every", "activation_checkpointing.save"):
                self._forget(name, "has no effect in this mode")
        for degree, names in _OF_AXES.items():
            if value.get(f"parallelism.{degree}", 1) == 1:
                for name in names:
                    self._forget(f"parallelism.{name}", f"has no effect with {degree} = 1")
        if value.get(KIND) == "sharded":
            for name in ("state_dict.rank0_only", "state_dict.offload_to_cpu"):
                self.settings.pop(name, None)

    def _forget(self, name: str, reason: str) -> None:
        if self.settings.pop(name, None) is not None:
            self.gone[name] = reason

    # ---- the report ----------------------------------------------------------------------------------------------

    def _findings(self) -> list[Finding]:
        found = [each for record in self.records if (each := self._finding(record)) is not None]
        others = [*self.loop, *self.reader.others]
        if others:
            found.append(Finding(Place(self.reader.path), ", ".join(dict.fromkeys(others)), "", DROPPED, OTHERS))
        return found

    def _finding(self, record: _Record) -> Finding | None:
        """A key, with what of the result comes from it."""
        entry, case = record.entry, record.case
        new = record.settings
        kept = {name: v for name, v in new.items() if name in self.settings and self.settings[name].value == v}
        lost = [name for name in new if name not in kept]
        verdict, notes = case.verdict, [case.reason, *record.notes]
        if lost and record.default:
            return None
        for name in lost:
            if kept and name in self.gone:
                continue
            decided = f"{self.settings[name].key} decides {name}" if name in self.settings else ""
            notes = ([] if not kept else notes) + [self.gone.get(name) or decided or "has no effect beside the others"]
        if lost and not kept:
            verdict = DROPPED
        setting = ", ".join(f"{name} = {show(value)}" for name, value in kept.items())
        shown = "" if entry.value is None else show(entry.value)
        reason = "; ".join(dict.fromkeys(notes))
        return Finding(entry.place, entry.key, shown, verdict, reason, setting, record.default)
