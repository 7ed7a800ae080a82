"""An own mixture of experts: the top expert of each token runs, an expert without tokens does not; balance loss."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class MoE(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x):
        chances = self.router(x).softmax(-1)
        weight, chosen = chances.max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        share = F.one_hot(chosen, len(self.experts)).to(x.dtype).mean(0)
        return x + out, len(self.experts) * (share * chances.mean(0)).sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(MoE(10, 4) for _ in range(2))
        self.head = nn.Linear(10, 10)

    def forward(self, x):
        balance = 0.0
        for layer in self.layers:
            x, part = layer(x)
            balance = balance + part
        return self.head(x), balance


def main():
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        x = torch.randn(3, 10)  # fewer tokens than experts: some are idle, on each rank others
        y, balance = model(x)
        loss = F.mse_loss(y, x.roll(1, 1)) + 0.01 * balance
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
