"""One run of one library under one strategy, and names as the plain model has them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from .strategy import Strategy

SEED = 1234
# Of the loss in fp16, at first. A power of two: scaling and its inverse are exact.
SCALE = 2.0**10
# Of names, what wrappers around modules add.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class Setting(NamedTuple):
    """One run. `library`: "fullshard", "torch" (its FSDP2), "fsdp1" or "ddp"."""

    entry: str
    library: str
    strategy: Strategy
    world: int
    steps: int
    device: str

    @property
    def name(self) -> str:
        return f"{self.library} {self.strategy} world={self.world}"

    @property
    def data_world(self) -> int:
        """How many ranks take batches of their own; those of one tensor-parallel group share one."""
        return self.world // self.strategy.tensor

    def data_rank(self, rank: int) -> int:
        return rank // self.strategy.tensor

    @property
    def is_fsdp2(self) -> bool:
        return self.library in ("fullshard", "torch")

    @property
    def shards(self) -> int:
        return self.strategy.shards(self.world)


def seed_of(index: int) -> int:
    """The seed of the generators before the forward with batch `index`, for dropout."""
    return SEED + 1 + index


def seed_generators(seed: int) -> None:
    """Seed torch's generators, Python's `random`, and numpy's if the program imported it."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def batch_index(setting: Setting, step: int, micro: int, data_rank: int) -> int:
    """The number of the batch that a rank takes."""
    return (step * setting.strategy.micro + micro) * setting.data_world + data_rank


def clean(name: str) -> str:
    """The name in the plain model."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter once, under its name in the plain model."""
    for name, parameter in model.named_parameters():
        yield clean(name), parameter


def ties_of(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of each parameter that has several."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(clean(name))
    return sorted(tuple(names) for names in found.values() if len(names) > 1)
