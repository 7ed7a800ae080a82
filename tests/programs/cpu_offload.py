"""CPU offload, which on a CPU changes nothing, with kept parameters after forward and explicit prefetch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard


def main():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 10)) for _ in range(4)))
    for layer in model:
        fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    for i, layer in enumerate(model):
        layer.set_modules_to_forward_prefetch(list(model)[i + 1 : i + 3])
        layer.set_modules_to_backward_prefetch(list(model)[max(0, i - 2) : i][::-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        x = torch.randn(5, 10)
        loss = F.mse_loss(model(x), x.cumsum(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
