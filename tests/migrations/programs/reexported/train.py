"""FSDP comes through a package of the program, under another name."""
import torch
from torch import nn

from backends.sharding import Wrapper, KINDS


def main():
    torch.manual_seed(0)
    model = Wrapper(nn.Linear(4, 4), use_orig_params=True)
    assert isinstance(model, KINDS)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    model(torch.randn(4, 4)).square().mean().backward()
    opt.step()
    return model.state_dict()
