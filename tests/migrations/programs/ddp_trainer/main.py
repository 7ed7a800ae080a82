import torch
from torch import nn
from trainer import Trainer


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1 + torch.distributed.get_rank())
    return Trainer(model, lr=0.1).train(4)
