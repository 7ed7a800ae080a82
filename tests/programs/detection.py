"""Detection: several heads on features of several scales, losses weighed by learned uncertainties."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Detector(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(nn.Conv2d(c, width, 3, 2, 1), nn.ReLU()) for c in (3, width, width))
        self.lateral = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(3))
        self.boxes, self.classes = nn.Conv2d(width, 4, 3, padding=1), nn.Conv2d(width, 5, 3, padding=1)
        self.uncertainty = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        found, above = [], None
        for feature, lateral in zip(reversed(features), self.lateral, strict=True):
            y = lateral(feature)
            above = y if above is None else y + F.interpolate(above, size=y.shape[2:])
            found.append((self.boxes(above), self.classes(above)))
        return {"levels": found, "uncertainty": self.uncertainty * 1.0}


def main():
    model = Detector()
    for stage in model.stages:
        fully_shard(stage)
    fully_shard([*model.lateral, model.boxes, model.classes])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        found = model(torch.randn(2, 3, 16, 16))
        boxes = sum(F.smooth_l1_loss(b, torch.randn_like(b)) for b, _ in found["levels"])
        classes = sum(F.cross_entropy(c, torch.randint(0, 5, (2, *c.shape[2:]))) for _, c in found["levels"])
        sizes = sum(b.exp().mean() for b, _ in found["levels"])
        s = found["uncertainty"]
        loss = (torch.stack([boxes, classes, sizes]) * (-s).exp() + s).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
