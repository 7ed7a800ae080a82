"""A function that sets the process up and returns a device, of which only the return value is an argument."""
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def init_distributed_device(args):
    args.rank, args.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(args.seed)
    return torch.device("cpu")


def main():
    args = SimpleNamespace(seed=11)
    device = init_distributed_device(args)
    model = FSDP(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), device_id=device, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(args.seed + args.rank)
    for _ in range(2):
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return args.world_size, model.state_dict()
