"""Reptile: inner loops of a fresh optimizer on tasks of each rank's own, then the weights go part of the way."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    fully_shard(model[2])
    fully_shard(model)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        amplitude, phase = torch.rand(2)
        for _ in range(4):
            x = torch.rand(6, 1) * 6 - 3
            loss = F.mse_loss(model(x), (1 + amplitude) * torch.sin(x + 3 * phase))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.sub_(before[name]).mul_(0.5).add_(before[name])
        losses.append(loss.item())
    return model, losses
