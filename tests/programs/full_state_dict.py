"""A full state dict on rank 0, saved by torch.save, given to a model on the meta device from rank 0 alone."""

import io

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard


def built():
    model = nn.Sequential(nn.Embedding(15, 9), nn.Flatten(), nn.Linear(27, 15))
    fully_shard(model[0])
    return fully_shard(model)


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in steps:
        tokens = torch.randint(0, 15, (4, 3), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = F.cross_entropy(model(tokens), tokens.sum(1) % 15)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    model = built()
    losses = train(model, range(3))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    file = io.BytesIO()
    if dist.get_rank() == 0:
        torch.save(full, file)
    file.seek(0)
    with torch.device("meta"):
        model = built()
    model.to_empty(device="cpu")
    state = torch.load(file) if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    losses += train(model, range(3, 6))
    return model, losses
