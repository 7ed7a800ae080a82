"""Torch's module under another name, everything through it."""
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.distributed.fsdp.wrap


class Block(torch.nn.Sequential): pass


def main():
    torch.manual_seed(0)
    net = torch.nn.Sequential(Block(torch.nn.Linear(5, 7)), Block(torch.nn.Linear(7, 5)))
    sharded = fsdp.FullyShardedDataParallel(
        net, sharding_strategy=fsdp.ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=torch.distributed.fsdp.wrap.ModuleWrapPolicy([Block]),
    )
    opt = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        sharded(torch.randn(3, 5)).square().sum().backward()
        opt.step(); opt.zero_grad()
    with fsdp.FullyShardedDataParallel.summon_full_params(sharded):
        return [p.detach().clone() for p in sharded.parameters()]
