"""The model is wrapped, clipped and saved by a module beside the program."""
import torch
from torch import nn

import wrapping
from wrapping import save as save_weights


class Block(nn.Linear):
    pass


def main():
    torch.manual_seed(0)
    model, optimizer = wrapping.prepare(nn.Sequential(Block(4, 8), Block(8, 4)), Block)
    torch.manual_seed(torch.distributed.get_rank())
    norms = []
    for _ in range(2):
        with model.no_sync():
            model(torch.randn(2, 4)).square().mean().backward()
        model(torch.randn(2, 4)).square().mean().backward()
        norms.append(wrapping.clip(model))
        optimizer.step()
        optimizer.zero_grad()
    return norms, save_weights(model)
