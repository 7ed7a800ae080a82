"""What is about FSDP1's flat parameters has no counterpart."""
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, LocalStateDictConfig, StateDictType


def main():
    model = FSDP(nn.Linear(4, 4))
    model.register_comm_hook(None, default_hooks.allreduce_hook)  # told
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()):  # told
        torch.save(model.state_dict(), f"{torch.distributed.get_rank()}.pt")
    with FSDP.summon_full_params(model, with_grads=True):  # told
        print(model.weight.grad)
