"""The tables of `fullshard migrate` hold against the libraries: every key that their own classes have, and what they
make of a file, where they install; otherwise a dated list of names."""

from __future__ import annotations

import ast
import importlib.util
import os
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fullshard.migrate.settings.conversion import convert, convert_file
from fullshard.migrate.settings.entries import _is_misspelled
from fullshard.migrate.settings.table import FORMATS, keys_of
from tests.harness.configurations import ALL, DDP

# DeepSpeed's configuration classes in 0.7.7, 0.9.5, 0.12.6, 0.14.5, 0.16.9, 0.17.6, 0.18.9 and 0.19.8, read on
# 2026-11-26: by the names of their fields, and the names in JSON where these differ.
STAGES = """stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint
zenflow sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload prefetch_bucket_size
stage3_prefetch_bucket_size param_persistence_threshold stage3_param_persistence_threshold model_persistence_threshold
stage3_model_persistence_threshold max_live_parameters stage3_max_live_parameters max_reuse_distance
stage3_max_reuse_distance gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save
module_granularity_threshold stage3_module_granularity_threshold use_all_reduce_for_fetch_params
stage3_use_all_reduce_for_fetch_params allgather_sequential stage3_allgather_sequential
stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients
parameter_alignment zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
zero_quantized_gradients zeropp_loco_param mics_shard_size mics_hierarchical_params_gather memory_efficient_linear
pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks
save_muon_momentum_buffer_in_memory leaf_module""".split()
OFFLOAD = """device nvme_path buffer_count buffer_size max_in_cpu pin_memory pipeline_read pipeline_write fast_init
ratio super_offload cpuadam_cores_perc""".split()
OUTERMOST = """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler
zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print communication_data_type prescale_gradients
seq_parallel_communication_data_type gradient_predivide_factor gradient_allreduce_op disable_allgather dump_state
disable_python_gc vocabulary_size wall_clock_breakdown memory_breakdown gradient_clipping sparse_gradients
dataloader_drop_last use_data_before_expert_parallelism log_level managed_gradient_accumulation fp32_allreduce
tensorboard wandb csv_monitor comet comms_logger flops_profiler autotuning data_efficiency curriculum_learning
compression_training progressive_layer_drop eigenvalue sparse_attention nebula hybrid_engine checkpoint aio compile
elasticity amp timers weight_quantization pipeline tensor_parallel expert_parallel graph_harvesting
gradient_accumulation_dtype""".split()
HALF = """fp16.enabled fp16.auto_cast fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis
fp16.consecutive_hysteresis fp16.min_loss_scale fp16.fp16_master_weights_and_grads bf16.enabled bfloat16.enabled
bf16.immediate_grad_update bf16.check_grad_overflow bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
torch_autocast.enabled torch_autocast.dtype torch_autocast.lower_precision_safe_modules data_types.grad_accum_dtype
data_types.param_dtype data_types.buffer_dtype data_types.keep_in_fp32_modules""".split()
# axolotl's FSDPConfig in 0.19.0, Composer's FSDPConfig in 0.32.1; read on 2026-11-26.
AXOLOTL = """fsdp_version version activation_checkpointing offload_params sync_module_states cpu_ram_efficient_loading
cpu_offload_pin_memory use_orig_params state_dict_type final_state_dict_type auto_wrap_policy
transformer_layer_cls_to_wrap min_num_params reshard_after_forward mixed_precision_policy""".split()
COMPOSER = """activation_checkpointing activation_checkpointing_reentrant activation_cpu_offload auto_wrap
te_checkpoint_wrapper te_shard_fp8_weight backward_prefetch backward_prefetch_limit cpu_offload
data_parallel_shard_degree data_parallel_replicate_degree forward_prefetch forward_prefetch_limit ignored_modules
keep_low_precision_grads limit_all_gathers load_monolith_rank0_only load_planner mixed_precision process_group
save_planner sharded_ckpt_prefix_dir sharding_strategy state_dict_type sync_module_states use_orig_params verbose
reshard_after_forward device_mesh""".split()
# Names that are like known ones and are others; of axolotl 0.19.0, LLaMA-Factory 0.9.5, TRL 1.16.0, transformers.
OTHERS = """adam_beta3 adam_epsilon2 fp8_backend fp8_config per_device_eval_batch_size per_gpu_train_batch_size
learning_rate_decay max_grad_value warmup_ratio gradient_checkpointing_policy bf16_full_eval fp16_full_eval
use_dora lora_r tf32 dp_world_size eval_batch_size sp_size fsdp_plugin optim optim_args seed data_seed""".split()


