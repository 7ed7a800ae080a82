from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

shard = partial(
    FSDP,
    sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    mixed_precision=MixedPrecision(reduce_dtype=torch.float32),
    use_orig_params=True,
)


def main():
    torch.manual_seed(0)
    model = shard(nn.Sequential(shard(nn.Linear(4, 4)), nn.Linear(4, 2)))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    with model.no_sync():
        model(torch.randn(4, 4)).square().mean().backward()
    model(torch.randn(4, 4)).square().mean().backward()
    opt.step()
    return model.state_dict()
