"""A model of `optional_units.py` with optional units inside of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from tests.harness.models import Trained, adamw, collect, seeded
from tests.harness.optional_units import WIDTH, Block, batch

PARTS = ("tower", "inner", "deep", "layer")
STEPS = range(6)


class Inner(nn.Module):
    """An optional unit with one inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.deep = Block(4)

    def forward(self, x: Tensor, parts: Sequence[str]) -> Tensor:
        x = self.mix(x)
        return self.deep(x) if "deep" in parts else x


class Tower(nn.Module):
    def __init__(self, again: str) -> None:
        super().__init__()
        self.patch = nn.Linear(WIDTH, WIDTH)
        self.first = Block(3)
        self.inner = Inner()
        self.last = Block(2)
        self.again = again if again.startswith("each") else ""

    def forward(self, x: Tensor, parts: Sequence[str]) -> Tensor:
        x = run(self.again, self.first, self.patch(x))
        if "inner" in parts:
            x = x + self.inner(x, parts)
        return run(self.again, self.last, x)


def run(again: str, module: nn.Module, *args: Any) -> Tensor:
    if again and torch.is_grad_enabled():
        return checkpoint(module, *args, use_reentrant="reentrant" in again)
    return module(*args)


class Model(nn.Module):
    """`again`: what is recomputed in backward: "" nothing, or "each" or "around", and whether reentrant."""

    def __init__(self, again: str = "") -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.tower = Tower(again)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        self.again = again

    def forward(self, x: Tensor, parts: Sequence[str]) -> Tensor:
        x = self.embed(x)
        if "tower" in parts:
            x = x + run(self.again if self.again.startswith("around") else "", self.tower, x, parts)
        for i, layer in enumerate(self.layers):
            if i != 1 or "layer" in parts:
                x = run(self.again, layer, x)
        return self.head(x)


OPTIONAL = ("tower", "tower.inner", "tower.inner.deep", "layers.1")
UNITS = ("tower.first", "tower.inner.deep", "tower.inner", "tower.last", "tower", "layers.0", "layers.1", "layers.2")


def parts_of(step: int, rank: int) -> list[str]:
    """Each part runs on all ranks, on some and on none, in some step; and each set of parts on some rank."""
    bits = (step * 7 + rank * 5 + 3) % 16
    return [part for i, part in enumerate(PARTS) if bits >> i & 1]


def loss_of(model: nn.Module, step: int, rank: int, micro: int = 0) -> Tensor:
    inputs, targets = batch(step, rank, micro)
    loss: Tensor = (model(inputs, parts_of(step + micro, rank)) - targets).square().mean()
    return loss


def reference(world: int, frozen: str = "") -> Trained:
    model = seeded(Model)
    freeze(model, frozen)
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    for step in STEPS:
        optimizer.zero_grad()
        (sum(loss_of(model, step, rank) for rank in range(world)) / world).backward()
        optimizer.step()
    return collect(model, optimizer)


def freeze(model: nn.Module, frozen: str) -> None:
    if frozen:
        model.get_submodule(frozen).requires_grad_(False)


def shard(model: Model, **options: Any) -> Any:
    for name in UNITS:
        given = {"optional": True} if name in OPTIONAL else {}
        fullshard.fully_shard(model.get_submodule(name), **given, **options)
    return fullshard.fully_shard(model, **{**options, "reshard_after_forward": None})
