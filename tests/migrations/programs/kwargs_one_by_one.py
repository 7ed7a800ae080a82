"""Settings that are put into a dict one after the other."""
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def main(keep_full=True, blocks=True):
    torch.manual_seed(0)
    kw = {"use_orig_params": True, "limit_all_gathers": True}
    if keep_full:
        kw["sharding_strategy"] = ShardingStrategy.SHARD_GRAD_OP
    if blocks:
        kw.update(auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    model = FSDP(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), **kw)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(2):
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()
