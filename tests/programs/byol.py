"""Two views, a predictor, a slow target network: both losses in one backward, the target after each step."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    encoder = nn.Sequential(nn.Linear(10, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 8))
    predictor = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    target = copy.deepcopy(encoder).requires_grad_(False)
    for model in (encoder, predictor, target):
        fully_shard(model, reshard_after_forward=True)
    optimizer = torch.optim.SGD([*encoder.parameters(), *predictor.parameters()], lr=0.1, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(4):
        x = torch.randn(6, 10)
        a, b = (x + 0.1 * torch.randn_like(x) for _ in range(2))
        with torch.no_grad():
            wanted = F.normalize(target(b), dim=1), F.normalize(target(a), dim=1)
        found = F.normalize(predictor(encoder(a)), dim=1), F.normalize(predictor(encoder(b)), dim=1)
        loss = sum(2 - 2 * (f * w).sum(1).mean() for f, w in zip(found, wanted, strict=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), encoder.parameters(), strict=True):
                slow.lerp_(fast, 0.1 * (step + 1))
        losses.append(loss.item())
    return encoder, predictor, target, optimizer, losses
