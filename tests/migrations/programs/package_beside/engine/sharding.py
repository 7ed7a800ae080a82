import functools

from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from .models import Layer


def shard(module):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer})
    return FullyShardedDataParallel(module, auto_wrap_policy=policy, use_orig_params=True)


def unshard(module):
    """Everything on rank 0."""
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(module, StateDictType.FULL_STATE_DICT, config):
        return module.state_dict()
