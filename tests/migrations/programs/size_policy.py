from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 40), nn.Sequential(nn.Linear(40, 40), nn.ReLU()), nn.ModuleList([nn.Linear(2, 2)])[0:0] or nn.Identity(), nn.Linear(40, 2))
    model = FSDP(model, auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=100))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(3):
        model(torch.randn(4, 4)).square().mean().backward()
        opt.step(); opt.zero_grad()
    return model.state_dict()
