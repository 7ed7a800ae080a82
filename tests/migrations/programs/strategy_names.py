"""A table from names to strategies."""
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

LEVELS = {
    "zero3": ShardingStrategy.FULL_SHARD,
    "zero2": ShardingStrategy.SHARD_GRAD_OP,
}


class Layer(nn.Sequential):
    pass


def shard(model, level):
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Layer}), sharding_strategy=LEVELS[level])


def main(level="zero2"):
    torch.manual_seed(0)
    model = shard(nn.Sequential(Layer(nn.Linear(4, 8), nn.Tanh()), Layer(nn.Linear(8, 4))), level)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(2):
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()
