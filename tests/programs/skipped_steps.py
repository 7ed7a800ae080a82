"""Steps whose loss is not finite on any rank are skipped by agreement; the batch after them trains on."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    model = nn.Sequential(nn.Linear(7, 18), nn.ReLU(), nn.Linear(18, 7))
    fully_shard(model[2])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(6):
        x = torch.randn(4, 7)
        if step in (1, 4) and dist.get_rank() == step % 2:
            x[0, 0] = float("nan")
        loss = F.mse_loss(model(x), torch.ones(4, 7))
        fine = loss.detach().isfinite().to(torch.int32)
        dist.all_reduce(fine, op=dist.ReduceOp.MIN)
        if not fine:
            continue  # the graph is dropped: no backward follows this forward
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
