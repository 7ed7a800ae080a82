"""A checkpoint by torch's DCP in the middle; a new model and optimizer load it and train on."""

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def built(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 19), nn.Tanh(), nn.Linear(19, 19), nn.Tanh(), nn.Linear(19, 7))
    fully_shard(model[2])
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = F.mse_loss(model(x), x.sort(dim=1).values)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    model, optimizer = built(0)
    losses = train(model, optimizer, range(3))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=folder[0])
    model, optimizer = built(1)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses += train(model, optimizer, range(3, 6))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return model, optimizer, losses
