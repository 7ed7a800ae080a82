"""The configuration: strict reading, one-line errors that name key, value and the nearest valid one."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest

from fullshard.migrate import read_config
from fullshard.train.config import Config, ConfigError, key_names, load_config, to_toml

# The surface that scripts rely on: a new key is added here on purpose, a removed one is a breaking change.
KEYS = """
run.dir
model.folder model.dtype
model.layers model.dim model.heads model.kv_heads model.ffn_dim model.tie_embeddings model.rope_theta model.norm_eps
model.experts model.experts_per_token model.balance_loss
training.steps training.global_batch training.micro_batch training.sequence_length training.clip_norm
training.accumulate training.nonfinite training.replay_every training.check_every training.timeout_seconds
training.device training.seed training.threads
optimizer.name optimizer.lr optimizer.schedule optimizer.min_lr_ratio optimizer.warmup_steps optimizer.decay_steps
optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.momentum optimizer.weight_decay
sharding.data_parallel_shard_degree sharding.data_parallel_replicate_degree sharding.reshard_after_forward
sharding.cpu_offload sharding.pin_memory
sharding.parallelism.tensor_parallel_degree sharding.parallelism.enable_sequence_parallel
sharding.parallelism.context_parallel_degree sharding.parallelism.context_parallel_variant
sharding.parallelism.pipeline_parallel_degree
sharding.parallelism.expert_parallel_degree sharding.parallelism.expert_tensor_parallel_degree
sharding.parallelism.enable_loss_parallel sharding.parallelism.styles
sharding.parallelism.pipeline_parallel_schedule sharding.parallelism.pipeline_parallel_microbatch_size
sharding.parallelism.pipeline_parallel_num_microbatches sharding.parallelism.pipeline_parallel_stages_per_rank
sharding.parallelism.module_fqns_per_model_part
sharding.precision.mode sharding.precision.dtype sharding.precision.param sharding.precision.reduce
sharding.precision.output sharding.precision.cast_inputs sharding.precision.master sharding.precision.keep_float32
sharding.activation_checkpointing.at sharding.activation_checkpointing.classes
sharding.activation_checkpointing.every sharding.activation_checkpointing.recompute
sharding.activation_checkpointing.save sharding.activation_checkpointing.offload
adapters.method adapters.rank adapters.alpha adapters.dropout adapters.targets adapters.modules_to_save
data.corpus data.text_key data.prompt_key data.messages_key data.loss_on data.validation_fraction
data.validation data.tokenizer data.bpe_vocab
metrics.log_every metrics.eval_every metrics.eval_windows metrics.tensorboard
metrics.record_first metrics.record_every metrics.plot
checkpoint.every checkpoint.folder checkpoint.local
checkpoint.keep_last checkpoint.keep_every checkpoint.keep_best checkpoint.metric
checkpoint.asynchronous checkpoint.staging_mib checkpoint.queue checkpoint.grace_seconds
sample.prompt sample.tokens sample.temperature sample.top_k
""".split()


def test_the_keys_are_these() -> None:
    assert key_names() == KEYS


def _read(path: Path, text: str, sets: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """What a file says, and the warnings."""
    path.write_text(text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = load_config(path, sets)
    return config, [str(warning.message) for warning in caught]


def test_the_seeds_keys_are_read(tmp_path: Path) -> None:
    """The [parallelism] section as the seeds write it, which is torchtitan's."""
    text = "[parallelism]\ndata_parallel_shard_degree = 2\ndata_parallel_replicate_degree = -1\n"
    config, said = _read(tmp_path / "c.toml", text)
    keys = config.sharding.sharding
    assert (keys.data_parallel_shard_degree, keys.data_parallel_replicate_degree) == (2, -1) and not said


