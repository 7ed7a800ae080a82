"""A subclass with methods of its own."""
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType


class Engine(FullyShardedDataParallel):
    def __init__(self, module, lr):
        super().__init__(module, use_orig_params=True)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=lr)

    def update(self, batch):
        loss = self(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def weights(self):
        with self.state_dict_type(self, StateDictType.FULL_STATE_DICT):
            return self.state_dict()


def main():
    torch.manual_seed(0)
    engine = Engine(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    return [engine.update(torch.randn(4, 4)) for _ in range(2)], isinstance(engine.module, Engine), engine.weights()
