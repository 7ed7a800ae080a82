"""DDP is made where no line can go before it: nothing changes, and each line is named."""
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main(distributed=True):
    net = nn.Linear(4, 4)
    model = DDP(net) if distributed else net  # told
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
    return model.module.state_dict() if distributed else model.state_dict()
