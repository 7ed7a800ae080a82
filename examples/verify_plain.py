"""A plain model for `fullshard verify`; run it in this folder: fullshard verify verify_plain:program"""

import torch
from torch import nn

import fullshard


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(8, 20, generator=generator)
    return x, x.sum(1, keepdim=True)


def program() -> fullshard.Program:
    return fullshard.Program(
        model=lambda: nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 1)),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        batch=batch,
    )
