"""FSDP or DDP, as a flag says; the code after it is for both."""
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP


def wrapped(model, how):
    if how == "fsdp":
        model = FSDP(model, use_orig_params=True)
    else:
        model = DDP(model, broadcast_buffers=False)
    return model


def train(how):
    torch.manual_seed(0)
    model = wrapped(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(2):
        with model.no_sync():
            model(torch.randn(4, 4)).square().mean().backward()
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name.removeprefix("module."): value for name, value in model.state_dict().items()}


def main():
    return train("fsdp"), train("ddp")
