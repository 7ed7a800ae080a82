"""Model and optimizer, saved and loaded in one context each, by functions of a Trainer."""
import copy

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    StateDictType,
)


class Trainer:
    def __init__(self, lr=0.05):
        self.model = FSDP(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)), use_orig_params=True)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)

    def step(self):
        self.model(torch.full((2, 5), 1.0 + torch.distributed.get_rank())).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self):
        with FSDP.state_dict_type(
            self.model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(rank0_only=False),
            FullOptimStateDictConfig(rank0_only=False),
        ):
            # both in one file
            state = {"model": self.model.state_dict(), "optimizer": FSDP.optim_state_dict(self.model, self.optimizer)}
        return copy.deepcopy(state)

    def load(self, state):
        with FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT):
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(FSDP.optim_state_dict_to_load(self.model, self.optimizer, state["optimizer"]))


def main():
    torch.manual_seed(0)
    trainer = Trainer()
    trainer.step()
    state = trainer.save()
    trainer.step()
    trainer.load(state)
    trainer.step()
    return trainer.save()["model"]
