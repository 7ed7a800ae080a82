"""FSDP2 from where it was first, and through its module."""
import torch
import torch.distributed.fsdp as FS
from torch import nn
from torch.distributed._composable.fsdp import fully_shard as shard


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    shard(model[0])
    FS.fully_shard(model, offload_policy=FS.OffloadPolicy())
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    model(torch.randn(2, 4)).square().mean().backward()
    opt.step()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}
