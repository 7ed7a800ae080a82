import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy

STRATEGY = ShardingStrategy.HYBRID_SHARD


def main():
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("between", "within"))
    model = FSDP(nn.Linear(6, 6), device_mesh=mesh, sharding_strategy=STRATEGY, use_orig_params=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(2):
        model(torch.randn(2, 6)).square().mean().backward()
        opt.step(); opt.zero_grad()
    with FSDP.summon_full_params(model, writeback=False):
        return [p.detach().clone() for p in model.parameters()]