AC = "sharding.activation_checkpointing"
# Each former setting, beside what says the same now.
FORMER = {
    'parallelism.reshard_after_forward="never"': ["sharding.reshard_after_forward=false"],
    'parallelism.reshard_after_forward="always"': ["sharding.reshard_after_forward=true"],
    "parallelism.reshard_after_forward=4": ["sharding.reshard_after_forward=4"],
    "parallelism.cpu_offload=true": ["sharding.cpu_offload=true"],
    "parallelism.timeout_seconds=9.0": ["training.timeout_seconds=9.0"],
    'precision.param="bfloat16"': ["sharding.precision.param=bfloat16"],
    'precision.reduce="float64"': ["sharding.precision.reduce=float64"],
    'precision.output="float32"': ["sharding.precision.output=float32"],
    'training.recompute="block"': [f"{AC}.at=units"],
    'training.recompute="none"': [],
    "training.offload_activations=true": [f"{AC}.at=units", f"{AC}.recompute=false", f"{AC}.offload=true"],
    "training.offload_activations=false": [],
}


@pytest.mark.parametrize("setting", FORMER)
@pytest.mark.parametrize("place", ["file", "set"])
def test_a_former_name_means_what_it_meant(setting: str, place: str, tmp_path: Path) -> None:
    name, _, value = setting.partition("=")
    section, _, key = name.partition(".")
    text = f"[{section}]\n{key} = {value}\n" if place == "file" else ""
    config, said = _read(tmp_path / "c.toml", text, [setting] if place == "set" else ())
    assert config == load_config(None, FORMER[setting]) and len(said) == 1 and f"{name} is " in said[0]


def test_former_names_together_are_one_warning(tmp_path: Path) -> None:
    text = '[training]\nrecompute = "block"\nrecompute_every = 2\noffload_activations = true\n'
    text += '[precision]\nparam = "bfloat16"\n'
    config, said = _read(tmp_path / "c.toml", text, ['training.recompute_save=["aten.mm"]'])
    keys = [f"{AC}.at=units", f"{AC}.every=2", f"{AC}.offload=true", f'{AC}.save=["aten.mm"]']
    assert config == load_config(None, [*keys, "sharding.precision.param=bfloat16"])
    assert len(said) == 1 and said[0].count(" is ") == 5
    assert _read(tmp_path / "c.toml", to_toml(config)) == (config, [])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["parallelism.cpu_offload=true", "sharding.cpu_offload=true"], "found it as sharding.cpu_offload too"),
        (["training.recompute=blocks"], 'nearest valid: sharding.activation_checkpointing.at = "units"'),
        (["parallelism.cpu_ofload=true"], "nearest valid: sharding.cpu_offload"),
        (["training.recompute_every=2"], "sharding.activation_checkpointing.every = 2: has no effect"),
    ],
)
def test_mistakes_under_former_names(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, settings)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_key_is_proposed_only_where_it_is_near() -> None:
    """`metrics.wandb` is no misspelling of `metrics.eval_windows`: the keys of the section are listed instead."""
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["metrics.wandb=mine"])
    said = str(caught.value)
    assert said.startswith("metrics.wandb = mine: there is no such key; [metrics] has ") and "\n" not in said
    assert "eval_windows" in said and "nearest" not in said
    for wrong, near in (("training.stps=3", "training.steps"), ("trainer.steps=3", "training.steps")):
        with pytest.raises(ConfigError, match=f"nearest valid: {near}$"):
            load_config(None, [wrong])


def test_the_section_is_a_configuration_of_prepare_fully_shard(tmp_path: Path) -> None:
    """The same words in both, short forms and other spellings included."""
    text = '[{0}]\ndp_shard_size = 2\ncpu_offload = true\n[{1}precision]\nmode = "DEFAULT"\n'
    text += '[{1}activation_checkpointing]\nat = "units"\nsave = ["aten.mm"]\n'
    config, said = _read(tmp_path / "c.toml", text.format("sharding", "sharding."))
    (tmp_path / "own.toml").write_text(text.format("sharding", ""))
    assert config.sharding == read_config(tmp_path / "own.toml") and not said
    short = load_config(None, ["sharding.precision=PURE", "sharding.strategy=SHARD_GRAD_OP"])
    assert short.sharding == read_config({"precision": "PURE", "sharding": "SHARD_GRAD_OP"})


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("sharding.wrap.group_ends=false", "units are the blocks"),
        ("sharding.initialisation.seed=3", "training.seed"),
        ("sharding.micro_batches.size=2", "set training.micro_batch"),
        ("sharding.state_dict.kind=full", "checkpoints are sharded"),
        ('sharding.override=[{modules = "layers.0", cpu_offload = true}]', "the same settings"),
        ("sharding.precision.param=float16", "does not scale losses"),
        ("sharding.precision.master=bfloat16", "are float32"),
        ("sharding.precision.cast_inputs=false", "has no effect"),
    ],
)
def test_what_the_trainer_s_model_decides_is_refused(setting: str, words: str) -> None:
    """An accepted key has an effect."""
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(None, [setting])
    assert str(caught.value).startswith(setting.partition("=")[0])


