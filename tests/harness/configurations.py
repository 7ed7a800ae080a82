"""Configurations written anew in the shapes that people have, of each library and version, and what each becomes.

`settings`: those of `ShardingConfig` that differ from the defaults. `lost`: the keys that are lossy or unsupported.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Configuration(NamedTuple):
    file: str
    format: str
    text: str
    settings: dict[str, Any]
    lost: tuple[str, ...] = ()
    beside: dict[str, str] = {}  # noqa: RUF012 (read only)


LOW = {"precision.mode": "PURE", "precision.master": "float32"}
HALF = {**LOW, "precision.dtype": "float16"}
AUTOCAST = {"precision.mode": "DEFAULT"}
WHOLE = {"state_dict.kind": "full", "state_dict.rank0_only": True, "state_dict.offload_to_cpu": True}
DDP = {"sharding.data_parallel_shard_degree": 1, "sharding.data_parallel_replicate_degree": -1}
KEPT = {"sharding.reshard_after_forward": False}
OFFLOAD = {"sharding.cpu_offload": True}
UNITS = {"activation_checkpointing.at": "units"}
MODEL_S, ROOT = {"wrap.by": "no_split_modules"}, {"wrap.by": "none"}


def blocks(*names: str) -> dict[str, Any]:
    return {"wrap.by": "classes", "wrap.classes": list(names)}


ALL: dict[str, Configuration] = {}

# ---- Accelerate ------------------------------------------------------------------------------------------------------

ALL["accelerate 0.20: strategies are numbers"] = Configuration(
    "a.yaml",
    "accelerate",
    """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_offload_params: true
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: GPT2Block
machine_rank: 0
mixed_precision: fp16
num_machines: 1
num_processes: 2
use_cpu: false
""",
    {**blocks("GPT2Block"), **OFFLOAD, **WHOLE, **HALF},
)
ALL["accelerate 0.28: several classes, no state dict key"] = Configuration(
    "a.yaml",
    "accelerate",
    """\
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: T5Block,T5Stack
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_forward_prefetch: false
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
mixed_precision: bf16
num_processes: 8
""",
    {**blocks("T5Block", "T5Stack"), **KEPT, **WHOLE, **LOW, "initialisation.source": "cpu"},
)
ALL["accelerate 0.34: hybrid on four machines"] = Configuration(
    "a.yaml",
    "accelerate",
    """\
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 2000000
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
mixed_precision: 'no'
num_machines: 4
num_processes: 32
""",
    {"wrap.by": "size", "wrap.min_params": 2000000, "sharding.data_parallel_replicate_degree": 4},
)
ALL["accelerate 1: version 1 by its questionnaire"] = Configuration(
    "a.yaml",
    "accelerate",
    """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
enable_cpu_affinity: false
fsdp_config:
  fsdp_version: 1
  fsdp_reshard_after_forward: SHARD_GRAD_OP
  fsdp_auto_wrap_policy: NO_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_sync_module_states: true
  fsdp_activation_checkpointing: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
main_training_function: main
mixed_precision: bf16
rdzv_backend: static
""",
    {**ROOT, **KEPT, **UNITS, **LOW},
)
ALL["accelerate 1: version 2"] = Configuration(
    "a.yaml",
    "accelerate",
    """\
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: true
mixed_precision: bf16
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 4
  parallelism_config_tp_size: 1
""",
    {
        **MODEL_S,
        **KEPT,
        **OFFLOAD,
        **LOW,
        "sharding.data_parallel_replicate_degree": 2,
        "sharding.data_parallel_shard_degree": 4,
    },
)
ALL["accelerate 1: version 2 beside a strategy of version 1"] = Configuration(
    "a.yaml",
    "accelerate",
    """\
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_sharding_strategy: NO_SHARD
  fsdp_sync_module_states: true
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_activation_checkpointing: true
  fsdp_activation_checkpointing_offload: true
""",
    {**ROOT, **UNITS, "activation_checkpointing.offload": True},
)
ALL["accelerate 1: tensor parallelism and compilation"] = Configuration(
    "a.yaml",
    "accelerate",
    """\
