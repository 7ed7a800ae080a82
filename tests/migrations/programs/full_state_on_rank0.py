import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def save(model):
    save_policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, save_policy):
        cpu_state = model.state_dict()
        # only rank 0 has it
    if dist.get_rank() == 0:
        assert set(cpu_state) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    return cpu_state if dist.get_rank() == 0 else None


def main():
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    model(torch.randn(4, 5)).square().mean().backward()
    opt.step()
    return save(model)
