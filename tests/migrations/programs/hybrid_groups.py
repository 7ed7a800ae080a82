"""Hybrid sharding over a pair of process groups."""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy


def main():
    torch.manual_seed(0)
    within = dist.new_group([0, 1])
    between = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model = FSDP(
        nn.Linear(6, 6),
        process_group=(within, between),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        model(torch.randn(2, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with FSDP.summon_full_params(model, writeback=False):
        return [p.detach().clone() for p in model.parameters()]
