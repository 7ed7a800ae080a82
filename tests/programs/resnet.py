"""A residual network: running statistics of batch norms stay each rank's own; SGD with momentum, a step schedule."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Bottleneck(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Identity()
        if stride > 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


def main():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        Bottleneck(8, 8, 1), Bottleneck(8, 13, 2), Bottleneck(13, 16, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    for block in model[3:6]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        model.train()
        loss = F.cross_entropy(model(torch.randn(4, 3, 12, 12)), torch.randint(0, 10, (4,)), label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        model.eval()
        with torch.no_grad():
            losses += [loss.item(), model(torch.randn(2, 3, 12, 12)).sum().item()]
    return model, optimizer, losses
