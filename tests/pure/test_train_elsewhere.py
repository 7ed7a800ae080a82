"""`fullshard train --from`: what the trainer takes of other libraries' configurations, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fullshard.cli import main
from fullshard.keys import show
from fullshard.migrate import read_config
from fullshard.migrate.config import ShardingConfig
from fullshard.migrate.verdict import DROPPED, EQUIVALENT, EXACT, LOSSY
from fullshard.train.config import Config, load_config
from fullshard.train.elsewhere import take
from tests.harness.elsewhere import FILES

AC = "sharding.activation_checkpointing"
# Settings of prepare_fully_shard, the verdicts on them, and the keys of the trainer.
ROWS: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
    "units": ({"wrap": "children"}, [EQUIVALENT], {}),
    "ignored parameters": ({"wrap": {"ignored": ["head"]}}, [EQUIVALENT, LOSSY], {}),
    "degrees": (
        {"dp_shard_size": 4, "dp_replicate_size": 2},
        [EXACT, EXACT],
        {"sharding.data_parallel_shard_degree": 4, "sharding.data_parallel_replicate_degree": 2},
    ),
    "a copy on each process": (
        {"sharding": "NO_SHARD"},
        [EXACT] * 3,
        {
            "sharding.data_parallel_shard_degree": 1,
            "sharding.data_parallel_replicate_degree": -1,
            "sharding.reshard_after_forward": False,
        },
    ),
    "reshard always": ({"reshard_after_forward": True}, [EXACT], {"sharding.reshard_after_forward": True}),
    "reshard never": ({"sharding": "SHARD_GRAD_OP"}, [EXACT], {"sharding.reshard_after_forward": False}),
    "reshard to a number": ({"reshard_after_forward": 8}, [EXACT], {"sharding.reshard_after_forward": 8}),
    "tensor parallelism": (
        {"parallelism": {"tensor_parallel_degree": 2, "enable_sequence_parallel": False}},
        [EXACT, EXACT],
        {
            "sharding.parallelism.tensor_parallel_degree": 2,
            "sharding.parallelism.enable_sequence_parallel": False,
        },
    ),
    "loss parallelism": (
        {"parallelism": {"tensor_parallel_degree": 2, "disable_loss_parallel": False, "styles": {"up": "column"}}},
        [EXACT, EQUIVALENT, LOSSY],
        {"sharding.parallelism.tensor_parallel_degree": 2},
    ),
    "context parallelism": (
        {"parallelism": {"context_parallel_degree": 2, "context_parallel_variant": "ring"}},
        [EXACT, EXACT],
        {
            "sharding.parallelism.context_parallel_degree": 2,
            "sharding.parallelism.context_parallel_variant": "ring",
        },
    ),
    "pipelines": (
        {
            "parallelism": {
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_schedule": "Interleaved1F1B",
                "pipeline_parallel_microbatch_size": 2,
            }
        },
        [EXACT] * 3,
        {
            "sharding.parallelism.pipeline_parallel_degree": 2,
            "sharding.parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
            "training.micro_batch": 2,
        },
    ),
    "pipelines of another model": (
        {
            "parallelism": {
                "pipeline_parallel_degree": 2,
                "pipeline_parallel_num_microbatches": 4,
                "pipeline_parallel_stages_per_rank": 1,
                "module_fqns_per_model_part": [["embed"], ["head"]],
            }
        },
        [EXACT, LOSSY, EXACT, LOSSY],
        {
            "sharding.parallelism.pipeline_parallel_degree": 2,
            "sharding.parallelism.pipeline_parallel_stages_per_rank": 1,
        },
    ),
    "experts, which the trainer's model has by a setting of its own": (
        {"parallelism": {"expert_parallel_degree": 2, "expert_tensor_parallel_degree": 2}},
        [LOSSY] * 2,
        {},
    ),
    "offload": (
        {"cpu_offload": True, "pin_memory": False},
        [EXACT, EXACT],
        {"sharding.cpu_offload": True, "sharding.pin_memory": False},
    ),
    "PURE": (
        {"precision": "PURE"},
        [EXACT, EXACT],
        {"sharding.precision.param": "bfloat16", "sharding.precision.reduce": "bfloat16"},
    ),
    "reduction in float64": ({"reduce_dtype": "float64"}, [EXACT], {"sharding.precision.reduce": "float64"}),
    "float16": (
        {"precision": {"mode": "DEFAULT", "dtype": "float16"}},
        [LOSSY, EXACT],
        {"sharding.precision.reduce": "float32"},
    ),
    "output": ({"output_dtype": "float32"}, [EXACT], {"sharding.precision.output": "float32"}),
    "inputs": ({"cast_forward_inputs": False}, [DROPPED], {}),
    "masters in float32": ({"precision": {"master": "float32"}}, [DROPPED], {}),
    "masters in bfloat16": ({"precision": {"master": "bfloat16"}}, [LOSSY], {}),
    "norms in float32": (
        {"precision": {"mode": "DEFAULT", "keep_float32": ["*Norm"]}},
        [EXACT, EXACT, LOSSY],
        {"sharding.precision.param": "bfloat16", "sharding.precision.reduce": "float32"},
    ),
    "nothing in float32": ({"precision": {"keep_float32": []}}, [DROPPED], {}),
    "values": ({"initialisation": "mixed"}, [DROPPED], {}),
    "pretrained": ({"initialisation": {"path": "x"}}, [LOSSY, LOSSY], {}),
    "seed": ({"initialisation": {"seed": 3}}, [EXACT], {"training.seed": 3}),
    "recomputation": (
        {"activation_checkpointing": {"at": "units", "every": 2, "save": ["aten.mm"]}},
        [EQUIVALENT, EXACT, EXACT],
        {f"{AC}.at": "units", f"{AC}.every": 2, f"{AC}.save": ("aten.mm",)},
    ),
    "activations on the host": (
        {"activation_checkpointing": {"at": "units", "recompute": False, "offload": True}},
        [EQUIVALENT, EXACT, EXACT],
        {f"{AC}.at": "units", f"{AC}.recompute": False, f"{AC}.offload": True},
    ),
    "micro-batches": (
        {"micro_batches": {"size": "auto", "reduce": "each"}},
        [EXACT, EXACT],
        {"training.micro_batch": "auto", "training.accumulate": "reduce"},
    ),
    "state": ({"state_dict": {"kind": "full", "rank0_only": True}}, [EQUIVALENT], {}),
    "overrides": ({"override": {"layers.0": {"cpu_offload": True}}}, [LOSSY], {}),
    "compiled blocks": ({"compile": True}, [LOSSY], {}),
    "nothing": ({}, [], {}),
}


@pytest.mark.parametrize("name", ROWS)
def test_settings_become_keys_of_the_trainer(name: str, tmp_path: Path) -> None:
    from fullshard.migrate import to_toml

    keys, verdicts, settings = ROWS[name]
    path = tmp_path / "x.fullshard.toml"
    path.write_text(to_toml(read_config(keys), only_changes=True))
    taken = take(path)
    assert [each.verdict for each in taken.findings] == verdicts
    assert taken.settings == settings
    load_config(None, (), taken.settings)


def test_every_setting_has_a_finding() -> None:
    """A key that `prepare_fully_shard` gets later has to be judged here too."""
    from dataclasses import fields

    given = [read_config(keys) for keys, _, _ in ROWS.values()]
    given.append(read_config({"wrap": ["Block"], "precision": {"param_dtype": "bfloat16"}}))
    never = {"wrap": {"min_params", "function", "plan", "group_ends", "ties"}, "state_dict": {"offload_to_cpu"}}
    never |= {"initialisation": {"allow_missing", "allow_unexpected"}, "activation_checkpointing": {"classes"}}
    for section in fields(ShardingConfig)[:-1]:
        default = getattr(ShardingConfig(), section.name)
        for key in fields(default):
            changed = any(getattr(getattr(c, section.name), key.name) != getattr(default, key.name) for c in given)
            assert changed != (key.name in never.get(section.name, ())), f"{section.name}.{key.name}"


# What differs from the trainer's defaults.
TAKEN: dict[str, dict[str, Any]] = {
    "accelerate": {
        "sharding.reshard_after_forward": False,
        "sharding.precision.param": "bfloat16",
        "sharding.precision.reduce": "bfloat16",
        f"{AC}.at": "units",
    },
    "hf": {f"{AC}.at": "units"},
    "composer": {
        "sharding.precision.param": "bfloat16",
        "sharding.precision.reduce": "float32",
        f"{AC}.at": "units",
        "training.micro_batch": 2,
    },
    "foundry": {
        "sharding.precision.param": "bfloat16",
        "sharding.precision.reduce": "bfloat16",
        "training.micro_batch": 2,
        "optimizer.lr": 6e-4,
    },
    "torchtitan": {
        "sharding.precision.param": "bfloat16",
        "sharding.precision.reduce": "float32",
        f"{AC}.at": "units",
        f"{AC}.every": 2,
        "optimizer.lr": 8e-4,
    },
    "deepspeed": {
        "sharding.reshard_after_forward": False,
        "sharding.precision.param": "bfloat16",
        "sharding.precision.reduce": "bfloat16",
        "training.micro_batch": 2,
    },
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_the_trainer_takes_every_format(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--print-config shows the verdicts as comments above the configuration that a run would have."""
    file, text = FILES[name]
    (here / file).write_text(text)
    assert main(["train", "--from", file, "--print-config", "--set", "training.device=cpu"]) == 0
    said = capsys.readouterr()
    assert said.err == "" and f"# {file}:" in said.out and " exact, " in said.out
    (here / "own.toml").write_text(said.out)
    settings = [f"{key}={show(value)}" for key, value in TAKEN[name].items()]
    assert load_config(here / "own.toml") == load_config(None, ["training.device=cpu", *settings])
    assert {path.name for path in here.iterdir()} == {"own.toml", file}


