"""Momentum contrast: a key encoder that follows by a moving average, negatives from a queue that all ranks fill."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


def gathered(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def main():
    query = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 7))
    key = copy.deepcopy(query).requires_grad_(False)
    for model in (query, key):
        fully_shard(model[2])
        fully_shard(model)
    optimizer = torch.optim.SGD(query.parameters(), lr=0.05, momentum=0.9)
    queue = F.normalize(torch.randn(16, 7), dim=1)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        x = torch.randn(3, 12)
        with torch.no_grad():
            for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            k = F.normalize(key(x + 0.1 * torch.randn_like(x)), dim=1)
        q = F.normalize(query(x + 0.1 * torch.randn_like(x)), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], dim=1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(3, dtype=torch.long))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        queue = torch.cat([queue, gathered(k)])[-16:]
        losses.append(loss.item())
    return query, key, optimizer, losses, queue
