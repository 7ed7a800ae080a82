"""Lightning Fabric: its setup, backward, accumulation and clipping around a model sharded in `parallelize_fn`."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard


def parallelize(model, mesh):
    for layer in model:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def main():
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT="1")  # the group is there already
    strategy = ModelParallelStrategy(parallelize, world, 1, process_group_backend="gloo")
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, plugins=[LightningEnvironment()])
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup_module(
        nn.Sequential(*(nn.Sequential(nn.Linear(8, 20), nn.GELU(), nn.Linear(20, 8)) for _ in range(3)))
    )
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    torch.manual_seed(1 + rank)
    losses = []
    for _ in range(3):
        for micro in range(2):
            x = torch.randn(5, 8)
            with fabric.no_backward_sync(model, enabled=micro == 0):
                loss = F.mse_loss(model(x), x.roll(1, 1))
                fabric.backward(loss)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return model.module, optimizer.optimizer, losses
