"""The older methods for the state of an optimizer."""
import copy

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def step(model, optimizer):
    model(torch.full((2, 5), 1.0 + torch.distributed.get_rank())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def main():
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)), use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    step(model, optimizer)
    saved = copy.deepcopy(FSDP.full_optim_state_dict(model, optimizer, rank0_only=False))
    step(model, optimizer)
    optimizer.load_state_dict(FSDP.shard_full_optim_state_dict(saved, model, optim=optimizer))
    step(model, optimizer)
    return model.state_dict(), {name: value["exp_avg"] for name, value in saved["state"].items()}
