"""The wrapped model is an attribute."""
from __future__ import annotations

import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType


class Trainer:
    def __init__(self, model: nn.Module, lr: float = 0.05):
        self.model = model
        self.model = FSDP(self.model, use_orig_params=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)

    def step(self, batches):
        for batch in batches[:-1]:
            with self.model.no_sync():
                self.loss(batch).backward()
        loss = self.loss(batches[-1])
        loss.backward()
        norm = self.model.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), float(norm)

    def loss(self, batch):
        return self.model(batch).square().mean()

    def weights(self):
        with FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT), torch.no_grad():
            return self.model.state_dict()


def main():
    torch.manual_seed(0)
    trainer = Trainer(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))
    torch.manual_seed(torch.distributed.get_rank())
    out = [trainer.step([torch.randn(2, 4) for _ in range(3)]) for _ in range(2)]
    return out, trainer.weights()
