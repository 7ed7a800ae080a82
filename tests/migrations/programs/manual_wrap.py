"""enable_wrap and wrap."""
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import enable_wrap, wrap


def main():
    torch.manual_seed(0)
    with enable_wrap(wrapper_cls=FSDP, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True):
        first = wrap(nn.Linear(4, 6))
        # the second one as well
        second = wrap(nn.Linear(6, 2))
    model = FSDP(nn.Sequential(first, nn.Tanh(), second), use_orig_params=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(2):
        model(torch.randn(4, 4)).square().mean().backward()
        opt.step(); opt.zero_grad()
    return model.state_dict()
