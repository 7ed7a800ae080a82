"""A neural ODE: one network is called at every step of a Runge-Kutta solver."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.field = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x, steps=4):
        h = 1.0 / steps
        for i in range(steps):
            a = self.at(i * h, x)
            b = self.at(i * h + h / 2, x + h / 2 * a)
            x = x + h * self.at(i * h + h / 2, x + h / 2 * b)
        return self.head(x)

    def at(self, t, x):
        return self.field(torch.cat([x, torch.full_like(x[:, :1], t)], dim=1))


def main():
    model = Flow()
    fully_shard(model.field)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(4):
        x = torch.randn(6, 4)
        loss = F.mse_loss(model(x, 3 + step % 2), x[:, :2].sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
