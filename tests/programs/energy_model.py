"""An energy-based model: negatives come from Langevin steps along the gradient of the input, parameters frozen."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    model = nn.Sequential(nn.Linear(6, 24), nn.SiLU(), nn.Linear(24, 24), nn.SiLU(), nn.Linear(24, 1))
    for layer in model[::2]:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        model.requires_grad_(False)
        x = torch.randn(5, 6)
        for _ in range(4):
            x = x.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad(model(x).sum(), x)
            x = x - 0.1 * slope + 0.05 * torch.randn_like(x)
        model.requires_grad_(True)
        real, made = model(torch.randn(5, 6) + 1), model(x.detach())
        loss = real.mean() - made.mean() + 0.1 * (real.square() + made.square()).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
