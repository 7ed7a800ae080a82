"""A physics-informed network: second derivatives along the inputs are in the loss."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def slope(y, x):
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def main():
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(a, 20), nn.Tanh()) for a in (2, 20, 20)),
        nn.Linear(20, 1),
    )
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        x, t = torch.rand(8, 1, requires_grad=True), torch.rand(8, 1, requires_grad=True)
        u = model(torch.cat([x, t], dim=1))
        u_x = slope(u, x)
        residual = slope(u, t) + u * u_x - 0.01 * slope(u_x, x)  # Burgers
        start = torch.rand(8, 1)
        known = model(torch.cat([start, torch.zeros(8, 1)], dim=1)) + torch.sin(torch.pi * start)
        loss = residual.square().mean() + known.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