def test_every_key_of_deepspeed_is_known() -> None:
    known = keys_of(FORMATS["deepspeed"])
    names = [*OUTERMOST, *HALF, *(f"zero_optimization.{name}" for name in STAGES)]
    names += [f"zero_optimization.{part}.{name}" for part in ("offload_param", "offload_optimizer") for name in OFFLOAD]
    lacking = [name for name in names if name not in known and not any(key.startswith(f"{name}.") for key in known)]
    assert not lacking


@pytest.mark.parametrize(
    ("format", "prefix", "names"),
    [("axolotl", "fsdp_config.", AXOLOTL), ("composer", "fsdp.", COMPOSER), ("foundry", "fsdp_config.", COMPOSER)],
)
def test_every_key_of_a_table_is_known(format: str, prefix: str, names: list[str]) -> None:
    known = keys_of(FORMATS[format])
    found = [n for n in names if f"{prefix}{n}" in known or any(k.startswith(f"{prefix}{n}.") for k in known)]
    assert [*dict.fromkeys(found)] == names


@pytest.mark.parametrize("format", ["hf", "axolotl", "llamafactory", "trl", "deepspeed"])
def test_other_names_are_no_misspellings(format: str) -> None:
    known = keys_of(FORMATS[format])
    assert not [(n, key) for n in OTHERS for key in known if n not in known and _is_misspelled(n, key)]
    assert _is_misspelled("gradient_cliping", "gradient_clipping") and _is_misspelled("fsdp_confg", "fsdp_config")


def _source_fields(module: str, file: str) -> dict[str, list[str]]:
    """The annotated names of each class in a file of an installed package, which is not imported."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        pytest.skip(f"{module} is not installed")
    tree = ast.parse((Path(spec.origin).parent / file).read_text())
    return {
        each.name: [s.target.id for s in each.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
        for each in ast.walk(tree)
        if isinstance(each, ast.ClassDef)
    }


def test_every_key_of_torchtitan_s_parallelism_is_known() -> None:
    found = _source_fields("torchtitan", "config/configs.py")
    known = keys_of(FORMATS["torchtitan"])
    names = [f"parallelism.{name}" for name in found["ParallelismConfig"]]
    names += [f"compile.{name}" for name in found["CompileConfig"]]
    names += [f"training.{n}" for n in found["TrainingConfig"] if "precision" in n or "offload" in n or n == "dtype"]
    assert not [name for name in names if name not in known]


def test_every_key_of_accelerate_is_known() -> None:
    """Fields of the plugins and of the file, but for objects that only a program can give."""
    found = _source_fields("accelerate", "utils/dataclasses.py")
    known = keys_of(FORMATS["accelerate"])
    spelled = {"transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap", "fsdp_version": "version"}
    objects = {"mixed_precision_policy", "state_dict_config", "optim_state_dict_config", "param_init_fn"}
    plugin = [spelled.get(n, n) for n in found["FullyShardedDataParallelPlugin"] if n not in objects]
    zero = {"hf_ds_config", "enable_msamp", "msamp_opt_level"}
    names = [f"fsdp_config.fsdp_{name}" for name in plugin]
    names += [f"deepspeed_config.{name}" for name in found["DeepSpeedPlugin"] if name not in zero]
    names += [f"parallelism_config.parallelism_config_{name}" for name in _parallelism()]
    names += [f"megatron_lm_config.megatron_lm_{name}" for name in found["MegatronLMPlugin"]]
    file = _source_fields("accelerate", "commands/config/config_args.py")
    names += [*file["BaseConfig"], *file["ClusterConfig"]]
    assert not [n for n in names if n not in known and not any(key.startswith(f"{n}.") for key in known)]


def _parallelism() -> list[str]:
    return _source_fields("accelerate", "parallelism_config.py")["ParallelismConfig"]


def test_every_option_of_accelerate_s_launcher_is_known() -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    options = {each.dest for each in launch.launch_command_parser()._actions}
    names = {f"fsdp_config.{name}" for name in options if name.startswith("fsdp_")}
    names |= {f"parallelism_config.{name}" for name in options if name.startswith("parallelism_config_")}
    assert not names - {*keys_of(FORMATS["accelerate"])}


def _plugin(path: Path) -> Any:
    """What Accelerate's launcher and plugin make of a file."""
    import torch
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import dataclasses
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    with (
        mock.patch.dict(os.environ),
        mock.patch.object(dataclasses, "is_cuda_available", lambda: True),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
    ):
        number = [] if "num_processes" in path.read_text() else ["--num_processes", "2"]
        arguments = launch_command_parser().parse_args(["--config_file", str(path), *number, "program.py"])
        arguments, _, _ = _validate_launch_command(arguments)
        if arguments.use_deepspeed:
            arguments.deepspeed_fields_from_accelerate_config = ""
            os.environ |= prepare_deepspeed_cmd_env(arguments)[1]
            return dataclasses.DeepSpeedPlugin()
        os.environ |= prepare_multi_gpu_env(arguments)
        return dataclasses.FullyShardedDataParallelPlugin()


