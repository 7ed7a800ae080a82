"""Built on the meta device, sharded, given memory, filled with values by every rank for its own rows."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(11, 23), nn.ReLU(), nn.Linear(23, 11)) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            if p.ndim == 1:
                p.zero_()
            else:
                p.fill_(0.0)
                p.add_(torch.full((), 0.01 * (i + 1), dtype=p.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        x = torch.randn(5, 11)
        loss = F.mse_loss(model(x), x.roll(1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