distributed_type: FSDP
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: default
fsdp_config:
  fsdp_version: 2
parallelism_config:
  parallelism_config_tp_size: 2
mixed_precision: fp8
fp8_config:
  backend: AO
  enable_fsdp_float8_all_gather: true
""",
    {**ROOT, "parallelism.tensor_parallel_degree": 2},
    (
        "dynamo_config.dynamo_backend",
        "mixed_precision",
        "fp8_config.enable_fsdp_float8_all_gather",
    ),
)
ALL["accelerate 1.15: sequences over ranks"] = Configuration(
    "a.yaml",
    "accelerate",
    """\
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: SHARDED_STATE_DICT
mixed_precision: bf16
num_processes: 8
parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 1
  parallelism_config_cp_size: 4
  parallelism_config_cp_backend: torch
  parallelism_config_cp_comm_strategy: allgather
""",
    {
        **MODEL_S,
        **LOW,
        "sharding.data_parallel_shard_degree": 2,
        "parallelism.context_parallel_degree": 4,
    },
)
ALL["accelerate 1.15: DeepSpeed's sequences over ranks"] = Configuration(
    "a.yaml",
    "accelerate",
    """\
deepspeed_config:
  deepspeed_config_file: zero3.json
distributed_type: DEEPSPEED
parallelism_config:
  parallelism_config_dp_shard_size: 1
  parallelism_config_sp_size: 4
  parallelism_config_sp_backend: deepspeed
  parallelism_config_sp_seq_length_is_variable: true
  parallelism_config_sp_attn_implementation: sdpa
""",
    {
        **LOW,
        "sharding.data_parallel_shard_degree": 1,
        "parallelism.context_parallel_degree": 4,
        "parallelism.context_parallel_variant": "ulysses",
    },
    (),
    {"zero3.json": '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}'},
)
ALL["accelerate: Megatron-LM"] = Configuration(
    "a.yaml",
    "accelerate",
    """\
compute_environment: LOCAL_MACHINE
distributed_type: MEGATRON_LM
megatron_lm_config:
  megatron_lm_gradient_clipping: 1.0
  megatron_lm_num_micro_batches: 4
  megatron_lm_pp_degree: 2
  megatron_lm_recompute_activations: true
  megatron_lm_sequence_parallelism: true
  megatron_lm_tp_degree: 2
  megatron_lm_use_distributed_optimizer: true
mixed_precision: bf16
num_processes: 8
""",
    {
        **UNITS,
        **LOW,
        "parallelism.tensor_parallel_degree": 2,
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_num_microbatches": 4,
    },
    ("megatron_lm_config.megatron_lm_gradient_clipping",),
)
ALL["accelerate: DDP under autocast"] = Configuration(
    "a.yaml",
    "accelerate",
    "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 4\n",
    {**DDP, **AUTOCAST},
)
ALL["accelerate: ZeRO-3 in it"] = Configuration(
    "a.yaml",
    "accelerate",
    """\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 1
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 8
""",
    {**OFFLOAD, **LOW},
)
ALL["accelerate: ZeRO-2 with clipping and accumulation"] = Configuration(
    "a.yaml",
    "accelerate",
    """\
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 8
  gradient_clipping: 0.7
  offload_optimizer_device: none
  offload_param_device: none
  zero_stage: 2
mixed_precision: fp16
""",
    {**KEPT, **HALF},
    ("deepspeed_config.gradient_accumulation_steps", "deepspeed_config.gradient_clipping"),
)
ALL["accelerate: ZeRO in another file"] = Configuration(
    "a.yaml",
    "accelerate",
    """\
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: zero3.json
  zero3_init_flag: true
