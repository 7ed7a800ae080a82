"""One run of one library under one strategy, and names as the plain model has them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .strategy import Strategy

SEED = 1234
# Of the loss in fp16, at first. A power of two: scaling and its inverse are exact.
SCALE = 2.0**10
# Of names, what wrappers around modules add.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class Setting(NamedTuple):
    """One run. `library`: "fullshard", "torch" (its FSDP2), "fsdp1" or "ddp". `exercises`: what is done beside steps,
    of `EXERCISES`. `watched`: record what each rank's backward made, too; `prefetch`: as the library does by itself, or
    none: see experiments.py."""

    entry: str
    library: str
    strategy: Strategy
    world: int
    steps: int
    device: str
    exercises: tuple[str, ...] = ()
    watched: bool = False
    prefetch: bool = True

    @property
    def name(self) -> str:
        return f"{self.library} {self.strategy} world={self.world}"

    @property
    def data_world(self) -> int:
        """How many ranks take batches of their own; those along `pp`, `tp` and `cp` share one."""
        return self.world // self.strategy.pipeline // self.strategy.alike

    def data_rank(self, rank: int) -> int:
        return rank % (self.world // self.strategy.pipeline) // self.strategy.alike

    def ranks_of(self, data_rank: int) -> range:
        """The first rank with its batches in each part of the pipeline, which is the outermost axis."""
        return range(data_rank * self.strategy.alike, self.world, self.world // self.strategy.pipeline)

    def leads(self, rank: int) -> bool:
        """Whether the rank writes full tensors: the first one, and the first of each part of a pipeline."""
        return rank % (self.world // self.strategy.pipeline) == 0

    @property
    def output_dtype(self) -> torch.dtype:
        """Returns the dtype that the exercise of this name casts outputs to: a dtype in which the strategy does not
        compute."""
        return torch.bfloat16 if self.strategy.dtype is None else torch.float32

    @property
    def is_fsdp2(self) -> bool:
        return self.library in ("fullshard", "torch")

    @property
    def shards(self) -> int:
        return self.strategy.shards(self.world)


# What is done beside steps: see exercises.py.
EXERCISES = ("clipping", "evaluation", "state dicts", "checkpoint", "another world", "full_params", "output_dtype")


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


@contextmanager
def evaluating(model: nn.Module, mode: str) -> Iterator[None]:
    """The model is in evaluation mode, under `torch.no_grad` or `torch.inference_mode`; "no_grad, training": with its
    dropout and its updates of buffers."""
    model.train(mode.endswith("training"))
    try:
        with torch.inference_mode() if mode == "inference_mode" else torch.no_grad():
            yield
    finally:
        model.train()


def written(value: Tensor) -> Tensor:
    """Returns the value that the exercise of full_params writes to a parameter: other values in each row, near to the
    old ones."""
    if not value.is_floating_point():
        return value
    pattern = (1 + torch.arange(value.numel(), device=value.device) % 7).view(value.shape) / 64
    return value + pattern.to(value.dtype)
