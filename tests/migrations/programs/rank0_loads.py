"""Rank 0 has the weights, the others have the meta device."""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main():
    torch.manual_seed(0)
    if dist.get_rank() == 0:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    else:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model = FSDP(
        model,
        sync_module_states=True,
        device_id=torch.device("cpu"),
        param_init_fn=(lambda m: m.to_empty(device="cpu", recurse=False)) if dist.get_rank() else None,
    )
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    model(torch.randn(4, 4)).square().mean().backward()
    opt.step()
    return model.state_dict()
