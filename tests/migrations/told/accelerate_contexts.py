"""A model that Accelerate wrapped, saved in a context of FSDP1."""
import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel as FSDP, StateDictType


def save(accelerator, model, path):
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)  # told
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):  # told
        state = model.state_dict()
    if accelerator.is_main_process:
        torch.save(state, path)


def main():
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    save(accelerator, model, "x.pt")
