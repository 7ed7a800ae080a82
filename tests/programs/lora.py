"""Own LoRA on a frozen base; adapters alone are given to the optimizer, merged at the end for an evaluation."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class LoRA(nn.Module):
    def __init__(self, base, rank=3, alpha=6.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale, self.merged = alpha / rank, False

    def forward(self, x):
        if self.merged:
            return F.linear(x, self.base.weight + self.scale * self.b @ self.a, self.base.bias)
        return self.base(x) + self.scale * F.linear(F.linear(x, self.a), self.b)


def main():
    model = nn.Sequential(*(nn.Sequential(LoRA(nn.Linear(14, 14)), nn.GELU()) for _ in range(3)), nn.Linear(14, 4))
    model[3].requires_grad_(False)
    for layer in model[:3]:
        fully_shard(layer)
    fully_shard(model)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=2e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        loss = F.cross_entropy(model(torch.randn(6, 14)), torch.randint(0, 4, (6,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for module in model.modules():
        if isinstance(module, LoRA):
            module.merged = True
    with torch.no_grad():
        merged = model(torch.randn(2, 14))
    return model, optimizer, losses, merged
