"""Gradients are read and changed between backward and step: value clipping, noise by rows, a norm that is logged."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    fully_shard(model[2])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(4):
        loss = F.cross_entropy(model(torch.randn(6, 8)), torch.randint(0, 2, (6,)))
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        for p in model.parameters():
            p.grad.mul_(1.0 / (step + 1)).add_(p.detach(), alpha=1e-3)
        largest = [p.grad.abs().max() for p in model.parameters()]
        largest = max((m.full_tensor() if hasattr(m, "full_tensor") else m).item() for m in largest)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.item(), largest]
    return model, optimizer, losses