mixed_precision: bf16
""",
    LOW,
    (),
    {"zero3.json": '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "train_batch_size": "auto"}'},
)
ALL["accelerate: the file is elsewhere"] = Configuration(
    "a.yaml",
    "accelerate",
    "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: /nowhere/zero3.json\n",
    {},
    ("deepspeed_config.deepspeed_config_file",),
)

# ---- the Trainer -----------------------------------------------------------------------------------------------------

ALL["trainer: fsdp_config by itself"] = Configuration(
    "f.json",
    "hf",
    """{"fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "fsdp_version": 1,
 "fsdp_backward_prefetch": "backward_pre", "fsdp_use_orig_params": "true", "xla": false}""",
    {**blocks("LlamaDecoderLayer"), **WHOLE},
)
ALL["trainer 4: words, and a class beside them"] = Configuration(
    "t.json",
    "hf",
    """{"output_dir": "out", "num_train_epochs": 3, "learning_rate": 2e-05, "bf16": true,
 "fsdp": "shard_grad_op auto_wrap offload", "fsdp_transformer_layer_cls_to_wrap": "OPTDecoderLayer",
 "report_to": "none", "per_device_train_batch_size": 4}""",
    {**blocks("OPTDecoderLayer"), **KEPT, **OFFLOAD, **WHOLE, **LOW},
)
ALL["trainer 4: a list of words"] = Configuration(
    "t.yaml",
    "hf",
    """\
output_dir: out
fsdp: [full_shard, auto_wrap]
fsdp_config:
  min_num_params: 0
  backward_prefetch: backward_post
  sync_module_states: true
  cpu_ram_efficient_loading: true
  limit_all_gathers: true
  version: 1
fp16: true
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
""",
    {**MODEL_S, **WHOLE, **HALF, **UNITS},
)
ALL["trainer 5: a switch and a table"] = Configuration(
    "t.json",
    "hf",
    """{"output_dir": "out", "per_device_train_batch_size": 1, "max_steps": 100, "bf16": true, "fsdp": true,
 "fsdp_config": {"version": 2, "reshard_after_forward": false, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"],
 "activation_checkpointing": true, "state_dict_type": "SHARDED_STATE_DICT", "cpu_offload": true},
 "parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 8, "tp_size": 2}}""",
    {
        **blocks("Qwen3DecoderLayer"),
        **KEPT,
        **UNITS,
        **OFFLOAD,
        **LOW,
        "sharding.data_parallel_replicate_degree": 2,
        "sharding.data_parallel_shard_degree": 8,
        "parallelism.tensor_parallel_degree": 2,
    },
)
ALL["trainer 5: a strategy that it does not read"] = Configuration(
    "t.json",
    "hf",
    '{"output_dir": "o", "fsdp": true, "fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}}',
    {**MODEL_S, **WHOLE},
)
ALL["trainer: nothing shards"] = Configuration(
    "t.json",
    "hf",
    '{"output_dir": "out", "per_device_train_batch_size": 8, "bf16": true, "torch_compile": true}',
    {**DDP, **AUTOCAST},
    ("torch_compile",),
)
ALL["trainer: ZeRO inside"] = Configuration(
    "t.json",
    "hf",
    """{"output_dir": "out", "per_device_train_batch_size": 2, "bf16": true, "deepspeed": {"bf16": {"enabled": "auto"},
 "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": true},
 "stage3_max_live_parameters": 1e9, "stage3_gather_16bit_weights_on_model_save": true},
 "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
 "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
 "train_micro_batch_size_per_gpu": "auto"}}""",
    {**OFFLOAD, **LOW},
)
ALL["trainer: a file of ZeRO beside it"] = Configuration(
    "t.yaml",
    "hf",
    "output_dir: out\nper_device_train_batch_size: 2\nfp16: true\ndeepspeed: ds/zero2.json\n",
    {**KEPT, **HALF},
    (),
    {"ds/zero2.json": '{"fp16": {"enabled": "auto", "loss_scale": 0}, "zero_optimization": {"stage": 2}}'},
)

# ---- axolotl ---------------------------------------------------------------------------------------------------------

