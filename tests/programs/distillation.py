"""Distillation: a large frozen teacher, sharded too, a small student, losses on logits and on hidden states."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.first = nn.Linear(10, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
        self.head = nn.Linear(width, 6)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x), x


def main():
    teacher, student, bridge = Net(40, 4).requires_grad_(False).eval(), Net(12, 2), nn.Linear(12, 40)
    for net in (teacher, student):
        for layer in net.layers:
            fully_shard(layer)
        fully_shard(net)
    fully_shard(bridge)
    optimizer = torch.optim.AdamW([*student.parameters(), *bridge.parameters()], lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        x, label = torch.randn(5, 10), torch.randint(0, 6, (5,))
        with torch.no_grad():
            wanted, inside = teacher(x)
        logits, hidden = student(x)
        soft = F.kl_div(
            (logits / 2).log_softmax(-1), (wanted / 2).log_softmax(-1), log_target=True, reduction="batchmean"
        )
        loss = 4 * soft + 0.5 * F.cross_entropy(logits, label) + 0.1 * F.mse_loss(bridge(hidden), inside)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return student, bridge, teacher, optimizer, losses
