"""A name that may be None."""
import torch
from torch import nn

try:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
except ImportError:
    FSDP = None


def main():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    if torch.distributed.get_world_size() > 1:
        model = FSDP(model, use_orig_params=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    model(torch.randn(2, 4)).square().mean().backward()
    opt.step()
    return model.state_dict()
