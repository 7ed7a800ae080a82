"""Blocks are wrapped one by one and put back, then the model; and full weights are loaded into that."""
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def main():
    torch.manual_seed(0)
    model = Net()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = FSDP(block, use_orig_params=True)
    model = FSDP(model, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = {name: value.clone() * 0.5 for name, value in model.state_dict().items()}
        model.load_state_dict(state)
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    return len(FSDP.fsdp_modules(model)), model.state_dict()
