"""A sharded checkpoint by DCP, written and read."""
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardedStateDictConfig, StateDictType


def train(model, steps):
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    for _ in range(steps):
        model(torch.randn(4, 5)).square().mean().backward()
        opt.step(); opt.zero_grad()


def main():
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)), use_orig_params=True)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    train(model, 2)
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    train(model, 1)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    model.load_state_dict(state["model"])
    with FSDP.summon_full_params(model, writeback=False):
        return {name: p.detach().clone() for name, p in model.named_parameters()}
