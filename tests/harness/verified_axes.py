"""Programs for `fullshard verify` whose layers are divided over `tp`: by their own styles, and with faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fullshard import Parallelism
from fullshard.migrate.declared import parallelize_by
from fullshard.program import Program
from tests.harness.axes import batch as tokens
from tests.harness.axes import llama, loss


def declared() -> Program:
    """The trainer's model, which has styles with sequence parallelism."""
    return Program(llama, loss, lambda index: tokens(index, 0))


def other_data() -> Program:
    """Batches that depend on the rank: those along `tp` get different ones."""

    def batch(index: int) -> Tensor:
        return tokens(index, dist.get_rank() if dist.is_initialized() else 0)

    return replace(declared(), batch=batch)


def other_data_by_hand() -> Program:
    """The same with a division of the program's own."""
    return replace(other_data(), parallelize=parallelize_by(Parallelism(2, False)))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.RMSNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], -1, 3, 4).unbind(3)
        heads = [each.transpose(1, 2) for each in (self.norm(q), k, v)]
        return x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Heads(nn.Module):
    """A norm over the width of each head, which sees the heads of one rank. `styles`: of the model itself."""

    styles: dict[str, str] = {"layers.*.qkv": "column", "layers.*.norm": "heads", "layers.*.out": "row"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(_Attention() for _ in range(2))

    def parallel_styles(self, *, sequence: bool) -> dict[str, str]:
        return self.styles

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class WithoutNorm(Heads):
    """The norm is left out: each rank's gradient of it is that of its own heads."""

    styles = {"layers.*.qkv": "column", "layers.*.out": "row"}  # noqa: RUF012


def heads() -> Program:
    return Program(Heads, loss, lambda index: tokens(index, 0))


def wrong_style() -> Program:
    return Program(WithoutNorm, loss, lambda index: tokens(index, 0))


def forgotten_sum() -> Program:
    """What a row layer returns is this rank's summand, which nothing adds."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
        for layer in model.layers:  # type: ignore[union-attr]
            row: Any = RowwiseParallel(output_layouts=Partial(), use_local_output=True)
            parallelize_module(layer, mesh, {"qkv": ColwiseParallel(), "out": row})

    return replace(heads(), parallelize=parallelize)
