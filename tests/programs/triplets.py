"""A metric is learned: three forwards of one network per loss, the hardest negative of the batch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    model = nn.Sequential(nn.Linear(9, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 4))
    fully_shard(model[2])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        anchor = torch.randn(5, 9)
        a, near, far = (F.normalize(model(x), dim=1) for x in (anchor, anchor + 0.1, torch.randn(5, 9)))
        hardest = far[(a @ far.T).argmax(1)]
        loss = F.triplet_margin_loss(a, near, hardest, margin=0.5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
