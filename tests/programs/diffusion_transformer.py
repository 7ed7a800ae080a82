"""A DiT: blocks that a condition shifts and scales (zero at the beginning), a class that is dropped now and then."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU("tanh"), nn.Linear(3 * dim, dim))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        nn.init.zeros_(self.modulation[1].weight)
        nn.init.zeros_(self.modulation[1].bias)

    def forward(self, x, condition):
        a, b, c, d, e, f = self.modulation(condition)[:, None].chunk(6, dim=-1)
        y = self.norm1(x) * (1 + a) + b
        x = x + c * self.attention(y, y, y, need_weights=False)[0]
        return x + d * self.mlp(self.norm2(x) * (1 + e) + f)


class DiT(nn.Module):
    def __init__(self, dim=16, depth=3, classes=4):
        super().__init__()
        self.patches = nn.Conv2d(1, dim, 2, stride=2)
        self.positions = nn.Parameter(torch.randn(1, 16, dim) * 0.02)
        self.time, self.classes = nn.Linear(1, dim), nn.Embedding(classes + 1, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.final = nn.Linear(dim, 4)

    def forward(self, x, t, label):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        condition = self.time(t[:, None]) + self.classes(label)
        for block in self.blocks:
            x = block(x, condition)
        return self.final(x)


def main():
    model = DiT()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(5):
        clean, noise, t = torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8), torch.rand(4)
        label = torch.where(torch.rand(4) < 0.2, 4, torch.randint(0, 4, (4,)))
        mixed = (1 - t)[:, None, None, None] * clean + t[:, None, None, None] * noise
        velocity = F.unfold(noise - clean, 2, stride=2).transpose(1, 2)
        loss = F.mse_loss(model(mixed, t, label), velocity)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
