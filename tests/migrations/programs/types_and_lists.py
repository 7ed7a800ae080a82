"""isinstance, annotations, and the list of wrapped modules."""
from typing import Optional

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def count(model: FSDP) -> int:
    return sum(isinstance(module, (FSDP, nn.Bilinear)) for module in model.modules()) + len(FSDP.fsdp_modules(model))


def clip(model: Optional[FSDP] = None, max_norm: float = 0.2) -> float:
    assert isinstance(model, FSDP)
    return float(FSDP.clip_grad_norm_(model, max_norm))


def main():
    torch.manual_seed(0)
    model: nn.Module = FSDP(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    model(torch.randn(4, 4)).square().mean().backward()
    norm = clip(model)
    opt.step()
    return count(model), norm, model.state_dict()
