"""Lookahead around SGD, forward and backward in a closure of `step`; an evaluation at the slow weights."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    model = nn.Sequential(nn.Linear(7, 15), nn.Tanh(), nn.Linear(15, 15), nn.Tanh(), nn.Linear(15, 3))
    fully_shard(model[2])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slow = [p.detach().clone() for p in model.parameters()]
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(6):
        x, y = torch.randn(5, 7), torch.randint(0, 3, (5,))

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
        if step % 3 == 2:
            with torch.no_grad():
                for p, kept in zip(model.parameters(), slow, strict=True):
                    p.copy_(kept.lerp_(p, 0.5))
                losses.append(F.cross_entropy(model(x), y).item())
    return model, optimizer, losses
