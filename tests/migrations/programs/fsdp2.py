"""Torch's FSDP2: only the import changes."""
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    for layer in model:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    fully_shard(model)
    assert isinstance(model, FSDPModule)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    model.set_requires_gradient_sync(False)
    model(torch.randn(2, 4)).square().mean().backward()
    model.set_requires_gradient_sync(True)
    model(torch.randn(2, 4)).square().mean().backward()
    opt.step()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}
