"""A program for `fullshard verify` whose model is sharded as `fullshard migrate` wrote it from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from fullshard import prepare_fully_shard
from fullshard.migrate import read_config
from fullshard.program import Program, shard_blocks
from tests.harness.verified import batch, loss

ENTRY = "tests.harness.converted:program"


class Block(nn.Module):
    """The class that configurations name."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Dropout(0.1), nn.Linear(33, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    """Tied, with dropout and uneven rows."""

    _no_split_modules = ["Block"]

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(38, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 38, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def program(path: str) -> Program:
    """`path`: of the settings."""
    config = read_config(path)

    def shard(model: Any, fully_shard: Callable[..., Any]) -> None:
        if not dist.is_initialized():  # plain training asks where inputs are cast
            return shard_blocks(model, fully_shard)
        source = config.initialisation.source
        given = {name: p.detach().clone() for name, p in model.named_parameters()}
        if source == "meta" or (source == "mixed" and dist.get_rank()):
            model.to_empty(device="meta")
            model.head.weight = model.embedding.weight
        prepared = prepare_fully_shard(model, None, config, show=False)
        assert not prepared.uninitialised and model.head.weight is model.embedding.weight
        if source == "meta":  # initialised anew: training is compared from the values of the plain model
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(distribute_tensor(given[name], p.device_mesh, p.placements, src_data_rank=None))

    return Program(Model, loss, batch, shard=shard)