# But for those that have no plugin of sharding, or name another file.
ACCELERATE = [
    name
    for name, each in ALL.items()
    if each.format == "accelerate" and not any(part in each.text for part in ("MULTI_GPU", ".json", "fp8"))
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ACCELERATE)
def test_a_file_becomes_what_accelerate_makes_of_it(name: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    each = ALL[name]
    (tmp_path / each.file).write_text(each.text.replace("num_machines: 4", "num_machines: 4\nmachine_rank: 0"))
    config = convert_file(tmp_path / each.file).config
    made = _plugin(tmp_path / each.file)
    if "DEEPSPEED" in each.text:
        zero = convert({**made.deepspeed_config, "steps_per_print": 1}, "d.json", ".json", "", "deepspeed").config
        assert zero.sharding == config.sharding and zero.wrap == config.wrap
        return
    if made.fsdp_version == 2:
        assert (config.sharding.reshard_after_forward is not False) == made.reshard_after_forward
    elif "fsdp_reshard_after_forward" not in each.text:  # which its launcher does not hand on in version 1
        kept = made.sharding_strategy.name.endswith(("SHARD_GRAD_OP", "ZERO2"))
        assert (config.sharding.reshard_after_forward is False) == kept
    offload = made.cpu_offload
    assert config.sharding.cpu_offload == (
        getattr(offload, "offload_params", None) or "CPU" in type(offload).__name__ and made.fsdp_version == 2
    )
    assert config.state_dict.kind == made.state_dict_type.name.removesuffix("_STATE_DICT").lower()
    assert (config.activation_checkpointing.at != "none") == made.activation_checkpointing
    assert (config.wrap.by == "none") == (made.auto_wrap_policy is None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, each in ALL.items() if each.format == "hf" and "fsdp" in each.text])
def test_a_file_becomes_what_the_trainer_makes_of_it(name: str, tmp_path: Path) -> None:
    training_args = pytest.importorskip("transformers.training_args")
    import json

    import yaml

    each = ALL[name]
    (tmp_path / each.file).write_text(each.text)
    config = convert_file(tmp_path / each.file).config
    table = json.loads(each.text) if each.file.endswith("json") else yaml.safe_load(each.text)
    if "fsdp" not in table:
        table = {"fsdp": True, "fsdp_config": {**table, "version": 1}}
    block = dict(table.get("fsdp_config") or {})
    if "fsdp_transformer_layer_cls_to_wrap" in table:  # an argument up to transformers 4
        block["transformer_layer_cls_to_wrap"] = [table["fsdp_transformer_layer_cls_to_wrap"]]
    made = training_args.TrainingArguments(
        output_dir="x", fsdp=table["fsdp"], fsdp_config=block, use_cpu=True
    ).fsdp_plugin_args
    assert (config.sharding.reshard_after_forward is False) == (
        made["reshard_after_forward"] in (False, "shard_grad_op")
    )
    assert config.sharding.cpu_offload == made.get("cpu_offload", False)
    assert config.state_dict.kind == made["state_dict_type"].removesuffix("_STATE_DICT").lower()
    classes = made.get("transformer_cls_names_to_wrap")
    assert list(config.wrap.classes) == (classes.split(",") if classes else [])
    if "gradient_checkpointing" not in each.text:
        assert (config.activation_checkpointing.at != "none") == made.get("activation_checkpointing", False)


@pytest.mark.slow
def test_no_argument_of_the_trainer_is_taken_for_a_misspelling() -> None:
    training_args = pytest.importorskip("transformers.training_args")
    known = keys_of(FORMATS["hf"])
    names = [key.name for key in fields(training_args.TrainingArguments)]
    assert not [(n, key) for n in names for key in known if n not in known and _is_misspelled(n, key)]
    others = {name: "x" for name in names if name not in known and name != "parallelism_config"}
    found = convert({**others, "fsdp": True}, "t.json", ".json", "", "hf")
    said = next(each for each in found.findings if "not about sharding" in each.reason)
    assert {*said.key.split(", ")} == {*others}


def test_what_nothing_shards_is_ddp() -> None:
    table = {"output_dir": "o", "num_train_epochs": 1}
    settings = convert(table, "t.json", ".json", "", "hf").settings
    assert settings == DDP
