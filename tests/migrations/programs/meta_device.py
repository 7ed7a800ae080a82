"""Rank 0 has the weights, the others an empty model."""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def build():
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def main():
    torch.manual_seed(3)
    if dist.get_rank() == 0:
        model, param_init_fn = build(), None
    else:
        with torch.device("meta"):
            model = build()
        param_init_fn = lambda module: module.to_empty(device=torch.device("cpu"), recurse=False)
    model = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        param_init_fn=param_init_fn,
        sync_module_states=True,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()