ALL["axolotl 0.4: words and prefixes"] = Configuration(
    "x.yml",
    "axolotl",
    """\
base_model: some/llama
model_type: LlamaForCausalLM
load_in_4bit: true
datasets:
  - path: some/data
    type: alpaca
adapter: qlora
lora_r: 32
sequence_len: 4096
sample_packing: false
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
fp16:
tf32: false
gradient_checkpointing: true
flash_attention: true
deepspeed:
weight_decay: 0.0
fsdp:
  - full_shard
  - auto_wrap
fsdp_config:
  fsdp_limit_all_gathers: true
  fsdp_sync_module_states: true
  fsdp_offload_params: true
  fsdp_use_orig_params: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: SHARDED_STATE_DICT
special_tokens:
""",
    {**blocks("LlamaDecoderLayer"), **OFFLOAD, **UNITS, **LOW},
)
ALL["axolotl 0.12: version 2 and degrees"] = Configuration(
    "x.yaml",
    "axolotl",
    """\
base_model: some/qwen
datasets: []
sequence_len: 2048
micro_batch_size: 1
num_epochs: 1
bf16: true
dp_shard_size: 4
dp_replicate_size: 2
tensor_parallel_size: 2
context_parallel_size: 1
fsdp_version: 2
fsdp_config:
  offload_params: false
  cpu_ram_efficient_loading: true
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: Qwen3DecoderLayer
  state_dict_type: FULL_STATE_DICT
  final_state_dict_type: FULL_STATE_DICT
  reshard_after_forward: true
  activation_checkpointing: true
""",
    {
        **blocks("Qwen3DecoderLayer"),
        **WHOLE,
        **UNITS,
        **LOW,
        "sharding.data_parallel_shard_degree": 4,
        "sharding.data_parallel_replicate_degree": 2,
        "parallelism.tensor_parallel_degree": 2,
    },
)
ALL["axolotl: ZeRO-3, of its own file"] = Configuration(
    "x.yml",
    "axolotl",
    "base_model: m\nsequence_len: 512\nmicro_batch_size: 1\nbf16: true\ndeepspeed: zero3_bf16.json\n"
    "gradient_checkpointing: false\n",
    LOW,
    (),
    {
        "zero3_bf16.json": """{"zero_force_ds_cpu_optimizer": false, "zero_allow_untested_optimizer": true,
 "zero_optimization": {"stage": 3, "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 0,
 "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
 "max_live_parameters": 0, "max_reuse_distance": 0, "gather_16bit_weights_on_model_save": true},
 "bf16": {"enabled": true}, "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
 "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false}"""
    },
)
ALL["axolotl: without mixed precision, on every rank a copy"] = Configuration(
    "x.yml",
    "axolotl",
    "base_model: m\nsequence_len: 512\nmicro_batch_size: 1\nnum_epochs: 2\nbfloat16: true\ntorch_compile: true\n",
    DDP,
    ("torch_compile",),
)
ALL["axolotl: float8 gathers and activations on the host"] = Configuration(
    "x.yml",
    "axolotl",
    """\
base_model: m
sequence_len: 512
micro_batch_size: 1
bf16: true
fp8: true
fp8_enable_fsdp_float8_all_gather: true
gradient_checkpointing: offload
fsdp_version: 2
fsdp_config:
  reshard_after_forward: true
""",
    {**MODEL_S, **WHOLE, **UNITS, **LOW, "activation_checkpointing.offload": True},
    ("fp8", "fp8_enable_fsdp_float8_all_gather"),
)

ALL["axolotl: both spellings of bfloat16, an own argument from the environment"] = Configuration(
    "x.yml",
    "axolotl",
    "base_model: ${MODEL}\nsequence_len: 8\nmicro_batch_size: 1\nnum_epochs: 1\nbf16: true\nbfloat16: true\nfsdp: []\n"
    "fsdp_config: {fsdp_version: 2, fsdp_sharding_strategy: HYBRID_SHARD, reshard_after_forward: false}\n",
    {**MODEL_S, **KEPT, **WHOLE, **LOW},
)

# ---- LLaMA-Factory ---------------------------------------------------------------------------------------------------