def test_overrides_go_after_the_file_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[training]\nsteps = 7\nseed = 3\n[run]\ndir = "a"\n')
    config = load_config(path, ["training.steps=8", "training.steps = 9", "optimizer.lr=1"])
    assert (config.training.steps, config.training.seed, config.run.dir, config.optimizer.lr) == (9, 3, "a", 1.0)


@pytest.mark.parametrize("text", ["runs/a b", "12", "true", '"quoted"', "a=b", "", "1e3"])
def test_a_string_needs_no_quotes(text: str) -> None:
    """What the shell leaves of a string is the string, whatever TOML would make of it."""
    assert load_config(None, [f"run.dir={text}"]).run.dir == text.strip('"')


def test_toml_gives_the_same_config_again(tmp_path: Path) -> None:
    """Every key in a value other than its default survives writing and reading, odd characters included."""
    overrides = [
        "training.steps=3",
        'sample.prompt="a \\"b\\" \\\\ é\\n"',
        "model.tie_embeddings=false",
        "optimizer.eps=1e-7",
    ]
    config = load_config(None, overrides)
    path = tmp_path / "c.toml"
    path.write_text(to_toml(config))
    assert load_config(path) == config != Config()
    assert config.sample.prompt == 'a "b" \\ é\n'


@pytest.mark.parametrize(
    "setting, value, nearest",
    [
        ("training.stps=20", "20", "training.steps"),
        ("trainer.steps=20", "20", "training.steps"),
        ("optimizer.weight_decoy=0.1", "0.1", "optimizer.weight_decay"),
        ("training.steps=many", '"many"', "300"),
        ("training.steps=2.6", "2.6", "3"),
        ("training.steps=true", "true", "300"),
        ("training.steps=0", "0", "1"),
        ("training.steps=[1]", "[1]", "300"),
        ("optimizer.lr=0", "0.0", "0.002"),
        ("optimizer.lr=nan", "nan", "0.002"),
        ("optimizer.beta1=1", "1.0", "0.9999999"),
        ("training.device=gpu", '"gpu"', '"cuda"'),
        ("sharding.activation_checkpointing.at=unit", '"unit"', '"units"'),
        ("sharding.activation_checkpointing.at=children", '"children"', '"units"'),
        ("sharding.precision.param=bfloat61", '"bfloat61"', '"bfloat16"'),
        ("sharding.precision.output=float64", '"float64"', '"bfloat16"'),
        ("sharding.precision.parm=bfloat16", "bfloat16", "sharding.precision.param"),
        ("sharding.cpu_ofload=true", "true", "sharding.cpu_offload"),
        ("sharding.reshard_after_forward=alway", '"alway"', '"always"'),
        ("metrics.plot=yes", '"yes"', "true"),
        ("model.heads=5", "5", "4"),
        ("model.dim=7", "7", "8"),
        ("model.kv_heads=3", "3", "2"),
        ("sharding.data_parallel_replicate_degree=0", "0", "-1"),
        ("sharding.data_parallel_shard_degree=0", "0", "-1"),
        ("checkpoint.metric=val_los", '"val_los"', '"val_loss"'),
        ("data.corpus=book.txt", '"book.txt"', '"path:book.txt"'),
        ("data.corpus=buildin", '"buildin"', '"builtin"'),
    ],
)
def test_a_wrong_setting_is_one_line(setting: str, value: str, nearest: str) -> None:
    """Key, value and the nearest valid choice, in one line."""
    key = setting.partition("=")[0]
    with pytest.raises(ConfigError) as caught:
        load_config(None, [setting])
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"{key} = {value}: ")
    assert line.endswith(f"nearest valid: {nearest}")


