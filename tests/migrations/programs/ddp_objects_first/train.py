"""Model and optimizer are built by one function, and wrapped by a class that gets both."""
import torch
from torch import nn

from trainer import Trainer


def load_train_objs():
    data = [torch.randn(4, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return data, model, optimizer


def main():
    torch.manual_seed(0)
    data, model, optimizer = load_train_objs()
    trainer = Trainer(model, data, optimizer, gpu_id=torch.distributed.get_rank())
    return trainer.train(1), trainer.snapshot()
