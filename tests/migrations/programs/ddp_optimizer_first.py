"""The optimizer is older than DDP, and the model is built where it is wrapped."""
import torch
import torch.nn.parallel as parallel
from torch import nn


def setup():
    net = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    net = parallel.DistributedDataParallel(net)
    return net, optimizer, schedule


def main():
    torch.manual_seed(0)
    model, optimizer, schedule = setup()
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(3):
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.module.state_dict()
