"""A UNet as those of latent diffusion: residual blocks, cross-attention to a text, classifier-free guidance."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, inside, outside, text):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.time = nn.Linear(8, outside)
        self.attention = nn.MultiheadAttention(outside, 2, kdim=text, vdim=text, batch_first=True)
        self.skip = nn.Conv2d(inside, outside, 1)

    def forward(self, x, time, text):
        y = self.conv(F.silu(self.norm(x))) + self.time(time)[..., None, None]
        n, c, h, w = y.shape
        rows = y.flatten(2).transpose(1, 2)
        rows = rows + self.attention(rows, text, text, need_weights=False)[0]
        return self.skip(x) + rows.transpose(1, 2).reshape(n, c, h, w)


class Conditional(nn.Module):
    def __init__(self, width=8, text=6):
        super().__init__()
        self.words, self.time = nn.Embedding(11, text), nn.Linear(1, 8)
        self.into, self.out = nn.Conv2d(2, width, 3, padding=1), nn.Conv2d(width, 2, 3, padding=1)
        self.down, self.middle = Block(width, 12, text), Block(12, 12, text)
        self.up = Block(24, width, text)

    def forward(self, x, t, words):
        time, text = self.time(t[:, None]).sin(), self.words(words)
        a = self.down(self.into(x), time, text)
        b = self.middle(F.avg_pool2d(a, 2), time, text)
        return self.out(self.up(torch.cat([a, F.interpolate(b, scale_factor=2)], dim=1), time, text))


def main():
    model = Conditional()
    for block in (model.down, model.middle, model.up):
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        x, noise, t, words = (
            torch.randn(3, 2, 8, 8),
            torch.randn(3, 2, 8, 8),
            torch.rand(3),
            torch.randint(1, 11, (3, 4)),
        )
        words = words * (torch.rand(3, 1) > 0.2)  # a text that is left out now and then
        mixed = (1 - t)[:, None, None, None] * x + t[:, None, None, None] * noise
        loss = F.mse_loss(model(mixed, t, words), noise - x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        guided = model(mixed, t, words * 0).lerp(model(mixed, t, words), 3.0)
    return model, optimizer, losses, guided
