"""An MLP-Mixer whose blocks are shared in pairs, on one rank: the world that costs nothing."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Mixer(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.over_width = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.over_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_width(self.norm2(x))


def main():
    first, second = Mixer(9, 10), Mixer(9, 10)
    model = nn.Sequential(nn.Linear(4, 10), first, second, first, second, nn.Linear(10, 4))
    for block in (first, second):
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    losses = []
    for _ in range(4):
        x = torch.randn(3, 9, 4)
        loss = F.mse_loss(model(x), x.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
