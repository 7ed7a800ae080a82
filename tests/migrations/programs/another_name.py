import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

Wrapper = FullyShardedDataParallel


def main():
    torch.manual_seed(0)
    model = Wrapper(nn.Linear(4, 4), use_orig_params=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    model(torch.randn(4, 4)).square().mean().backward()
    opt.step()
    return model.state_dict()
