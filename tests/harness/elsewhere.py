"""Configurations in the shape of what other libraries publish, written anew: name of the file, and its text."""

from __future__ import annotations

ACCELERATE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: false
"""

HUGGING_FACE = """\
{
  "version": 1,
  "transformer_layer_cls_to_wrap": ["Block"],
  "backward_prefetch": "backward_pre",
  "forward_prefetch": false,
  "activation_checkpointing": true,
  "limit_all_gathers": true,
  "use_orig_params": true,
  "sync_module_states": true,
  "state_dict_type": "SHARDED_STATE_DICT"
}
"""

COMPOSER = """\
parallelism_config:
  fsdp:
    sharding_strategy: FULL_SHARD
    mixed_precision: DEFAULT
    activation_checkpointing: true
    activation_checkpointing_reentrant: false
    backward_prefetch: BACKWARD_PRE
    limit_all_gathers: true
    state_dict_type: sharded
    data_parallel_shard_degree: -1
    use_orig_params: true
    verbose: false
precision: amp_bf16
device_train_microbatch_size: 2
"""

FOUNDRY = """\
variables:
  max_seq_len: 2048
  micro: 2
max_seq_len: ${variables.max_seq_len}
model:
  name: mpt_causal_lm
  init_device: meta
  d_model: 768
optimizer:
  name: decoupled_adamw
  lr: 6.0e-4
algorithms:
  gradient_clipping:
    clipping_type: norm
    clipping_threshold: 1.0
max_duration: 4800ba
global_train_batch_size: 256
device_train_microbatch_size: ${variables.micro}
precision: amp_bf16
fsdp_config:
  sharding_strategy: FULL_SHARD
  mixed_precision: PURE
  activation_checkpointing: false
  activation_checkpointing_reentrant: false
  activation_cpu_offload: false
  limit_all_gathers: true
"""

TORCHTITAN = """\
[job]
dump_folder = "./outputs"
description = "Llama 3 debug training"

[metrics]
log_freq = 1

[model]
name = "llama3"
flavor = "debugmodel"

[optimizer]
name = "AdamW"
lr = 8e-4

[training]
local_batch_size = 8
seq_len = 2048
max_norm = 1.0
steps = 10
mixed_precision_param = "bfloat16"
mixed_precision_reduce = "float32"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 1

[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
"""

DEEPSPEED = """\
{
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 1,
  "gradient_clipping": 1.0,
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 2,
    "overlap_comm": true,
    "contiguous_gradients": true,
    "reduce_bucket_size": 500000000,
    "allgather_bucket_size": 500000000
  },
  "steps_per_print": 100
}
"""

FILES = {
    "accelerate": ("accelerate.yaml", ACCELERATE),
    "hf": ("fsdp_config.json", HUGGING_FACE),
    "composer": ("composer.yaml", COMPOSER),
    "foundry": ("foundry.yaml", FOUNDRY),
    "torchtitan": ("debug_model.toml", TORCHTITAN),
    "deepspeed": ("ds_config.json", DEEPSPEED),
}
