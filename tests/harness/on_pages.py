"""What a reader of the documents has already: imports, a model, an optimizer, batches. Set-ups of pages import it all.

<!-- run: setup
from tests.harness.on_pages import *
model, optimizer = sharded()
-->
"""

from __future__ import annotations

import pathlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import checkpoint, fully_shard
from tests.harness import models

__all__ = [
    "F", "Tensor", "Transformer", "checkpoint", "dist", "fullshard", "fully_shard", "init_device_mesh", "lm_batches",
    "nn", "pathlib", "plain", "shard", "sharded", "tokens", "torch",
]  # fmt: skip

tokens = torch.arange(12).reshape(3, 4)


class Transformer(models.Transformer):
    """A small language model; its blocks are `layers`, and `blocks`."""

    @property
    def blocks(self) -> nn.ModuleList:
        return self.layers

    @torch.no_grad()
    def generate(self, tokens: Tensor) -> Tensor:
        """The next token of each line, four times."""
        for _ in range(4):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


def plain() -> Transformer:
    return models.seeded(Transformer)  # type: ignore[return-value]


def shard(model: Transformer) -> Transformer:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def sharded() -> tuple[Transformer, torch.optim.Optimizer]:
    model = shard(plain())
    return model, torch.optim.AdamW(model.parameters())


def lm_batches(count: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Tokens, and those that come next."""
    return [(tokens, tokens + 1) for _ in range(count)]
