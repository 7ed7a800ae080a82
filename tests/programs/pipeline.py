"""A pipeline of two stages, each sharded over two ranks: torch's 1F1B schedule with four micro-batches."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def main():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place = mesh.get_local_rank("pp")
    layers = [nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 8)) for _ in range(4)]
    model = nn.Sequential(*layers[2 * place : 2 * place + 2])
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    stage = PipelineStage(model, place, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + mesh.get_local_rank("dp"))
    losses = []
    for _ in range(3):
        x = torch.randn(8, 8)
        if place == 0:
            schedule.step(x)
        else:
            found = []
            schedule.step(target=x.flip(1), losses=found)
            losses.append(torch.stack(found).mean().item())
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, losses
