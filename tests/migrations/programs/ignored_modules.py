import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main():
    torch.manual_seed(0)
    frozen = nn.Linear(4, 4).requires_grad_(False)
    model = nn.Sequential(nn.Linear(4, 4), frozen, nn.Linear(4, 4))
    model = FSDP(model, ignored_modules=[frozen])
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(2):
        model(torch.randn(4, 4)).square().mean().backward()
        opt.step(); opt.zero_grad()
    return model.state_dict()
