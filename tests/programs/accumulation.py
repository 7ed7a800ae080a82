"""Accumulation over four micro-batches: gradients are sent with the last one."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(12, 40), nn.SiLU(), nn.Linear(40, 12)) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        for micro in range(4):
            last = micro == 3
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            x = torch.randn(5, 12)
            loss = F.mse_loss(model(x), x.roll(1, 1)) / 4
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, losses
