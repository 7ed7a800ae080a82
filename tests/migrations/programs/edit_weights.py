"""Reads and edits full parameters."""
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main():
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)), use_orig_params=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    with FSDP.summon_full_params(model):
        with torch.no_grad():
            model[0].weight.mul_(0.5)
    with FSDP.summon_full_params(model, writeback=False, offload_to_cpu=False):
        before = model[0].weight.detach().clone()
    torch.manual_seed(torch.distributed.get_rank())
    model(torch.randn(4, 5)).square().mean().backward()
    total = FSDP.clip_grad_norm_(model, 0.5, norm_type=1.0)
    opt.step()
    return before, float(total), model.state_dict()