FACTORY = """\
model_name_or_path: some/llama
stage: sft
do_train: true
finetuning_type: full
dataset: identity
template: llama3
cutoff_len: 2048
overwrite_cache: true
output_dir: saves/x
logging_steps: 10
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
lr_scheduler_type: cosine
warmup_ratio: 0.1
"""
ALL["llamafactory: ZeRO-3 in full"] = Configuration(
    "l.yaml",
    "llamafactory",
    FACTORY + "bf16: true\ndeepspeed: ds_z3.json\n",
    {**UNITS, **LOW},
    (),
    {"ds_z3.json": '{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}, "train_batch_size": "auto"}'},
)
ALL["llamafactory: FSDP, pure bfloat16"] = Configuration(
    "l.yaml",
    "llamafactory",
    FACTORY + "pure_bf16: true\ndisable_gradient_checkpointing: true\nfsdp: full_shard auto_wrap\n",
    {**MODEL_S, **WHOLE},
)
ALL["llamafactory: nothing shards here"] = Configuration(
    "l.yaml",
    "llamafactory",
    FACTORY + "fp16: true\n",
    {**DDP, **UNITS, "precision.mode": "DEFAULT", "precision.dtype": "float16"},
)
V1 = """\
model: some/qwen
train_dataset: data/v1.yaml
output_dir: out
micro_batch_size: 1
cutoff_len: 2048
learning_rate: 1.0e-4
max_steps: 10
"""
COMPUTED = {"precision.param": "bfloat16", "precision.reduce": "float32"}
ALL["llamafactory v1: FSDP2"] = Configuration(
    "v.yaml",
    "llamafactory-v1",
    V1 + "dist_config: {name: fsdp2, dcp_path: null, mp_replicate_size: 2, offload_params: true, pin_memory: false}\n",
    {
        **MODEL_S,
        **UNITS,
        **OFFLOAD,
        **COMPUTED,
        "sharding.reshard_after_forward": True,
        "sharding.pin_memory": False,
        "sharding.data_parallel_replicate_degree": 2,
    },
)
ALL["llamafactory v1: FSDP2 in float32, kept"] = Configuration(
    "v.yaml",
    "llamafactory-v1",
    V1 + "bf16: false\nenable_activation_checkpointing: false\n"
    "dist_config:\n  name: fsdp2\n  reshard_after_forward: false\n  cp_size: 2\n",
    {**MODEL_S, **KEPT, "parallelism.context_parallel_degree": 2},
)
ALL["llamafactory v1: another plugin, on the meta device"] = Configuration(
    "v.yaml",
    "llamafactory-v1",
    V1 + "dist_config: {name: other, ep_size: 16, ep_dispatcher: eager}\ninit_config: {name: init_on_meta}\n",
    {**UNITS, **COMPUTED, "parallelism.expert_parallel_degree": 16},
    ("dist_config.name",),
)
ALL["llamafactory v1: DeepSpeed"] = Configuration(
    "v.yaml",
    "llamafactory-v1",
    V1 + "dist_config:\n  name: deepspeed\n  config_file: z2.json\nenable_activation_checkpointing: false\n",
    {**KEPT, **LOW},
    (),
    {"z2.json": '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'},
)

# ---- TRL -------------------------------------------------------------------------------------------------------------

ALL["trl: supervised, with FSDP2"] = Configuration(
    "r.yaml",
    "trl",
    """\
model_name_or_path: some/model
dataset_name: some/data
attn_implementation: flash_attention_2
dtype: bfloat16
max_length: 4096
packing: true
output_dir: out
per_device_train_batch_size: 4
learning_rate: 2.0e-5
fsdp: true
fsdp_config: {version: 2, state_dict_type: SHARDED_STATE_DICT}
""",
    {**MODEL_S, **UNITS, **LOW},
)
ALL["trl: preferences, sharded by a launcher's file"] = Configuration(
    "r.yaml",
    "trl",
    "model_name_or_path: m\nbeta: 0.1\nmax_prompt_length: 512\nmax_length: 1024\noutput_dir: o\nbf16: true\n"
    "gradient_checkpointing: false\nper_device_train_batch_size: 2\n",
    {**DDP, **AUTOCAST},
)
ALL["trl: LoRA, full precision, ZeRO-2 inside"] = Configuration(
    "r.yaml",
    "trl",
    "model_name_or_path: m\nuse_peft: true\nlora_target_modules: all-linear\nmax_length: 512\noutput_dir: o\n"
    "bf16: false\nfp16: false\ndeepspeed:\n  zero_optimization: {stage: 2}\n",
    {**KEPT, **UNITS},
)

