"""Helpers that ask whether a model is wrapped."""
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def unwrap(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, FSDP) else model


def count(model):
    return sum(isinstance(module, FSDP) for module in model.modules())


def main():
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(2):
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return len(unwrap(model)), count(model) > 0, type(unwrap(nn.Linear(2, 2))).__name__, model.state_dict()
