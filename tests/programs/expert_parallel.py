"""Experts with a mesh of their own: their rows are cut over one axis, all else over both."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Experts(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) / width**0.5)

    def forward(self, x, weights):
        return torch.einsum("nef,efw,ne->nw", F.silu(torch.einsum("nw,ewf->nef", x, self.up)), self.down, weights)


class Block(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, count)
        self.experts = Experts(count, width)

    def forward(self, x):
        y = self.norm(x)
        chances = self.router(y).softmax(-1)
        kept, chosen = chances.topk(2)
        return x + self.experts(y, torch.zeros_like(chances).scatter(1, chosen, kept))


def main():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = nn.Sequential(*(Block(4, 8) for _ in range(2)))
    for block in model:
        fully_shard(block.experts, mesh=mesh)  # replicated over one axis, cut over the other
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        x = torch.randn(5, 8)
        loss = F.mse_loss(model(x), x.roll(1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
