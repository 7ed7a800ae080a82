"""`fullshard migrate` on configurations in the shapes that people have; and the report is what is in the result."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fullshard.cli import main
from fullshard.migrate import ShardingConfig, read_config, to_toml
from fullshard.migrate.reading import key_names
from fullshard.migrate.settings.conversion import Conversion, convert_file
from fullshard.migrate.settings.table import FORMATS, SUBJECTS
from fullshard.migrate.verdict import DROPPED, EXACT, GOOD
from fullshard.train.config import load_config, value_of
from fullshard.train.elsewhere import take
from tests.harness.configurations import ALL, Configuration


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write(folder: Path, each: Configuration) -> Path:
    for name, text in {each.file: each.text, **each.beside}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return Path(each.file)


def changed(config: ShardingConfig) -> dict[str, Any]:
    """What differs from the defaults."""
    found = {}
    for name in key_names():
        section, _, key = name.partition(".")
        value = getattr(getattr(config, section), key)
        if value != getattr(getattr(ShardingConfig(), section), key):
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def _value(config: ShardingConfig, name: str) -> Any:
    section, _, key = name.partition(".")
    value = getattr(getattr(config, section), key)
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", ALL)
def test_a_configuration_becomes_these_settings(name: str, here: Path) -> None:
    """Each setting that a finding names is in the result with that value, and each that is there has its key; the
    trainer has the settings that it claims, with their values."""
    each = ALL[name]
    path = _write(here, each)
    found = convert_file(path)
    assert found.format.name == each.format
    assert changed(found.config) == each.settings
    assert {f.key for f in found.findings if f.verdict not in GOOD} == {*each.lost}
    assert read_config(tomllib.loads(to_toml(found.config, only_changes=True))) == found.config
    for finding in found.findings:
        for setting, value in found.settings.items():
            if f"{setting} = " in finding.setting:
                assert f"{setting} = {json.dumps(value)}" in finding.setting, finding
                assert _value(found.config, setting) == value, finding
    said = claims(found)
    assert not {*changed(found.config)} - {*said}
    assert {*said} <= {*found.settings}
    taken = take(path)
    config = load_config(None, (), taken.settings)
    for key, value in taken.settings.items():
        assert value_of(config, key) == value


def test_there_are_enough_of_each_library() -> None:
    assert len(ALL) >= 40
    counts = {name: sum(each.format == name for each in ALL.values()) for name in FORMATS}
    assert min(counts.values()) >= 2 and sum(counts.values()) == len(ALL)


def claims(found: Conversion) -> dict[str, list[str]]:
    """By setting: the keys whose findings name it."""
    said: dict[str, list[str]] = {}
    for finding in found.findings:
        for part in finding.setting.split(", ") if finding.setting else ():
            name, _, value = part.partition(" = ")
            if name in key_names():
                said.setdefault(name, []).append(f"{finding.key} = {value}")
    return said


# One run in several dialects. What is not about sharding differs, as it does there.
RUNS: dict[str, dict[str, tuple[str, str]]] = {
    "FSDP2, bfloat16, recomputation, half of the state kept": {
        "Accelerate": (
            "a.yaml",
            "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n"
            "  fsdp_reshard_after_forward: false\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
            "  fsdp_transformer_layer_cls_to_wrap: Block\n  fsdp_activation_checkpointing: true\n"
            "  fsdp_offload_params: true\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
            "  fsdp_cpu_ram_efficient_loading: true\n",
        ),
        "the Trainer": (
            "t.json",
            '{"output_dir": "o", "per_device_train_batch_size": 2, "learning_rate": 1e-5, "bf16": true, "fsdp": true,'
            ' "fsdp_config": {"version": 2, "reshard_after_forward": false, "transformer_layer_cls_to_wrap": ["Block"],'
            ' "activation_checkpointing": true, "cpu_offload": true, "state_dict_type": "SHARDED_STATE_DICT",'
            ' "cpu_ram_efficient_loading": true}}',
        ),
        "axolotl": (
            "x.yml",
            "base_model: m\nsequence_len: 512\nmicro_batch_size: 2\nlearning_rate: 1e-5\nbf16: true\nfsdp_version: 2\n"
            "fsdp_config:\n  reshard_after_forward: false\n  auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
            "  transformer_layer_cls_to_wrap: Block\n  activation_checkpointing: true\n  offload_params: true\n"
            "  state_dict_type: SHARDED_STATE_DICT\n  cpu_ram_efficient_loading: true\n",
        ),
        "TRL": (
            "r.yaml",
            "model_name_or_path: m\nmax_length: 512\npacking: true\noutput_dir: o\nbf16: true\nfsdp: shard_grad_op\n"
            "gradient_checkpointing: true\nfsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: Block\n"
            "  cpu_offload: true\n  state_dict_type: SHARDED_STATE_DICT\n  cpu_ram_efficient_loading: true\n",
        ),
    },
    "FSDP1, float16, full state dicts": {
        "Accelerate": (
            "a.yaml",
            "distributed_type: FSDP\nmixed_precision: fp16\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n"
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_sync_module_states: true\n"
            "  fsdp_use_orig_params: true\n",
        ),
        "the Trainer": (
            "t.json",
            '{"output_dir": "o", "fp16": true, "fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 1,'
            ' "sync_module_states": true, "use_orig_params": true}}',
        ),
        "LLaMA-Factory": (
            "l.yaml",
            "stage: sft\nfinetuning_type: full\ntemplate: x\noutput_dir: o\nfp16: true\nfsdp: full_shard auto_wrap\n"
            "disable_gradient_checkpointing: true\nfsdp_config: {version: 1, sync_module_states: true}\n",
        ),
    },
    "ZeRO-2, bfloat16, the optimizer on the host": {
        "DeepSpeed": (
            "d.json",
            '{"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "bf16": {"enabled": true},'
            ' "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
        ),
        "Accelerate": (
            "a.yaml",
            "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 2\n"
            "  offload_optimizer_device: cpu\n  offload_param_device: none\n",
        ),
        "the Trainer": (
            "t.json",
            '{"output_dir": "o", "bf16": true, "deepspeed": {"bf16": {"enabled": "auto"},'
            ' "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}}',
        ),
    },
    "a copy on each rank, under autocast": {
        "Accelerate": ("a.yaml", "distributed_type: MULTI_GPU\nmixed_precision: bf16\n"),
        "the Trainer": ("t.json", '{"output_dir": "o", "per_device_train_batch_size": 1, "bf16": true}'),
        "axolotl": ("x.yml", "base_model: m\nmicro_batch_size: 1\nsequence_len: 8\nbf16: true\n"),
    },
}


@pytest.mark.parametrize("run", RUNS)
def test_one_run_in_several_dialects_is_one_result(run: str, here: Path) -> None:
    results = {}
    for dialect, (file, text) in RUNS[run].items():
        (here / file).write_text(text)
        results[dialect] = changed(convert_file(here / file).config)
    first = next(iter(results.values()))
    assert first and all(result == first for result in results.values()), results


# The same subject in several libraries: a file with the key, and the key.
SAME: dict[str, list[tuple[str, str, str]]] = {
    "compilation": [
        (
            "a.yaml",
            "distributed_type: FSDP\ndynamo_config: {dynamo_backend: INDUCTOR}\n",
            "dynamo_config.dynamo_backend",
        ),
        ("t.json", '{"output_dir": "o", "fsdp": true, "torch_compile": true}', "torch_compile"),
        ("x.yml", "base_model: m\nmicro_batch_size: 1\ntorch_compile: true\n", "torch_compile"),
        ("t.toml", "[compile]\nenable = true\n[parallelism]\n", "compile.enable"),
        ("t.toml", "[training]\ncompile = true\n[parallelism]\n", "training.compile"),
        ("d.json", '{"zero_optimization": {}, "compile": {"deepcompile": true}}', "compile.deepcompile"),
        ("y.yaml", "max_duration: 1ep\nfsdp_config: {verbose: true}\ncompile_config: {mode: x}\n", "compile_config"),
    ],
    "float8 gathers": [
        (
            "a.yaml",
            "distributed_type: FSDP\nfp8_config: {enable_fsdp_float8_all_gather: true}\n",
            "fp8_config.enable_fsdp_float8_all_gather",
        ),
        (
            "t.toml",
            "[float8]\nenable_fsdp_float8_all_gather = true\n[parallelism]\n",
            "float8.enable_fsdp_float8_all_gather",
        ),
        (
            "x.yml",
            "base_model: m\nmicro_batch_size: 1\nfp8_enable_fsdp_float8_all_gather: true\n",
            "fp8_enable_fsdp_float8_all_gather",
        ),
        ("c.yaml", "fsdp: {te_shard_fp8_weight: true}\n", "fsdp.te_shard_fp8_weight"),
    ],
    "recomputation": [
        (
            "a.yaml",
            "distributed_type: FSDP\nfsdp_config: {fsdp_activation_checkpointing: true}\n",
            "fsdp_config.fsdp_activation_checkpointing",
        ),
        ("c.yaml", "fsdp: {activation_checkpointing: true}\n", "fsdp.activation_checkpointing"),
        ("t.toml", '[activation_checkpoint]\nmode = "full"\n', "activation_checkpoint.mode"),
        ("t.json", '{"output_dir": "o", "fsdp": true, "gradient_checkpointing": true}', "gradient_checkpointing"),
    ],
    "tensor parallelism": [
        (
            "a.yaml",
            "distributed_type: FSDP\nparallelism_config: {parallelism_config_tp_size: 2}\n",
            "parallelism_config.parallelism_config_tp_size",
        ),
        ("x.yml", "base_model: m\nmicro_batch_size: 1\ntensor_parallel_size: 2\n", "tensor_parallel_size"),
        ("t.toml", "[parallelism]\ntensor_parallel_degree = 2\n", "parallelism.tensor_parallel_degree"),
        (
            "d.json",
            '{"zero_optimization": {}, "tensor_parallel": {"autotp_size": 2}}',
            "tensor_parallel.autotp_size",
        ),
    ],
    "clipping of an engine": [
        ("d.json", '{"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}', "gradient_clipping"),
        (
            "a.yaml",
            "distributed_type: DEEPSPEED\ndeepspeed_config: {gradient_clipping: 0.5}\n",
            "deepspeed_config.gradient_clipping",
        ),
        (
            "t.json",
            '{"output_dir": "o", "deepspeed": {"gradient_clipping": 0.5, "zero_optimization": {"stage": 2}}}',
            "deepspeed.gradient_clipping",
        ),
    ],
}


@pytest.mark.parametrize("subject", SAME)
def test_a_subject_has_one_verdict_whatever_names_it(subject: str, here: Path) -> None:
    verdicts = {}
    for number, (file, text, key) in enumerate(SAME[subject]):
        (here / f"{number}{file}").write_text(text)
        found = convert_file(here / f"{number}{file}")
        verdicts[f"{number} {key}"] = next(f.verdict for f in found.findings if f.key == key)
    assert len({*verdicts.values()}) == 1, verdicts


def test_whole_files_name_what_is_not_about_sharding_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(here, ALL["axolotl 0.4: words and prefixes"])
    assert main(["migrate", "x.yml", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    said = [each for each in findings if "not about sharding" in each["reason"]]
    assert len(said) == 1 and said[0]["verdict"] == DROPPED
    assert {"base_model", "adapter", "learning_rate", "micro_batch_size"} <= {*said[0]["key"].split(", ")}


def test_comments_and_unknown_outermost_keys_of_deepspeed_are_a_note(here: Path) -> None:
    found = convert_file(_write(here, ALL["deepspeed: ZeRO-2 with offload, and comments"]))
    said = next(each for each in found.findings if "not about sharding" in each.reason)
    assert {*said.key.split(", ")} == {"_comment", "zero_optimization._why", "my_own_key"}


def test_a_key_that_another_one_decides_is_not_called_exact(here: Path) -> None:
    text = "distributed_type: FSDP\nfsdp_config:\n  fsdp_sync_module_states: true\n"
    text += "  fsdp_cpu_ram_efficient_loading: true\n"
    (here / "a.yaml").write_text(text)
    found = convert_file(here / "a.yaml")
    said = {each.key.rpartition("fsdp_")[2]: each for each in found.findings}
    assert said["sync_module_states"].verdict == DROPPED and not said["sync_module_states"].setting
    assert "fsdp_cpu_ram_efficient_loading decides initialisation.source" in said["sync_module_states"].reason
    assert said["cpu_ram_efficient_loading"].verdict != EXACT
    assert found.config.initialisation.source == "auto"


def test_the_lines_to_add_for_deepspeed_s_optimizer(here: Path) -> None:
    found = convert_file(_write(here, ALL["deepspeed: ZeRO-1 in float16"]))
    said = {each.key: each.reason for each in found.findings}
    line = said["optimizer"].rpartition("in your program: ")[2]
    assert line == "torch.optim.AdamW(model.parameters(), lr=0.001, betas=(0.8, 0.999), eps=1e-08, weight_decay=3e-07)"
    assert "torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: " in said["scheduler"]


def test_what_the_trainer_fills_in_is_not_in_the_lines(here: Path) -> None:
    path = _write(here, ALL["deepspeed: for the Trainer, compiled, a part of the optimizer its own"])
    said = next(each.reason for each in convert_file(path).findings if each.key == "optimizer")
    line = "torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=1e-08), with lr and weight_decay of the outer"
    assert line in said
    assert {k: v for k, v in take(path).settings.items() if k.startswith("optimizer.")} == {
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.95,
        "optimizer.eps": 1e-8,
    }


# Of DeepSpeed's documentation: the rate of its n-th update, counted from 0, as a part of the highest one.
SCHEDULES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "WarmupLR, logarithmic": ({"warmup_max_lr": 1.0, "warmup_num_steps": 4}, [0, 0, 0.5, 0.79248, 1, 1, 1]),
    "WarmupLR, linear": (
        {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"},
        [0, 0, 0.25, 0.5, 0.75, 1, 1],
    ),
    "WarmupDecayLR, linear": (
        {"warmup_max_lr": 1.0, "warmup_num_steps": 2, "total_num_steps": 6, "warmup_type": "linear"},
        [0, 0, 0.5, 1, 0.75, 0.5, 0.25, 0],
    ),
    "WarmupCosineLR, linear": (
        {"warmup_num_steps": 2, "total_num_steps": 6, "cos_min_ratio": 0.0, "warmup_type": "linear"},
        [0, 0, 0.5, 0.853553, 0.5, 0.146447, 0],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedule_to_add_is_deepspeed_s(name: str) -> None:
    import math

    from fullshard.migrate.settings.optimizers import built

    params, expected = SCHEDULES[name]
    line = built("scheduler", {"type": name.partition(",")[0], "params": params}).line
    text = line[line.index("lambda n: ") :].partition(", over an optimizer")[0].removesuffix(")")
    factor = eval(text, {"math": math})
    assert [round(factor(n), 5) for n in range(len(expected))] == [round(value, 5) for value in expected]


def test_sections_have_no_setting_without_a_reader() -> None:
    """Every setting of the table is a key of `ShardingConfig` or of the trainer."""
    from fullshard.train.config import key_names as of_the_trainer

    valid = {*key_names(), *(f"train.{key}" for key in of_the_trainer())}
    used = {name for subject in SUBJECTS.values() for case in subject.cases for name in case.settings}
    assert used <= valid and len(fields(ShardingConfig)) == 9
