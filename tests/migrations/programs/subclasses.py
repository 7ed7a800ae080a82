"""Subclasses that only pass settings on."""
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


class Sharded(FullyShardedDataParallel):
    """Our name for it."""


class KeepsFull(FullyShardedDataParallel):
    """Full parameters stay until backward."""

    def __init__(self, net, original=True):
        super().__init__(net, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=original)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(KeepsFull(nn.Linear(4, 4)), nn.Linear(4, 2))
    model = Sharded(model, use_orig_params=True)
    assert isinstance(model, Sharded) and isinstance(model[0], FullyShardedDataParallel)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(2):
        model(torch.randn(4, 4)).square().mean().backward()
        opt.step(); opt.zero_grad()
    return model.state_dict()
