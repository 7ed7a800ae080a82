"""Accelerate wraps the model; torch's names are arguments of its plugin, and its methods take the wrapped model."""
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, ShardingStrategy

import torch

plugin = FullyShardedDataParallelPlugin(
    sharding_strategy=ShardingStrategy.FULL_SHARD,  # told
    mixed_precision_policy=MixedPrecision(param_dtype=torch.bfloat16),  # told
    state_dict_config=FullStateDictConfig(offload_to_cpu=True, rank0_only=True),  # told
)
accelerator = Accelerator(fsdp_plugin=plugin)
