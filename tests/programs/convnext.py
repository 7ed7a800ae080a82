"""ConvNeXt blocks: depthwise convolutions, layer scale, stochastic depth that all ranks draw alike."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, dim, drop):
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(torch.full((dim,), 1e-1))
        self.drop = drop

    def forward(self, x, draw):
        if self.training and draw < self.drop:
            return x
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, dim=10, depth=4):
        super().__init__()
        self.stem = nn.Conv2d(3, dim, 4, stride=4)
        self.blocks = nn.ModuleList(Block(dim, 0.5 * i / depth) for i in range(depth))
        self.head = nn.Linear(dim, 7)

    def forward(self, x, draws):
        x = self.stem(x)
        for block, draw in zip(self.blocks, draws, strict=True):
            x = block(x, draw)
        return self.head(x.mean((2, 3)))


def main():
    model = ConvNeXt()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    depth = torch.Generator().manual_seed(3)  # the same on every rank
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        draws = torch.rand(4, generator=depth).tolist()
        loss = F.cross_entropy(model(torch.randn(3, 3, 16, 16), draws), torch.randint(0, 7, (3,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
