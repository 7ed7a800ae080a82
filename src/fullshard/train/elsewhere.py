"""Configurations of other libraries as settings of the trainer: `fullshard train --from accelerate.yaml`. No torch.

`fullshard.migrate` reads them and judges each key; what becomes of its settings here is a finding too, because the
trainer has a model, initial values and files of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.keys import show
from fullshard.migrate import ShardingConfig, read_config
from fullshard.migrate.settings.conversion import MICRO, OTHERS, Conversion, convert_file
from fullshard.migrate.verdict import DROPPED, EQUIVALENT, EXACT, LOSSY, Finding, Place

_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Taken:
    """`findings`: of each key of the file, then of what it means for the trainer. `settings`: the trainer's, by
    `section.key`."""

    findings: list[Finding]
    settings: dict[str, Any]


def take(path: Path) -> Taken:
    """Returns what the trainer takes of a configuration of another library, or of a `*.fullshard.toml` that `fullshard
    migrate` wrote. Raises `MigrationError` or `ConfigError` for what cannot be read."""
    settings: dict[str, Any] = {}
    if path.name.endswith(".fullshard.toml"):
        findings, config = [], read_config(path)
    else:
        converted = convert_file(path)
        findings, config = _trained(converted), converted.config
        settings = {name: value for new in converted.trains.values() for name, value in new.items()}
    for row in _rows(config):
        new = ", ".join(f"{name} = {show(value)}" for name, value in row.settings.items())
        findings = [*findings, Finding(Place(str(path)), row.key, show(row.value), row.verdict, row.reason, new)]
        settings |= row.settings
    return Taken(findings, settings)


def _trained(converted: Conversion) -> list[Finding]:
    """The findings, where the trainer has settings for what `fullshard migrate` leaves to the program."""
    found = []
    batch = any("training.global_batch" in new for new in converted.trains.values())
    for each in (*converted.loop.values(), *converted.findings):
        new, difference = converted.trains.get(each.key), converted.differences.get(each.key)
        if new:
            setting = ", ".join(f"{name} = {show(value)}" for name, value in new.items())
            reason = f"the trainer does it; {difference}" if difference else "the trainer does it"
            each = replace(each, verdict=LOSSY if difference else EXACT, reason=reason, setting=setting)
        elif difference:
            each = replace(each, reason=f"the trainer has its own: {difference}")
        elif each.key == "gradient_accumulation_steps" and batch and MICRO in converted.settings:
            each = replace(each, verdict=EXACT, reason="by training.global_batch and training.micro_batch")
        elif each.key.endswith("gradient_accumulation_steps") and each.verdict == LOSSY:
            reason = "training.global_batch is this x micro-batch x processes: give train_batch_size"
            each = replace(each, reason=reason)
        elif each.reason == OTHERS:
            taken = {key for key in converted.loop if converted.trains.get(key)}
            key = ", ".join(name for name in each.key.split(", ") if name not in taken)
            each = replace(each, key=key, reason="not about sharding: the trainer has its own settings for it")
            if not key:
                continue
        found.append(each)
    return found


class _Row(NamedTuple):
    """A setting of `prepare_fully_shard` that is not the default, and what becomes of it."""

    key: str
    value: Any
    verdict: str
    settings: Mapping[str, Any]
    reason: str


def _rows(config: ShardingConfig) -> Iterator[_Row]:
    units = [(key, value) for key, value in _changed(config, "wrap") if key != "wrap.compile"]
    for key, value in units[:1]:
        yield _Row(key, value, EQUIVALENT, {}, "units are the blocks of the trainer's model, and the rest")
    if config.wrap.compile:
        yield _Row("wrap.compile", config.wrap.compile, LOSSY, {}, "the trainer compiles nothing: the same numbers")
    if config.wrap.ignored:
        yield _Row("wrap.ignored", list(config.wrap.ignored), LOSSY, {}, "the trainer shards all parameters")
    yield from _sharding(config)
    for key, value in _changed(config, "parallelism"):
        if key == "parallelism.styles":
            yield _Row(key, dict(value), LOSSY, {}, "names of another model; the trainer's has styles of its own")
        elif key.startswith("parallelism.expert_"):
            reason = "the trainer's model has no experts; with model.experts set, give it in [parallelism]"
            yield _Row(key, value, LOSSY, {}, reason)
        elif key == "parallelism.pipeline_parallel_microbatch_size":
            yield _Row(key, value, EXACT, {"training.micro_batch": value}, "the same")
        elif key == "parallelism.pipeline_parallel_num_microbatches":
            yield _Row(key, value, LOSSY, {}, "the trainer has their size: give training.micro_batch")
        elif key == "parallelism.module_fqns_per_model_part":
            yield _Row(key, [list(part) for part in value], LOSSY, {}, "names of another model")
        elif key == "parallelism.enable_loss_parallel":
            reason = "the embedding is tied unless model.tie_embeddings = false, and stays whole; the loss is the same"
            yield _Row(key, value, EQUIVALENT, {}, reason)
        else:
            yield _Row(key, value, EXACT, {f"sharding.{key}": value}, "the same")
    yield from _precision(config)
    for key, value in _changed(config, "initialisation"):
        if key == "initialisation.seed":
            yield _Row(key, value, EXACT, {"training.seed": value}, "one seed for values and order of samples")
        elif config.initialisation.source == "pretrained":
            yield _Row(key, value, LOSSY, {}, "the trainer's model begins with values drawn from training.seed")
        else:
            yield _Row(key, value, DROPPED, {}, "values are drawn from training.seed, each rank its own rows")
    yield from _activations(config)
    micro = config.micro_batches
    if micro.size:
        yield _Row("micro_batches.size", micro.size, EXACT, {"training.micro_batch": micro.size}, "of one process")
    if micro.reduce == "each":
        yield _Row("micro_batches.reduce", "each", EXACT, {"training.accumulate": "reduce"}, "sent after each")
    for key, value in [*_changed(config, "state_dict")][:1]:
        yield _Row(key, value, EQUIVALENT, {}, "checkpoints are sharded; model.safetensors at the end is whole")
    for number, override in enumerate(config.override):
        yield _Row(f"override[{number}]", override.modules, LOSSY, {}, "all blocks have the same settings")


def _sharding(config: ShardingConfig) -> Iterator[_Row]:
    for key, value in _changed(config, "sharding"):
        reason = "of each block" if key == "sharding.reshard_after_forward" else "the same"
        yield _Row(key, value, EXACT, {key: value}, reason)


def _precision(config: ShardingConfig) -> Iterator[_Row]:
    choices = {"param": _DTYPES, "reduce": (*_DTYPES, "float64"), "output": _DTYPES}
    for (name, known), dtype in zip(choices.items(), config.precision.dtypes, strict=True):
        key = f"precision.{name}"
        if dtype not in (None, *known):
            reason = "the trainer does not scale losses" if dtype == "float16" else "there is no such choice"
            yield _Row(key, dtype, LOSSY, {}, f"{reason}: without it, that of the parameters, float32")
        elif dtype is not None:
            yield _Row(key, dtype, EXACT, {f"sharding.{key}": dtype}, "the same")
    if config.precision.master not in ("default", "float32"):
        yield _Row("precision.master", config.precision.master, LOSSY, {}, "the trainer's parameters are float32")
    elif config.precision.master == "float32":
        yield _Row("precision.master", "float32", DROPPED, {}, "the trainer's parameters are float32")
    if not config.precision.cast_inputs:
        reason = "tokens are whole numbers, and blocks get what was computed in the same dtype"
        yield _Row("precision.cast_inputs", False, DROPPED, {}, reason)
    for key, value in _changed(config, "precision"):
        if key == "precision.keep_float32" and value:
            yield _Row(key, list(value), LOSSY, {}, "the norms of the trainer's model compute in precision.param")
        elif key == "precision.keep_float32":
            yield _Row(key, [], DROPPED, {}, "the trainer's model has none of these classes")


def _activations(config: ShardingConfig) -> Iterator[_Row]:
    keys, name = config.activation_checkpointing, "activation_checkpointing"
    if keys.at == "none":
        return
    new = {f"sharding.{name}.at": "units"}
    yield _Row(f"{name}.at", keys.at, EQUIVALENT, new, "of the trainer's model they are the blocks")
    for key, value in _changed(config, name):
        last = key.rpartition(".")[2]
        if last in ("every", "recompute", "save", "offload"):
            yield _Row(key, list(value) if last == "save" else value, EXACT, {f"sharding.{key}": value}, "the same")


def _changed(config: ShardingConfig, section: str) -> Iterator[tuple[str, Any]]:
    """Yields what a section has beside its defaults, by `section.key`."""
    keys, default = getattr(config, section), getattr(ShardingConfig(), section)
    for key in fields(keys):
        if (value := getattr(keys, key.name)) != getattr(default, key.name):
            yield f"{section}.{key.name}", value
