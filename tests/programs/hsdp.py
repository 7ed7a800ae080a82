"""Hybrid sharding: two replicas of two shards, accumulation inside a replica, the sum over replicas last."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(9, 21), nn.Tanh(), nn.Linear(21, 9)) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            x = torch.randn(4, 9)
            loss = F.mse_loss(model(x), x.roll(2, 1)) / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, losses
