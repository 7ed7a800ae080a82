"""Each block is wrapped by the program itself, then the whole."""
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([FSDP(nn.Linear(4, 4), use_orig_params=True) for _ in range(3)])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


def main():
    torch.manual_seed(0)
    model = FSDP(Net(), torch.distributed.group.WORLD, backward_prefetch=BackwardPrefetch.BACKWARD_POST, forward_prefetch=True, use_orig_params=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(2):
        model(torch.randn(4, 4)).square().mean().backward()
        opt.step(); opt.zero_grad()
    return model.state_dict()
