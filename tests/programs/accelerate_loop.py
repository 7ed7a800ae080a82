"""Accelerate's data loader, which gives every rank its batches, around a model that the program sharded itself."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.data_loader import prepare_data_loader
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader


def main():
    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 20), nn.SiLU(), nn.Linear(20, 8)) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    data = torch.randn(32, 8, generator=torch.Generator().manual_seed(3))
    loader = prepare_data_loader(
        DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(7)),
        num_processes=world, process_index=rank, put_on_device=False,
    )  # fmt: skip
    losses = []
    for _ in range(2):
        for x in loader:
            loss = F.mse_loss(model(x), x.roll(1, 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        schedule.step()
    return model, optimizer, losses
