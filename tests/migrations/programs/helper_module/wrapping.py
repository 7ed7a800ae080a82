import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def prepare(net, *classes):
    sharded = FSDP(net, auto_wrap_policy=ModuleWrapPolicy(classes), use_orig_params=True)
    return sharded, torch.optim.AdamW(sharded.parameters(), lr=0.01)


def clip(model):
    return float(model.clip_grad_norm_(max_norm=0.3))


def save(model):
    return model.state_dict()
