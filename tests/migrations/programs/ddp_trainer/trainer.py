import torch
from torch.nn.parallel import DistributedDataParallel


class Trainer:
    def __init__(self, model, lr):
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.model = DistributedDataParallel(model)

    def train(self, steps):
        losses = []
        for i in range(steps):
            if i % 2 == 0:
                with self.model.no_sync():
                    losses.append(self.backward())
            else:
                losses.append(self.backward())
                self.optimizer.step()
                self.optimizer.zero_grad()
        return losses, self.snapshot()

    def backward(self):
        loss = self.model(torch.randn(2, 4)).square().mean()
        loss.backward()
        return loss.item()

    def snapshot(self):
        return self.model.module.state_dict()
