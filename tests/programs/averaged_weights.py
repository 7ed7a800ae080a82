"""Stochastic weight averaging with torch's `AveragedModel`, an average that is evaluated and trained no further."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import SWALR, AveragedModel


def shard(model):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def main():
    model = nn.Sequential(nn.Linear(8, 20), nn.GELU(), nn.Linear(20, 20), nn.GELU(), nn.Linear(20, 8))
    average = AveragedModel(model)
    shard(average.module)
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(6):
        x = torch.randn(4, 8)
        loss = F.mse_loss(model(x), x.cumsum(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 2:
            average.update_parameters(model)
            schedule.step()
        with torch.no_grad():
            losses += [loss.item(), F.mse_loss(average(x), x.cumsum(1)).item()]
    return model, average, optimizer, losses
