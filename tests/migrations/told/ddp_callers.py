"""The condition is in the caller, the state dicts are in the function."""
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def save(model, optimizer, path):
    torch.save({
        "model": model.module.state_dict(),  # told
        "optimizer": optimizer.state_dict(),  # told
    }, path)


def load(model, optimizer, path):
    state = torch.load(path)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])  # told


def main(gpu_id=0):
    model = DDP(nn.Linear(4, 4), device_ids=[gpu_id])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        if gpu_id == 0 and epoch % 2 == 0:
            save(model, optimizer, "x.pt")
