"""Seed 001's seven rows: what FSDP1's parameters become."""
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def build(strategy_is_full):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    if strategy_is_full:
        return FSDP(
            model,
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            cpu_offload=CPUOffload(offload_params=True),
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
            use_orig_params=True,
        )
    return FSDP(
        model,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        ignored_states=[model[2].bias],
        use_orig_params=True,
    )


def main():
    out = []
    for full in (True, False):
        model = build(full)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(torch.distributed.get_rank())
        with model.no_sync():
            model(torch.randn(3, 4)).sum().backward()
        model(torch.randn(3, 4)).sum().backward()
        if not full:
            bias = model[2].bias  # ignored: the ranks' gradients are their own
            torch.distributed.all_reduce(bias.grad)
        optimizer.step()
        out.append(model.state_dict())
    return out
