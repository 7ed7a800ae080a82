"""A model of a hub, saved by its own method on the main process."""
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM


def is_main_process():
    return torch.distributed.get_rank() == 0


def finish(model, tokenizer, folder):
    if not is_main_process():
        return
    model.module.save_pretrained(folder)  # told
    tokenizer.save_pretrained(folder)
    torch.save(model.module, f"{folder}/whole.pt")  # told


def main():
    model = AutoModelForCausalLM.from_pretrained("x")
    model = DistributedDataParallel(model)
    finish(model, None, "out")
