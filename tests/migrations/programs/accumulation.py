import contextlib

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

STEPS = 3


def main():
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    norms = []
    for step in range(2):
        for i in range(STEPS):
            context = model.no_sync() if i < STEPS - 1 else contextlib.nullcontext()
            with context:
                (model(torch.randn(4, 4)).square().mean() / STEPS).backward()
        norms.append(model.clip_grad_norm_(0.1).item())
        opt.step()
        opt.zero_grad(set_to_none=True)
    return norms, model.state_dict()
