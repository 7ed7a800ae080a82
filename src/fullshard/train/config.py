"""Every key of a training run, with its default, its meaning and its limits; reading them, and printing them.

The tree consists of frozen dataclasses: one per TOML section, `Config` for the whole. A key carries its documentation
and its limits as field metadata, so the reader, `fullshard train --print-config` and the documentation agree.
Rules between keys are in `Config.check`, rules that need the number of processes in `Config.check_world`.

Reading is strict: an unknown section or key, or a value of the wrong type, out of its limits or not among its choices
raises `ConfigError`, whose text is one line that names the key, the value and the nearest valid one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fullshard.keys import ConfigError as ConfigError
from fullshard.keys import checked, find_key, line, names_of, read_toml, setting, unknown
from fullshard.keys import invalid as invalid
from fullshard.keys import show as show
from fullshard.migrate import ShardingConfig, reading
from fullshard.migrate.axes import Axes
from fullshard.migrate.parallelism import DEGREES, ModelShape
from fullshard.migrate.schedules import find_schedule
from fullshard.train import former_keys
from fullshard.train.adapter_keys import AdapterKeys, check_pretrained, refuse_without_folder, with_folder
from fullshard.train.data_keys import DataKeys as DataKeys
from fullshard.train.data_keys import check_keys
from fullshard.train.optimizer_keys import OptimizerKeys as OptimizerKeys
from fullshard.train.optimizer_keys import check_optimizer, refuse_8_bits

AUTO = "auto"
# The axes that the trainer has beside data parallelism.
_AXES = (
    "tensor_parallel_degree",
    "context_parallel_degree",
    "pipeline_parallel_degree",
    "expert_parallel_degree",
    "expert_tensor_parallel_degree",
)


@dataclass(frozen=True, slots=True)
class RunKeys:
    dir: str = setting("", 'folder of this run, must be new or empty; "" makes runs/<date>-<time>')


@dataclass(frozen=True, slots=True)
class ModelKeys:
    folder: str = setting(
        "", 'model of Hugging Face to train on: its folder, or name on the hub; "" = a new Llama of the keys below'
    )
    dtype: str = setting(
        "float32", "of the parameters of a model of a folder, whatever its files have", choices=("float32", "bfloat16")
    )
    layers: int = setting(4, "number of transformer blocks; each is one sharded unit", least=1)
    dim: int = setting(128, "width of the residual stream", least=2)
    heads: int = setting(4, "query heads; must divide dim", least=1)
    kv_heads: int = setting(2, "key and value heads (grouped-query attention); must divide heads", least=1)
    ffn_dim: int = setting(0, "width of the SwiGLU layer; 0 = 8/3 of dim, rounded up to a multiple of 32", least=0)
    tie_embeddings: bool = setting(True, "use the token embedding as the output projection too")
    rope_theta: float = setting(10000.0, "base of the rotary position frequencies", above=0.0)
    norm_eps: float = setting(1e-5, "epsilon of RMSNorm", above=0.0)
    experts: int = setting(
        0, "experts of each feed-forward layer, each of width ffn_dim; 0 = one layer, no router", least=0
    )
    experts_per_token: int = setting(2, "experts that the router chooses for a token", least=1)
    balance_loss: float = setting(0.01, "factor of the loss that balances experts; 0 = none", least=0.0)


@dataclass(frozen=True, slots=True)
class TrainingKeys:
    steps: int = setting(300, "optimizer steps", least=1)
    global_batch: int = setting(16, "sequences per optimizer step over all processes together", least=1)
    micro_batch: int | str = setting(
        4,
        'most sequences in one forward pass of a process; 0 = its whole share; "auto" = what memory allows, found by '
        "halving",
        least=0,
        words=(AUTO,),
    )
    sequence_length: int = setting(128, "tokens per sequence, also the longest context of the model", least=2)
    clip_norm: float = setting(1.0, "largest global gradient norm; 0 = do not clip", least=0.0)
    accumulate: str = setting(
        "local",
        'several micro-batches: "local" reduces gradients once, after the last; "reduce" after each, in less memory',
        choices=("local", "reduce"),
    )
    nonfinite: str = setting(
        "raise",
        'NaN or inf in loss or gradients: "raise" ends the run, "skip" leaves the update out, "count" notes it',
        choices=("raise", "skip", "count"),
    )
    replay_every: int = setting(
        0, "steps between two that run twice and are compared bit by bit (faulty hardware); 0 = none", least=0
    )
    check_every: int = setting(
        0, "steps between two in which gathers and reductions are checked (check_invariants); 0 = none", least=0
    )
    timeout_seconds: float = setting(300.0, "a collective that takes longer ends the run", above=0.0)
    device: str = setting("auto", '"auto" = cuda where there is a device, else cpu', choices=("auto", "cpu", "cuda"))
    seed: int = setting(0, "seed of initial weights, sample order and generated text", least=0)
    threads: int = setting(0, "CPU threads per process; 0 = cores / processes", least=0)


@dataclass(frozen=True, slots=True)
class MetricsKeys:
    log_every: int = setting(10, "steps between two lines on a console that is not a terminal", least=1)
    eval_every: int = setting(50, "steps between two validations; the last step always validates", least=1)
    eval_windows: int = setting(128, "sequences of one validation; 0 = the whole validation part", least=0)
    tensorboard: bool = setting(True, "also write TensorBoard files, where tensorboard is installed")
    record_first: int = setting(3, "first steps that are recorded in full, for `fullshard see`", least=0)
    record_every: int = setting(100, "steps between two more of them; 0 = none; both 0 = no record", least=0)
    plot: bool = setting(True, "draw loss.png at the end, where matplotlib is installed")


@dataclass(frozen=True, slots=True)
class CheckpointKeys:
    every: int = setting(
        100, "steps between two checkpoints; 0 = only at the end, and when stopped by SIGTERM", least=0
    )
    folder: str = setting(
        "", 'another folder for them, or a URL ("s3://bucket/run"), of this run alone; "" = checkpoints in run.dir'
    )
    local: str = setting("", "folder on a disk of each host, where saves to a URL are written first and sent from")
    keep_last: int = setting(2, "how many of the newest checkpoints are kept", least=1)
    keep_every: int = setting(0, "also keep those of steps that are multiples of this; 0 = none", least=0)
    keep_best: int = setting(0, "also keep this many with the best metric; 0 = none", least=0)
    metric: str = setting(
        "val_loss",
        "of keep_best, the smallest is best; one of validation validates at every checkpoint",
        choices=("loss", "bits_per_byte", "val_loss", "val_bits_per_byte"),
    )
    asynchronous: bool = setting(True, "save in the background between steps; the last save is always waited for")
    staging_mib: int = setting(
        0,
        "most MiB of a process's state that are copied for that; it waits for the rest to be written; 0 = all",
        least=0,
    )
    queue: bool = setting(False, "one more save may wait for the one in the background, with a copy of its own")
    grace_seconds: float = setting(60.0, "a process that has not stopped this long after SIGTERM is ended", above=0.0)


@dataclass(frozen=True, slots=True)
class SampleKeys:
    prompt: str = setting("The ", "beginning of the text generated at the end")
    tokens: int = setting(200, "tokens to generate; 0 = none", least=0)
    temperature: float = setting(0.7, "0 = always the most likely token", least=0.0)
    top_k: int = setting(40, "choose among the k most likely tokens; 0 = all", least=0)


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration. Valid in itself after `check`; `check_world` adds the number of processes."""

    run: RunKeys = RunKeys()
    model: ModelKeys = ModelKeys()
    training: TrainingKeys = TrainingKeys()
    optimizer: OptimizerKeys = OptimizerKeys()
    # The settings of `prepare_fully_shard`, as far as the trainer's model leaves a choice.
    sharding: ShardingConfig = ShardingConfig()
    adapters: AdapterKeys = AdapterKeys()
    data: DataKeys = DataKeys()
    metrics: MetricsKeys = MetricsKeys()
    checkpoint: CheckpointKeys = CheckpointKeys()
    sample: SampleKeys = SampleKeys()

    @property
    def ffn_dim(self) -> int:
        """The SwiGLU width with 0 resolved: 8/3 of dim keeps the parameter count of a plain 4·dim layer."""
        return self.model.ffn_dim or -(-8 * self.model.dim // 3 // 32) * 32

    def check(self) -> None:
        """Rules between keys. Raises `ConfigError`."""
        if self.model.folder:
            check_pretrained(self, Config())
        else:
            refuse_without_folder(self, Config())
            self._check_llama()
        if "://" in self.run.dir:
            problem = "expected a folder of this machine; checkpoints alone go to a URL, checkpoint.folder"
            raise invalid("run.dir", self.run.dir, problem)
        c = self.checkpoint
        if c.local and "://" not in c.folder:
            raise invalid("checkpoint.local", c.local, "has no effect without a URL in checkpoint.folder")
        for key in ("staging_mib", "queue"):
            value = getattr(c, key)
            if value and not c.asynchronous:
                raise invalid(f"checkpoint.{key}", value, "has no effect with checkpoint.asynchronous = false")
        if not c.keep_best and c.metric != CheckpointKeys().metric:
            raise invalid("checkpoint.metric", c.metric, "has no effect with checkpoint.keep_best = 0")
        check_optimizer(self)
        check_keys(self.data)
        _check_sharding(self.sharding, own_model=not self.model.folder)
        self._check_axes()

    def _check_llama(self) -> None:
        m = self.model
        if m.dim % m.heads or (m.dim // m.heads) % 2:
            heads = [h for h in range(1, m.dim // 2 + 1) if m.dim % h == 0 and (m.dim // h) % 2 == 0]
            if not heads:
                raise invalid("model.dim", m.dim, "must be even", str(m.dim + 1))
            problem = f"must divide model.dim = {m.dim} into heads of even width"
            raise invalid("model.heads", m.heads, problem, _nearest(m.heads, heads))
        if m.heads % m.kv_heads:
            nearest = _nearest(m.kv_heads, _divisors(m.heads))
            raise invalid("model.kv_heads", m.kv_heads, f"must divide model.heads = {m.heads}", nearest)
        if m.experts:
            if m.experts_per_token > m.experts:
                problem = f"must be at most model.experts = {m.experts}"
                raise invalid("model.experts_per_token", m.experts_per_token, problem, str(m.experts))
        else:
            for key in ("experts_per_token", "balance_loss"):
                if getattr(m, key) != getattr(ModelKeys(), key):
                    problem = "has no effect with model.experts = 0"
                    raise invalid(f"model.{key}", getattr(m, key), problem, show(getattr(ModelKeys(), key)))

    def _check_axes(self) -> None:
        keys = self.sharding.parallelism
        for name in DEGREES:
            if name not in _AXES and getattr(keys, name, 1) != 1:
                problem = "the trainer has no such axis"
                raise invalid(f"sharding.parallelism.{name}", getattr(keys, name), problem, "1")
        own = not self.model.folder
        if own and keys.expert_parallel_degree > 1 and not self.model.experts:
            problem = "has no effect with model.experts = 0"
            raise invalid("sharding.parallelism.expert_parallel_degree", keys.expert_parallel_degree, problem, "1")
        if keys.pipeline_parallel_degree > 1:
            self._check_pipeline()
        if not keys.beyond_data:
            return
        if own and keys.enable_loss_parallel and self.model.tie_embeddings:
            problem = "a tied embedding stays whole; set model.tie_embeddings = false"
            raise invalid("sharding.parallelism.enable_loss_parallel", True, problem, "false")
        if self.training.micro_batch == AUTO:
            others = "experts" if keys.expert_parallel_degree > 1 else "sequences"
            shared = "layers" if keys.tensor_parallel_degree > 1 else others
            problem = f"ranks that share {shared} wait for the one that is out of memory; give a number"
            raise invalid("training.micro_batch", AUTO, problem, "4")

    def _check_pipeline(self) -> None:
        keys, training = self.sharding.parallelism, self.training
        for name in ("pipeline_parallel_microbatch_size", "pipeline_parallel_num_microbatches"):
            if getattr(keys, name):
                problem = "has no effect in the trainer: set training.micro_batch"
                raise invalid(f"sharding.parallelism.{name}", getattr(keys, name), problem, "0")
        if self.model.tie_embeddings and find_schedule(keys.pipeline_parallel_schedule).v:
            problem = f"the first process of {keys.pipeline_parallel_schedule} has the first and the last stage, which "
            raise invalid("model.tie_embeddings", True, problem + "would shard the embedding twice", "false")
        for name, value, default in (
            ("micro_batch", training.micro_batch == AUTO, 4),
            ("accumulate", training.accumulate == "reduce", "local"),
            ("replay_every", training.replay_every > 0, 0),
            ("check_every", training.check_every > 0, 0),
        ):
            if value:
                problem = "is not there for a pipeline"
                raise invalid(f"training.{name}", getattr(training, name), problem, show(default))

    @property
    def reshards(self) -> bool | int | str:
        """When full parameters are freed: by default never in a pipeline, which needs them for each micro-batch."""
        kept = self.sharding.sharding.reshard_after_forward
        return False if isinstance(kept, str) and self.sharding.parallelism.pipeline_parallel_degree > 1 else kept

    @property
    def shape(self) -> ModelShape:
        """The numbers of the model that degrees have to divide."""
        m, d = self.model, self.data
        if m.folder:  # its own numbers are compared where it is read
            return ModelShape(sequence=self.training.sequence_length)
        # Not divided, a vocabulary may have any size; that of other tokenizers is known where they are made.
        vocabulary = d.bpe_vocab if d.tokenizer == "bpe" and not m.tie_embeddings else 0
        return ModelShape(
            m.heads, m.kv_heads, self.ffn_dim, vocabulary, self.training.sequence_length, m.experts, m.layers
        )

    def axes(self, world: int) -> Axes:
        """The axes on `world` processes. Raises `ConfigError` for degrees that do not fit them, or the model."""
        copies, shard = self.sharding.degrees(world)
        if not self.sharding.parallelism.beyond_data:
            return Axes(dp_replicate=copies, dp_shard=shard)
        plan = self.sharding.parallel
        if plan.enable_sequence_parallel == AUTO and plan.tensor_parallel_degree > 1 and not self.model.folder:
            plan = replace(plan, enable_sequence_parallel=True)
        return plan.on(world, self.shape)

    def check_world(self, world: int) -> None:
        """Rules that depend on the number of processes `world`. Raises `ConfigError`."""
        batch, processes = self.training.global_batch, world
        world = self.axes(processes).shares
        if batch % world:
            problem = f"must be a multiple of the {world} processes" + (" with data of their own" * (world < processes))
            multiples = [max(batch // world, 1) * world, (batch // world + 1) * world]
            raise invalid("training.global_batch", batch, problem, _nearest(batch, multiples))
        share, micro = batch // world, self.training.micro_batch
        if isinstance(micro, int) and micro and share % min(micro, share):
            problem = f"must divide the {share} sequences that each of {world} process(es) has of a step"
            raise invalid("training.micro_batch", micro, problem, _nearest(micro, _divisors(share)))
        keys = self.sharding.parallelism
        if keys.pipeline_parallel_degree > 1:
            schedule, size = find_schedule(keys.pipeline_parallel_schedule), self.micro_batch(processes)
            legal = schedule.numbers(share, keys.pipeline_parallel_degree, keys.num_stages)
            if share // size not in legal:
                problem = f"makes {share // size} of the {share} sequences of a process, and "
                problem += schedule.problem(share // size, keys.pipeline_parallel_degree, keys.num_stages)
                if legal:
                    nearest = _nearest(size, [share // number for number in legal])
                    raise invalid("training.micro_batch", micro, problem, nearest)
                larger = world * keys.num_stages
                raise invalid("training.global_batch", batch, problem, str(larger))

    def with_replicas(self, replicas: int) -> Config:
        """The same with so many copies of the state."""
        keys = replace(self.sharding.sharding, data_parallel_replicate_degree=replicas)
        return replace(self, sharding=replace(self.sharding, sharding=keys))

    def micro_batch(self, world: int) -> int:
        """Sequences in one forward pass of each of `world` processes; with "auto", in the first one."""
        share, micro = self.training.global_batch // self.axes(world).shares, self.training.micro_batch
        return min(micro or share, share) if isinstance(micro, int) else share


# What the trainer's model decides by itself, by section of `ShardingConfig`.
_DECIDED = {
    "wrap": "units are the blocks of the trainer's model, and the rest",
    "initialisation": "values are drawn from training.seed, each rank its own rows",
    "micro_batches": "set training.micro_batch and training.accumulate",
    "state_dict": "checkpoints are sharded, and model.safetensors at the end is whole",
}
_DTYPES = ("float32", "bfloat16")


def _check_sharding(config: ShardingConfig, *, own_model: bool) -> None:
    """Raise `ConfigError` for a setting of [sharding] without effect on the trainer's model. `own_model`: it is not
    one of a folder."""
    default = ShardingConfig()
    for section, instead in _DECIDED.items():
        keys = getattr(config, section)
        for key in fields(keys):
            value = getattr(keys, key.name)
            if value != getattr(getattr(default, section), key.name):
                raise invalid(f"sharding.{section}.{key.name}", value, f"has no effect in the trainer: {instead}")
    if config.override:
        raise ConfigError("sharding.override: expected none: all blocks of the trainer's model have the same settings")
    precision = config.precision
    for name, dtype in zip(("param", "reduce", "output"), precision.dtypes, strict=True):
        known = (*_DTYPES, "float64") if name == "reduce" else _DTYPES
        if dtype not in (None, *known):
            problem = f"expected one of {', '.join(map(show, known))}"
            if dtype == "float16":
                problem += "; the trainer does not scale losses"
            raise invalid(f"sharding.precision.{name}", dtype, problem, show("bfloat16"))
    if precision.master not in ("default", "float32"):
        raise invalid(
            "sharding.precision.master", precision.master, "the trainer's parameters are float32", '"float32"'
        )
    for name, problem in (
        ("cast_inputs", "has no effect: tokens are whole numbers, and blocks get what was computed in the same dtype"),
        ("keep_float32", "has no effect: all of the trainer's model computes in sharding.precision.param"),
    ):
        if own_model and getattr(precision, name) != getattr(default.precision, name):
            raise invalid(f"sharding.precision.{name}", getattr(precision, name), problem)
    at = config.activation_checkpointing.at
    if at not in ("none", "units"):
        name = "sharding.activation_checkpointing.at"
        raise invalid(name, at, "of the trainer's model the blocks are recomputed, its units", show("units"))


def _divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]


def _nearest(value: int, valid: list[int]) -> str:
    return str(min(valid, key=lambda v: (abs(v - value), v)))


# ---- reading and printing ---------------------------------------------------------------------------------------


def load_config(path: Path | None, overrides: Iterable[str] = (), elsewhere: Mapping[str, Any] | None = None) -> Config:
    """Defaults, then the settings from elsewhere, by `section.key`, and the file, which may not contradict each other,
    then the overrides (`section.key=value`) in order; checked. Former names of keys are read, with one warning.

    Raises `ConfigError` for every mistake in them, including an unreadable file.
    """
    elsewhere = elsewhere or {}
    settings, former = _of_tables({} if path is None else read_toml(path))
    given = settings | _checked(former_keys.renamed(former))
    for name, value in given.items():
        other = elsewhere.get(name, value)
        if other != value:
            problem = f"{path} and --from contradict each other, where it is {show(other)}; leave one out"
            raise invalid(name, value, problem)
    settings = {**elsewhere, **settings}
    for text in overrides:
        changed, before = _of_override(text)
        settings |= changed
        former |= before
    former_keys.refuse_both(former, {name: value for name, value in settings.items() if name not in elsewhere})
    config = _made(with_folder({**settings, **_checked(former_keys.renamed(former))}))
    config.check()
    former_keys.warn(former)
    return config


def to_toml(config: Config, *, notes: Mapping[str, str] | None = None) -> str:
    """The configuration as TOML with each key's meaning beside it; `load_config` reads it back as `config`.

    `notes` maps "section.key" to the resolved value of an automatic setting, for instance "here: 2".
    """
    lines: list[str] = []
    for section, keys in _keys(config):
        lines.append(f"[{section}]")
        lines += [
            line(key, getattr(keys, key.name), (notes or {}).get(f"{section}.{key.name}", "")) for key in fields(keys)
        ]
        lines.append("")
    return "\n".join(lines)


def key_names() -> list[str]:
    """Every `section.key`, in the order of the file."""
    return names_of(_keys(Config()))


def value_of(config: Config, name: str) -> Any:
    """The value of a key in `key_names`."""
    section, _, key = name.rpartition(".")
    return getattr(dict(_keys(config))[section], key)


# Of `ShardingConfig` what the trainer's model has settings for: [sharding], and tables in it.
_SHARDING = {
    "sharding": "sharding",
    "sharding.parallelism": "parallelism",
    "sharding.precision": "precision",
    "sharding.activation_checkpointing": "activation_checkpointing",
}


def _keys(config: Config) -> list[tuple[str, Any]]:
    """The sections of the file with their keys."""
    found: list[tuple[str, Any]] = []
    for section in _sections():
        if section == "sharding":
            found += [(name, getattr(config.sharding, own)) for name, own in _SHARDING.items()]
        else:
            found.append((section, getattr(config, section)))
    return found


def _sections() -> list[str]:
    return [section.name for section in fields(Config)]


def _of_tables(tables: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a file, by `section.key`, and those under former names."""
    settings: dict[str, Any] = {}
    former: dict[str, Any] = {}
    for section, table in tables.items():
        if section not in (*_sections(), *former_keys.SECTIONS):
            raise unknown(section, table, _sections(), "section")
        if section != "sharding" and not isinstance(table, dict):
            raise invalid(section, table, f"expected a section, written [{section}]")
        if section == "sharding":
            settings |= _of_sharding(table)
            continue
        for key, value in table.items():
            name = f"{section}.{key}"
            if name in former_keys.FORMER:
                former[name] = value
            else:
                settings |= _checked({name: value})
    return settings, former


def _of_override(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what `--set` says, as `_of_tables` does."""
    name, equals, raw = text.partition("=")
    name, raw = name.strip(), raw.strip()
    section, _, key = name.partition(".")
    if not equals or not key:
        raise ConfigError(f"--set {text}: expected section.key=value, for example --set training.steps=20")
    value = _value(raw)
    if name in former_keys.FORMER:
        return {}, {name: value}
    if (
        section not in ("sharding", "parallelism")
        and not isinstance(value, str)
        and _found(section, key, raw).type == "str"
    ):
        value = raw
    return _checked({name: value}), {}


def _value(raw: str) -> Any:
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw  # a string: quotes need not survive the shell


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by `section.key`, each checked by itself, under its own name."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        if section in ("sharding", "parallelism"):
            for part in reversed(key.split(".")):
                value = {part: value}
            found |= _of_sharding(value if section == "sharding" else {section: value})
        else:
            refuse_8_bits(name, value)
            found[name] = checked(name, _found(section, key, value), value)
    return found


def _found(section: str, key: str, value: Any) -> Any:
    keys = getattr(Config(), section) if section in _sections() and section != "sharding" else None
    return find_key(section, keys, key, value, key_names())


def _of_sharding(table: Any) -> dict[str, Any]:
    """The settings of a table [sharding], which is read as a `ShardingConfig` is, by `section.key` of the trainer."""
    try:
        found = reading.settings_of(table if isinstance(table, Mapping) else {"sharding": table})
    except ConfigError as error:
        raise ConfigError(_inside(str(error))) from None
    return {name if name.startswith("sharding.") else f"sharding.{name}": value for name, value in found.items()}


def _made(settings: Mapping[str, Any]) -> Config:
    """The configuration with these settings."""
    config, sharding = Config(), {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        if section == "sharding":
            own = "." in key or key == "override"
            sharding[key if own else name] = value
        else:
            config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    try:
        return replace(config, sharding=reading.of_settings(sharding))
    except ConfigError as error:
        raise ConfigError(_inside(str(error))) from None


def _inside(text: str) -> str:
    """An error of a `ShardingConfig` with the names that its keys have in the trainer's file."""
    if text.startswith("["):
        text = f"[sharding.{text[1:]}"
    elif not text.startswith("sharding."):
        text = f"sharding.{text}"
    # The one choice of the trainer's model.
    text = text.replace('at = "children"', 'at = "units"')
    sections = "|".join(key.name for key in fields(ShardingConfig) if key.name != "sharding")
    return re.sub(rf"(?<=nearest valid: )(?=(?:{sections})\b)", "sharding.", text)