def test_the_file_of_the_trainer_and_set_go_beside_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "t.toml").write_text("[parallelism]\ndata_parallel_shard_degree = 2\n")
    (here / "own.toml").write_text('[training]\nsteps = 7\n[sharding.precision]\nparam = "bfloat16"\n')
    command = ["train", "own.toml", "--from", "t.toml", "--print-config"]
    assert main([*command, "--set", "sharding.precision.reduce=bfloat16"]) == 0
    (here / "all.toml").write_text(capsys.readouterr().out)
    config = load_config(here / "all.toml")
    assert (config.training.steps, config.sharding.sharding.data_parallel_shard_degree) == (7, 2)
    assert config.sharding.precision.dtypes[:2] == ("bfloat16", "bfloat16")
    (here / "own.toml").write_text('[sharding.precision]\nreduce = "float64"\n')
    assert main(command) == 2
    assert (
        'sharding.precision.reduce = "float64": own.toml and --from contradict each other, where it is "float32"'
        in (capsys.readouterr().err)
    )


ENGINE = """{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2,
 "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.8, 0.99], "weight_decay": 0.05}},
 "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-5, "warmup_num_steps": 50,
  "warmup_type": "linear"}}}"""


def test_the_trainer_takes_the_optimizer_of_deepspeed_s_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "ds.json").write_text(ENGINE)
    assert main(["train", "--from", "ds.json", "--print-config"]) == 0
    (here / "own.toml").write_text(capsys.readouterr().out)
    keys = load_config(here / "own.toml").optimizer
    assert (keys.lr, keys.beta1, keys.beta2, keys.weight_decay, keys.eps) == (2e-5, 0.8, 0.99, 0.05, 1e-8)
    assert (keys.warmup_steps, keys.min_lr_ratio) == (50, 1.0)
    # What the trainer does in another way is lost, and is said.
    (here / "ds.json").write_text(ENGINE.replace(',\n  "warmup_type": "linear"', ""))
    assert main(["train", "--from", "ds.json", "--print-config"]) == 1
    said = capsys.readouterr()
    assert "its warm-up is linear" in said.out and "--accept-lossy scheduler" in said.err
    (here / "ds.json").write_text(ENGINE.replace('"type": "AdamW"', '"type": "Lion"'))
    assert main(["train", "--from", "ds.json", "--print-config"]) == 1
    said = capsys.readouterr()
    assert "its optimizer is AdamW" in said.out and "--accept-lossy optimizer" in said.err


