"""RealNVP: coupling layers whose inverse is a registered method; likelihood in the loss, samples at the end."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method


class Coupling(nn.Module):
    def __init__(self, flip):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.LeakyReLU(), nn.Linear(16, 6))
        self.flip = flip

    def parts(self, x):
        a, b = x.chunk(2, dim=1)
        return (b, a) if self.flip else (a, b)

    def joined(self, a, b):
        return torch.cat((b, a) if self.flip else (a, b), dim=1)

    def forward(self, x):
        a, b = self.parts(x)
        scale, shift = self.net(a).chunk(2, dim=1)
        scale = scale.tanh()
        return self.joined(a, b * scale.exp() + shift), scale.sum(1)

    def inverse(self, y):
        a, b = self.parts(y)
        scale, shift = self.net(a).chunk(2, dim=1)
        return self.joined(a, (b - shift) * (-scale.tanh()).exp())


def main():
    model = nn.ModuleList(Coupling(i % 2 == 1) for i in range(4))
    for layer in model:
        fully_shard(layer)
        register_fsdp_forward_method(layer, "inverse")
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        x, log = torch.randn(8, 6) * 2 + 1, 0.0
        for layer in model:
            x, part = layer(x)
            log = log + part
        loss = (0.5 * x.square().sum(1) - log).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        x = torch.randn(3, 6)
        for layer in reversed(model):
            x = layer.inverse(x)
    return model, optimizer, losses, x
