import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Linear):
    pass


def main(offload=False):
    torch.manual_seed(0)
    fsdp_settings = dict(
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        cpu_offload=CPUOffload(offload_params=offload),
        use_orig_params=True,
    )
    model = FSDP(nn.Sequential(Block(5, 5), Block(5, 5)), **fsdp_settings)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(2):
        model(torch.randn(4, 5)).square().mean().backward()
        opt.step(); opt.zero_grad()
    return model.state_dict()
