"""The configuration: strict reading, one-line errors that name key, value and the nearest valid one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.train.config import Config, ConfigError, key_names, load_config, to_toml

# The surface that scripts rely on: a new key is added here on purpose, a removed one is a breaking change.
KEYS = """
run.dir
model.layers model.dim model.heads model.kv_heads model.ffn_dim model.tie_embeddings model.rope_theta model.norm_eps
training.steps training.global_batch training.micro_batch training.sequence_length training.clip_norm
training.accumulate training.nonfinite training.replay_every training.check_every
training.recompute training.recompute_every training.recompute_save training.offload_activations training.device
training.seed training.threads
optimizer.lr optimizer.min_lr_ratio optimizer.warmup_steps optimizer.beta1 optimizer.beta2 optimizer.eps
optimizer.weight_decay
parallelism.data_parallel_shard_degree parallelism.data_parallel_replicate_degree parallelism.reshard_after_forward
parallelism.cpu_offload parallelism.timeout_seconds
precision.param precision.reduce precision.output
data.corpus data.text_key data.validation_fraction data.tokenizer data.bpe_vocab
metrics.log_every metrics.eval_every metrics.eval_windows metrics.tensorboard
metrics.record_first metrics.record_every metrics.plot
checkpoint.every checkpoint.keep_last checkpoint.keep_every checkpoint.keep_best checkpoint.metric
checkpoint.asynchronous checkpoint.staging_mib checkpoint.queue checkpoint.grace_seconds
sample.prompt sample.tokens sample.temperature sample.top_k
""".split()


def test_the_keys_are_these() -> None:
    assert key_names() == KEYS


def test_the_seeds_keys_are_read(tmp_path: Path) -> None:
    """The [parallelism] section as the seeds write it."""
    path = tmp_path / "c.toml"
    path.write_text("[parallelism]\ndata_parallel_shard_degree = -1\ndata_parallel_replicate_degree = 1\n")
    assert load_config(path) == Config()


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
        ("training.recompute=blocks", '"blocks"', '"block"'),
        ("precision.param=bf16", '"bf16"', '"bfloat16"'),
        ("parallelism.reshard_after_forward=true", "true", '"always"'),
        ("metrics.plot=yes", '"yes"', "true"),
        ("model.heads=5", "5", "4"),
        ("model.dim=7", "7", "8"),
        ("model.kv_heads=3", "3", "2"),
        ("parallelism.data_parallel_replicate_degree=0", "0", "1"),
        ("parallelism.data_parallel_shard_degree=0", "0", "-1"),
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
    ],
)
def test_a_setting_of_checkpoints_without_effect_is_refused(wrong: list[str]) -> None:
    with pytest.raises(ConfigError, match="has no effect with checkpoint"):
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
            "parallelism.data_parallel_shard_degree=3",
            2,
            "parallelism.data_parallel_shard_degree = 3",
            "2 (or -1 for all)",
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