# ---- DeepSpeed -------------------------------------------------------------------------------------------------------

ALL["deepspeed: ZeRO-1 in float16"] = Configuration(
    "d.json",
    "deepspeed",
    """{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "steps_per_print": 100, "gradient_clipping": 1.0,
 "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
 "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
 "fp16": {"enabled": true, "auto_cast": false, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
 "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8}, "wall_clock_breakdown": false}""",
    {**KEPT, **HALF, "micro_batches.size": 8},
    ("gradient_clipping", "optimizer", "scheduler"),
)
ALL["deepspeed: ZeRO-2 with offload, and comments"] = Configuration(
    "d.json",
    "deepspeed",
    """{"_comment": "for two machines", "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0,
 "bf16": {"enabled": true, "check_grad_overflow": false},
 "zero_optimization": {"_why": "memory", "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": false},
 "allgather_partitions": true, "allgather_bucket_size": 2e8, "round_robin_gradients": true},
 "my_own_key": {"x": 1}, "zero_allow_untested_optimizer": true}""",
    {**KEPT, **OFFLOAD, **LOW, "sharding.pin_memory": False, "micro_batches.size": 4},
)
ALL["deepspeed: ZeRO-3, every threshold, both spellings"] = Configuration(
    "d.json",
    "deepspeed",
    """{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0,
 "bfloat16": {"enabled": true}, "communication_data_type": "fp32",
 "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e9, "max_reuse_distance": 1e9,
 "stage3_prefetch_bucket_size": 5e7, "param_persistence_threshold": 1e5, "stage3_model_persistence_threshold": 1e9,
 "stage3_module_granularity_threshold": 0, "leaf_module": {"classes": ["MoE"]}, "sub_group_size": 1e9,
 "use_all_reduce_for_fetch_params": false, "log_trace_cache_warnings": false, "elastic_checkpoint": false},
 "torch_autocast": {"enabled": false, "dtype": "bfloat16"}, "checkpoint": {"load_universal": true}}""",
    {**LOW, "precision.reduce": "float32", "micro_batches.size": 1},
)
ALL["deepspeed: Infinity"] = Configuration(
    "d.json",
    "deepspeed",
    """{"train_batch_size": 16, "gradient_clipping": 0, "aio": {"block_size": 1048576, "queue_depth": 8},
 "zero_optimization": {"stage": 3,
 "offload_param": {"device": "nvme", "nvme_path": "/local", "buffer_count": 5, "max_in_cpu": 1e9},
 "offload_optimizer": {"device": "nvme", "nvme_path": "/local", "pipeline_read": true, "fast_init": false}}}""",
    {},
    ("zero_optimization.offload_param.device", "zero_optimization.offload_optimizer.device"),
)
ALL["deepspeed: ZeRO++ and MiCS"] = Configuration(
    "d.json",
    "deepspeed",
    """{"train_batch_size": 16, "gradient_clipping": 0, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8,
 "zero_quantized_weights": true, "zero_quantized_gradients": true, "zeropp_loco_param": {"err_beta": 0.8},
 "mics_shard_size": -1, "mics_hierarchical_params_gather": false}}""",
    {"sharding.reshard_after_forward": 8},
    (
        "zero_optimization.zero_quantized_weights",
        "zero_optimization.zero_quantized_gradients",
        "zero_optimization.zeropp_loco_param",
    ),
)
ALL["deepspeed: what 0.18 and 0.19 have"] = Configuration(
    "d.json",
    "deepspeed",
    """{"train_batch_size": 8, "gradient_clipping": 1, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true,
 "bf16_optimizer_states": true}, "zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1},
 "parameter_alignment": true, "compute_grad_norm": true}, "compile": {"deepcompile": true, "free_activation": true},
 "tensor_parallel": {"autotp_size": 4, "tp_overlap_comm": false}, "gradient_allreduce_op": "sum",
 "data_types": {"grad_accum_dtype": "fp32"}, "expert_parallel": {"enabled": true, "autoep_size": 2}}""",
    {
        **KEPT,
        "precision.mode": "PURE",
        "parallelism.tensor_parallel_degree": 4,
        "parallelism.expert_parallel_degree": 2,
    },
    (
        "gradient_clipping",
        "bf16.bf16_master_weights_and_grads",
        "zero_optimization.zenflow",
        "compile.deepcompile",
        "gradient_allreduce_op",
        "data_types.grad_accum_dtype",
    ),
)
ALL["deepspeed: no stage, what was removed"] = Configuration(
    "d.json",
    "deepspeed",
    """{"train_micro_batch_size_per_gpu": 2, "amp": {"enabled": false}, "elasticity": {"enabled": false},
 "sparse_gradients": false, "zero_optimization": {"cpu_offload": true, "cpu_offload_params": false}}""",
    {**DDP, **OFFLOAD, "micro_batches.size": 2},
)

