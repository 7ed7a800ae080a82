"""A diffusion model: a UNet with time embeddings and skips, noise predicted, a moving average that samples."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class ResBlock(nn.Module):
    def __init__(self, inside, outside, time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.time = nn.Linear(time, 2 * outside)
        self.norm2, self.conv2 = nn.GroupNorm(2, outside), nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1)

    def forward(self, x, time):
        scale, shift = self.time(time)[..., None, None].chunk(2, dim=1)
        y = self.norm2(self.conv1(F.silu(self.norm1(x)))) * (1 + scale) + shift
        return self.skip(x) + self.conv2(F.silu(y))


class UNet(nn.Module):
    def __init__(self, width=8, time=16):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, time), nn.SiLU(), nn.Linear(time, time))
        self.into, self.out = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 1, 3, padding=1)
        self.down = nn.ModuleList([ResBlock(width, width, time), ResBlock(width, 2 * width, time)])
        self.middle = ResBlock(2 * width, 2 * width, time)
        self.up = nn.ModuleList([ResBlock(4 * width, width, time), ResBlock(2 * width, width, time)])

    def forward(self, x, t):
        angles = t[:, None] * torch.exp(-torch.arange(4) / 2)
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x, skips = self.into(x), []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], dim=1), time)
        return self.out(x)


def shard(model):
    for block in (*model.down, model.middle, *model.up):
        fully_shard(block)
    return fully_shard(model)


def main():
    model = UNet()
    average = shard(copy.deepcopy(model).requires_grad_(False))
    model = shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    kept = torch.cumprod(1 - torch.linspace(1e-3, 0.2, 10), 0)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        images, noise, t = torch.randn(3, 1, 8, 8), torch.randn(3, 1, 8, 8), torch.randint(0, 10, (3,))
        a = kept[t][:, None, None, None]
        loss = F.mse_loss(model(a.sqrt() * images + (1 - a).sqrt() * noise, t), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        losses.append(loss.item())
    x = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        for t in reversed(range(10)):
            before = kept[t - 1] if t else torch.tensor(1.0)
            noise = average(x, torch.full((2,), t))
            x0 = (x - (1 - kept[t]).sqrt() * noise) / kept[t].sqrt()
            x = before.sqrt() * x0 + (1 - before).sqrt() * noise
    return model, average, optimizer, losses, x
