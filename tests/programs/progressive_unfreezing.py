"""Layers are unfrozen one by one from the head; an optimizer over all of them from the beginning."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(10, 10), nn.GELU()) for _ in range(4)), nn.Linear(10, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(6):
        for i, layer in enumerate(model):
            layer.requires_grad_(i >= 4 - step)
        loss = F.cross_entropy(model(torch.randn(5, 10)), torch.randint(0, 3, (5,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