ALL["deepspeed: for the Trainer, compiled, a part of the optimizer its own"] = Configuration(
    "d.json",
    "deepspeed",
    """{"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "auto_cast": false},
 "compile": {"disable": false, "backend": "inductor"}, "gradient_clipping": "auto", "train_batch_size": "auto",
 "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "weight_decay": "auto"}}}""",
    KEPT,
    ("compile.disable", "optimizer"),
)

# ---- Composer, LLM Foundry, torchtitan -------------------------------------------------------------------------------

CHILDREN = {"activation_checkpointing.at": "children"}
ALL["composer: version 1"] = Configuration(
    "c.yaml",
    "composer",
    """\
parallelism_config:
  fsdp:
    sharding_strategy: SHARD_GRAD_OP
    mixed_precision: {param_dtype: bf16, reduce_dtype: fp32}
    activation_checkpointing: true
    activation_cpu_offload: true
    state_dict_type: sharded
    sync_module_states: true
    te_shard_fp8_weight: false
precision: amp_bf16
device_train_microbatch_size: auto
""",
    {
        **KEPT,
        **CHILDREN,
        **COMPUTED,
        "activation_checkpointing.offload": True,
        "initialisation.source": "cpu",
        "micro_batches.size": "auto",
    },
)
ALL["composer: version 2"] = Configuration(
    "c.yaml",
    "composer",
    "parallelism_config:\n  fsdp2:\n    reshard_after_forward: 4\n    activation_checkpointing: true\n",
    {**CHILDREN, "sharding.reshard_after_forward": 4},
)
FOUNDRY = """\
variables:
  max_seq_len: 2048
  per_rank: 4
max_seq_len: ${variables.max_seq_len}
tokenizer: {name: some/tokenizer}
train_loader: {name: text, drop_last: true}
optimizer: {name: decoupled_adamw, lr: 1.0e-4}
max_duration: 1ep
global_train_batch_size: 256
device_train_microbatch_size: ${variables.per_rank}
"""
ALL["foundry: meta, PURE"] = Configuration(
    "y.yaml",
    "foundry",
    FOUNDRY + "model: {name: mpt_causal_lm, init_device: meta}\nprecision: amp_bf16\n"
    "fsdp_config: {sharding_strategy: FULL_SHARD, mixed_precision: PURE, activation_checkpointing: true,"
    " activation_checkpointing_reentrant: false, activation_cpu_offload: false, limit_all_gathers: true}\n",
    {**CHILDREN, **WHOLE, "precision.mode": "PURE", "initialisation.source": "meta", "micro_batches.size": 4},
)
ALL["foundry: mixed, HSDP, float32"] = Configuration(
    "y.yaml",
    "foundry",
    FOUNDRY + "model: {name: hf_causal_lm, init_device: mixed, pretrained: true}\nprecision: fp32\n"
    "fsdp_config: {sharding_strategy: HYBRID_SHARD, data_parallel_shard_degree: 8, data_parallel_replicate_degree: 2,"
    " state_dict_type: sharded, load_monolith_rank0_only: true}\ncompile_config: {}\n",
    {
        "initialisation.source": "mixed",
        "sharding.data_parallel_shard_degree": 8,
        "sharding.data_parallel_replicate_degree": 2,
        "micro_batches.size": 4,
    },
    ("compile_config",),
)
ALL["torchtitan 2024"] = Configuration(
    "t.toml",
    "torchtitan",
    """\
[job]
dump_folder = "./outputs"
[model]
flavor = "8B"
norm_type = "rmsnorm"
[optimizer]
lr = 3e-4
[training]
batch_size = 1
warmup_steps = 200
max_norm = 1.0
data_parallel_degree = -1
tensor_parallel_degree = 1
compile = false
[experimental]
pipeline_parallel_degree = 1
[activation_checkpoint]
mode = 'selective'
selective_ac_option = 'op'
[float8]
enable_float8_linear = false
""",
    {
        **UNITS,
        **COMPUTED,
        "activation_checkpointing.save": [
            "aten.mm",
            "aten._scaled_dot_product_efficient_attention",
            "aten._scaled_dot_product_flash_attention",
        ],
    },
)
ALL["torchtitan 0.2"] = Configuration(
    "t.toml",
    "torchtitan",
    """\
[training]
local_batch_size = 1
dtype = "bfloat16"
enable_cpu_offload = true
mixed_precision_param = "bfloat16"
mixed_precision_reduce = "float32"
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
fsdp_reshard_after_forward = "never"
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = "none"
[compile]
enable = true
components = ["model", "loss"]
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
precompute_float8_dynamic_scale_for_fsdp = true
""",
    {
        **OFFLOAD,
        **COMPUTED,
        "precision.master": "bfloat16",
        "sharding.data_parallel_replicate_degree": 2,
        "sharding.data_parallel_shard_degree": 4,
        "sharding.reshard_after_forward": False,
        "parallelism.tensor_parallel_degree": 8,
    },
    (
        "parallelism.enable_async_tensor_parallel",
        "compile.enable",
        "quantize.linear.float8.enable_fsdp_float8_all_gather",
    ),
)
# The degrees of torchtitan's own files, and of those that its documents name.
ALL["torchtitan 0.2: experts, and a schedule without a pipeline"] = Configuration(
    "t.toml",
    "torchtitan",
    """\
[job]
description = "a mixture of experts"
[training]
local_batch_size = 4
seq_len = 4096
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 4
enable_async_tensor_parallel = false
pipeline_parallel_degree = 1
pipeline_parallel_schedule = "Interleaved1F1B"
context_parallel_rotate_method = "allgather"
expert_parallel_degree = 8
expert_tensor_parallel_degree = 1
expert_parallel_comm_backend = "standard"
[activation_checkpoint]
mode = "full"
""",
    {
        **UNITS,
        **COMPUTED,
        "parallelism.tensor_parallel_degree": 4,
        "parallelism.expert_parallel_degree": 8,
    },
)
ALL["torchtitan 0.2: a pipeline and long sequences"] = Configuration(
    "t.toml",
    "torchtitan",
    """\
[job]
description = "four axes"
[training]
local_batch_size = 16
[parallelism]
data_parallel_shard_degree = 8
tensor_parallel_degree = 8
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "interleaved1f1b"
pipeline_parallel_layers_per_stage = 2
context_parallel_degree = 2
context_parallel_load_balancer = "headtail"
[activation_checkpoint]
mode = "none"
""",
    {
        **COMPUTED,
        "sharding.data_parallel_shard_degree": 8,
        "parallelism.tensor_parallel_degree": 8,
        "parallelism.pipeline_parallel_degree": 4,
        "parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
        "parallelism.pipeline_parallel_microbatch_size": 1,
        "parallelism.context_parallel_degree": 2,
    },
)
ALL["torchtitan 2024: a pipeline"] = Configuration(
    "t.toml",
    "torchtitan",
    """\
[job]
description = "a pipeline"
[training]
data_parallel_degree = -1
[experimental]
pipeline_parallel_degree = 2
pipeline_parallel_split_points = ["layers.4"]
pipeline_parallel_schedule = "GPipe"
pipeline_parallel_microbatches = 8
context_parallel_degree = 1
[activation_checkpoint]
mode = "none"
""",
    {
        **COMPUTED,
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_schedule": "GPipe",
        "parallelism.pipeline_parallel_num_microbatches": 8,
    },
    ("experimental.pipeline_parallel_split_points",),
)