@pytest.mark.parametrize(
    "wrong",
    [
        ["checkpoint.metric=loss"],
        ["checkpoint.staging_mib=8", "checkpoint.asynchronous=false"],
        ["checkpoint.queue=true", "checkpoint.asynchronous=false"],
        ["checkpoint.local=/scratch", "checkpoint.folder=/shared"],
    ],
)
def test_a_setting_of_checkpoints_without_effect_is_refused(wrong: list[str]) -> None:
    with pytest.raises(ConfigError, match="has no effect with(out a URL in)? checkpoint"):
        load_config(None, wrong)


@pytest.mark.parametrize(
    "text, words",
    [
        ("[training]\nstps = 20\n", ["training.stps = 20", "training.steps"]),
        ("[trainng]\nsteps = 20\n", ["[trainng]", "training"]),
        ("training = 3\n", ["training = 3", "[training]"]),
        ("steps = 20\n", ["steps = 20", "no such section"]),
        ('[training]\nsteps = "20"\n', ['training.steps = "20"', "nearest valid: 20"]),
        ("[model]\ntie_embeddings = 1\n", ["model.tie_embeddings = 1", "true or false"]),
        ("[data]\ncorpus = 3\n", ["data.corpus = 3", "a string"]),
        ("[training\n", ["not valid TOML"]),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot read the config file: No such file"):
        load_config(tmp_path / "none.toml")


@pytest.mark.parametrize("setting", ["training.steps", "steps=3", "=3", "training.=3"])
def test_an_override_without_key_or_value_is_explained(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"expected section\.key=value"):
        load_config(None, [setting])


@pytest.mark.parametrize(
    "setting, world, key, nearest",
    [
        (
            "sharding.data_parallel_shard_degree=3",
            2,
            "sharding.data_parallel_shard_degree = 3",
            "2 (or -1)",
        ),
        ("training.global_batch=10", 4, "training.global_batch = 10", "8"),
        ("training.global_batch=3", 4, "training.global_batch = 3", "4"),
        ("training.micro_batch=3", 2, "training.micro_batch = 3", "2"),
        ("training.micro_batch=7", 2, "training.micro_batch = 7", "8"),
    ],
)
def test_degrees_that_cannot_be(setting: str, world: int, key: str, nearest: str) -> None:
    """Rules that need the number of processes: key, value, nearest valid."""
    with pytest.raises(ConfigError) as caught:
        load_config(None, [setting]).check_world(world)
    assert str(caught.value).startswith(key) and str(caught.value).endswith(f"nearest valid: {nearest}")


def test_a_word_in_the_place_of_a_number() -> None:
    config = load_config(None, ["training.micro_batch=auto"])
    config.check_world(3 - 1)
    assert config.training.micro_batch == "auto" and config.micro_batch(2) == 8
    assert load_config(None, ['training.micro_batch="auto"']) == config
    for wrong, nearest in (("atuo", '"auto"'), ("2.0", "2"), ("-1", "0"), ("true", "4")):
        with pytest.raises(ConfigError) as caught:
            load_config(None, [f"training.micro_batch={wrong}"])
        assert str(caught.value).endswith(f"nearest valid: {nearest}"), str(caught.value)
    with pytest.raises(ConfigError, match='a whole number or "auto"'):
        load_config(None, ["training.micro_batch=large"])
    with pytest.raises(ConfigError, match="expected a whole number;"):
        load_config(None, ["training.steps=auto"])


@pytest.mark.parametrize("world", [1, 2, 4, 8, 16])
def test_the_default_runs_on_these_worlds(world: int) -> None:
    """The default micro-batch is the same on 1, 2 and 4 processes, so that their arithmetic is; beyond, the share."""
    config = load_config(None)
    config.check_world(world)
    assert config.micro_batch(world) == min(4, 16 // world)


def test_the_nearest_value_is_valid() -> None:
    """What an error proposes is itself accepted."""
    for setting in ("model.heads=5", "model.kv_heads=3", "training.steps=-4", "optimizer.beta2=2", "data.bpe_vocab=1"):
        with pytest.raises(ConfigError) as caught:
            load_config(None, [setting])
        key, nearest = setting.partition("=")[0], str(caught.value).rpartition("nearest valid: ")[2]
        load_config(None, [f"{key}={nearest}"])


def test_reading_a_config_needs_no_torch() -> None:
    """The rules are plain Python; a planner or a schema tool can use them where torch is not."""
    program = (
        "import sys, types; p = types.ModuleType('fullshard'); "
        f"p.__path__ = [{str(Path(__file__).parents[2] / 'src' / 'fullshard')!r}]; sys.modules['fullshard'] = p\n"
        "import fullshard.train.config\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


# ---- axes ------------------------------------------------------------------------------------------------------------


def test_torchtitan_s_section_declares_the_axes(tmp_path: Path) -> None:
    """In a file and by `--set`; it is printed as the trainer has it, and read back."""
    path = tmp_path / "titan.toml"
    path.write_text("[parallelism]\ntensor_parallel_degree = 2\nenable_sequence_parallel = true\n")
    config = load_config(path)
    assert config == load_config(
        None, ["parallelism.tensor_parallel_degree=2", "sharding.parallelism.enable_sequence_parallel=true"]
    )
    (tmp_path / "printed.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "printed.toml") == config
    axes = config.axes(8)
    assert (axes.dp_shard, axes.tp, axes.shares) == (4, 2, 4) and config.micro_batch(8) == 4
    config.check_world(8)


@pytest.mark.parametrize(
    ("settings", "world", "said"),
    [
        (
            ["pipeline_parallel_degree=2", "pipeline_parallel_schedule=DualPipeV"],
            4,
            "model.tie_embeddings = true: the first process of DualPipeV has the first and the last stage",
        ),
        (["context_parallel_degree=3"], 4, "are 3 of 4 ranks; nearest legal plan: data_parallel_shard_degree = "),
        (
            ["context_parallel_degree=4", "context_parallel_variant=ulysses", "tensor_parallel_degree=2"],
            8,
            "heads of a",
        ),
        (["context_parallel_variant=ring"], 4, "has no effect with context_parallel_degree = 1"),
        (["expert_parallel_degree=2"], 4, "has no effect with model.experts = 0"),
        (["tensor_parallel_degree=2", "enable_loss_parallel=true"], 4, "a tied embedding stays whole"),
        (["tensor_parallel_degree=3"], 4, "are 3 of 4 ranks; nearest legal plan: data_parallel_shard_degree = "),
        (["tensor_parallel_degree=4"], 4, "tensor_parallel_degree = 4: must divide the key and value heads, 2"),
        (["enable_sequence_parallel=true"], 4, "has no effect with tensor_parallel_degree = 1"),
        (["enable_async_tensor_parallel=true"], 4, "not built: torch fuses these messages"),
    ],
)
def test_axes_that_the_trainer_cannot_have(settings: list[str], world: int, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, [f"sharding.parallelism.{each}" for each in settings]).check_world(world)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_windows_and_batches_are_those_of_the_shares() -> None:
    two = ["sharding.parallelism.tensor_parallel_degree=2"]
    load_config(None, [*two, "training.global_batch=2", "training.micro_batch=1"]).check_world(4)
    with pytest.raises(ConfigError, match="must be a multiple of the 2 processes with data of their own"):
        load_config(None, [*two, "training.global_batch=3"]).check_world(4)
    with pytest.raises(ConfigError, match="must divide the tokens of a part of a sequence, 31"):
        load_config(None, [*two, "training.sequence_length=31"]).check_world(4)
    with pytest.raises(ConfigError, match="ranks that share layers wait for the one that is out of memory"):
        load_config(None, [*two, "training.micro_batch=auto"])


@pytest.mark.parametrize("name", ["adamw8bit", "AdamW8bit", "adamw_8bit", "paged_adamw_8bit", "AdamWFp8"])
def test_an_optimizer_with_a_state_in_8_bits_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match='depend on the number of processes; torchao.*"adafactor"') as caught:
        load_config(None, [f"optimizer.name={name}"])
    assert f'optimizer.name = "{name}"' in str(caught.value) and "\n" not in str(caught.value)
