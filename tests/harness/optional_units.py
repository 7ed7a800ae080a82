"""A model with units that only some ranks run in a step, its batches, and who runs what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard

PARTS = ("tower", "layer", "aux")
WIDTH = 6


class Block(nn.Module):
    def __init__(self, hidden: int = 5) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    """An encoder with units inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(3 + i) for i in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x)
        for block in self.blocks:
            x = block(x)
        return x


class Model(nn.Module):
    """`parts`: which of PARTS run. `again`: blocks are recomputed in backward."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.tower = Tower()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.aux = nn.Linear(WIDTH, 4)
        self.head = nn.Linear(WIDTH, 4)
        self.again = again

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(module, x, use_reentrant=False) if self.again and self.training else module(x)

    def forward(self, x: Tensor, parts: Sequence[str], zero: Sequence[str] = ()) -> Tensor:
        """`zero`: parts that run, and count nothing."""
        x = self.embed(x)
        if "tower" in parts:
            x = x + self.run(self.tower, x)
        elif "tower" in zero:
            x = x + self.run(self.tower, x) * 0
        for i, layer in enumerate(self.layers):
            if i != 1 or "layer" in parts:
                x = self.run(layer, x)
            elif "layer" in zero:
                x = x + self.run(layer, x) * 0
        out = x.new_zeros(len(x), 4)
        if "aux" in parts:
            out = out + self.aux(x)
        elif "aux" in zero:
            out = out + self.aux(x) * 0
        return out + self.head(x)


OPTIONAL = ("tower", "layers.1", "aux")
UNITS = ("tower.blocks.0", "tower.blocks.1", "tower", "layers.0", "layers.1", "layers.2", "aux")


def shard(model: Model, fully_shard: Callable[..., Any] = fullshard.fully_shard, *, mark: bool, **options: Any) -> Any:
    for name in UNITS:
        given = {"optional": True} if mark and name in OPTIONAL else {}
        fully_shard(model.get_submodule(name), **given, **options)
    return fully_shard(model, **{**options, "reshard_after_forward": None})


def parts_of(step: int, rank: int) -> list[str]:
    """Each part runs on all ranks, on some, and on none, in some step."""
    return [part for i, part in enumerate(PARTS) if (step * 5 + rank * (i + 2) + i * step) % 3 == 0]


def batch(step: int, rank: int, micro: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(3, WIDTH, generator=generator), torch.randn(3, 4, generator=generator)


def loss_of(model: nn.Module, step: int, rank: int, parts: Sequence[str], micro: int = 0, **given: Any) -> Tensor:
    inputs, targets = batch(step, rank, micro)
    return F.mse_loss(model(inputs, parts, **given), targets)


STEPS = range(6)
