"""A policy that the program writes itself, in FSDP1's form."""
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def my_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    if recurse:
        return True
    return isinstance(module, nn.Linear) and nonwrapped_numel > 20


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(2, 2))
    model = FSDP(model, auto_wrap_policy=my_policy)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    model(torch.randn(4, 4)).square().mean().backward()
    opt.step()
    return model.state_dict()