def test_the_trainer_takes_what_a_loop_sets(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.yaml").write_text(
        "output_dir: out\nfsdp: full_shard\nlearning_rate: 5e-6\nmax_grad_norm: 0.3\nwarmup_steps: 7\n"
        "logging_steps: 1\n"
    )
    assert main(["train", "--from", "a.yaml", "--print-config"]) == 0
    said = capsys.readouterr().out
    assert "# a.yaml: dropped: output_dir, logging_steps: not about sharding" in said
    (here / "own.toml").write_text(said)
    config = load_config(here / "own.toml")
    assert (config.optimizer.lr, config.training.clip_norm, config.optimizer.warmup_steps) == (5e-6, 0.3, 7)


def test_the_trainer_does_what_deepspeed_s_engine_does(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "ds.json").write_text(
        '{"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5, "gradient_accumulation_steps": 4, '
        '"train_micro_batch_size_per_gpu": 2, "train_batch_size": 16}'
    )
    assert main(["train", "--from", "ds.json", "--print-config"]) == 0
    (here / "own.toml").write_text(capsys.readouterr().out)
    keys = load_config(here / "own.toml").training
    assert (keys.clip_norm, keys.global_batch, keys.micro_batch) == (0.5, 16, 2)
    # Without the whole batch the number of processes decides, which no file knows.
    (here / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 4}')
    assert main(["train", "--from", "ds.json", "--print-config"]) == 1
    assert "--accept-lossy gradient_accumulation_steps" in capsys.readouterr().err


