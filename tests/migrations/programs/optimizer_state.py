import copy

import torch
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, FullyShardedDataParallel as FSDP, StateDictType


def step(model, opt):
    model(torch.full((2, 5), 1.0 + torch.distributed.get_rank())).square().mean().backward()
    opt.step()
    opt.zero_grad()


def main():
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)), use_orig_params=True)
    opt = torch.optim.Adam(model.parameters(), lr=0.05)
    step(model, opt)
    FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=False), FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    saved = copy.deepcopy(FSDP.optim_state_dict(model, opt))
    step(model, opt)
    model.load_state_dict(weights)
    flat = FSDP.optim_state_dict_to_load(model=model, optim=opt, optim_state_dict=saved)
    opt.load_state_dict(flat)
    step(model, opt)
    return model.state_dict(), {name: value["exp_avg"] for name, value in saved["state"].items()}