LOSSY_FILE = '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3, "zero_quantized_weights": true}}'
LOST = "zero_optimization.zero_quantized_weights"


def test_what_is_lost_has_to_be_accepted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "ds.json").write_text(LOSSY_FILE)
    assert main(["train", "--from", "ds.json"]) == 1
    said = capsys.readouterr()
    assert f"lossy: {LOST} = true" in said.out
    assert said.err == f"fullshard: ds.json: lost, or to be changed manually; --accept-lossy {LOST}\n"
    assert [path.name for path in here.iterdir()] == ["ds.json"]
    assert main(["train", "--from", "ds.json", "--accept-lossy", LOST, "--print-config"]) == 0
    assert "(accepted)" in capsys.readouterr().out


def test_what_the_trainer_alone_loses_has_to_be_accepted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "acc.yaml").write_text("distributed_type: FSDP\nmixed_precision: fp16\nfsdp_config: {fsdp_version: 2}\n")
    command = ["train", "--from", "acc.yaml", "--print-config"]
    assert main(command) == 1
    assert "--accept-lossy precision.param --accept-lossy precision.reduce" in capsys.readouterr().err
    assert main([*command, "--accept-lossy", "precision.param", "--accept-lossy", "precision.reduce"]) == 0
    (here / "own.toml").write_text(capsys.readouterr().out)
    assert load_config(here / "own.toml").sharding.precision == Config().sharding.precision


BAD = {
    "an unknown key": ("a.yaml", "distributed_type: FSDP\nnum_procs: 3\n", (), "a.yaml:2: num_procs = 3"),
    "no configuration": ("a.yaml", "colour: red\n", (), "expected a configuration of one of these"),
    "a tag of Python": ("a.yaml", "fsdp_config: !!python/object/apply:os.system ['x']\n", (), "a.yaml:1:14"),
    "an accepted key that is not lost": (
        "ds.json",
        LOSSY_FILE,
        ("--accept-lossy", "stage"),
        f"--accept-lossy stage: expected a key with the verdict lossy or unsupported; there are {LOST}",
    ),
    "another run's configuration": ("a.yaml", "x: 1\n", ("--resume", "runs/x"), "leave out --from"),
    "degrees that do not fit": (
        "t.toml",
        "[parallelism]\ndata_parallel_shard_degree = 3\n",
        ("--nproc", "2"),
        "data_parallel_shard_degree = 3",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_nothing_starts(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, text, more, part = BAD[name]
    (here / file).write_text(text)
    assert main(["train", "--from", file, *more]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("fullshard: ") and said.err.count("\n") == 1 and part in said.err
    assert [path.name for path in here.iterdir()] == [file]


def test_accepting_goes_with_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--accept-lossy", "x"]) == 2
    assert "--accept-lossy x: goes with --from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["data_parallel_shard_degree=-1", "data_parallel_replicate_degree=-1"],
            "expected one of the two degrees, found -1 for both",
        ),
        (["data_parallel_replicate_degree=0"], "nearest valid: -1"),
        (["reshard_after_forward=1"], "expected at least 2"),
        (["reshard_after_forward=3"], "expected a factor of the 4 ranks that share a copy; nearest valid: 2"),
        (
            ["data_parallel_shard_degree=3", "data_parallel_replicate_degree=-1"],
            "must divide the 4 ranks; nearest valid: 2",
        ),
    ],
)
def test_degrees_that_do_not_fit(settings: list[str], said: str) -> None:
    with pytest.raises(ValueError) as raised:
        load_config(None, [f"sharding.{each}" for each in settings]).check_world(4)
    assert said in str(raised.value)


def test_copies_that_are_left() -> None:
    config = load_config(None, [], {"sharding.data_parallel_shard_degree": 2} | COPIES)
    config.check_world(4)
    assert config.sharding.degrees(4) == (2, 2)


COPIES = {"sharding.data_parallel_replicate_degree": -1}


@pytest.mark.parametrize("key", ["every=2", 'save=["aten.mm"]'])
def test_recomputation_of_nothing_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match='has no effect with at = "none"; nearest valid: at = "units"'):
        load_config(None, [f"{AC}.{key}"])
