"""Programs for `fullshard verify` whose sequences are cut over `cp`, or experts over `ep`: sound, and with faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard import FSDPModule
from fullshard.program import Program, shard_blocks
from tests.harness.axes import TOKENS, llama
from tests.harness.axes import batch as tokens


def batch(index: int) -> dict[str, Tensor]:
    """Whole sequences, with positions: what is cut with them."""
    whole = tokens(index, 0)
    positions = torch.arange(TOKENS).expand(len(whole), TOKENS)
    return {"inputs": whole[:, :-1], "targets": whole[:, 1:], "positions": positions}


def loss(model: nn.Module, parts: dict[str, Tensor]) -> Tensor:
    logits = model(parts["inputs"], parts["positions"][0])
    return F.cross_entropy(logits.flatten(0, 1), parts["targets"].flatten())


def sequences() -> Program:
    return Program(llama, loss, batch)


def without_positions() -> Program:
    """Each part of a sequence is taken for its beginning."""

    def wrong(model: nn.Module, parts: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(parts["inputs"]).flatten(0, 1), parts["targets"].flatten())

    return replace(sequences(), loss=wrong)


def own_mean() -> Program:
    """The sum over this rank's tokens, divided by their number, which the context does not see."""

    def wrong(model: nn.Module, parts: dict[str, Tensor]) -> Tensor:
        logits = model(parts["inputs"], parts["positions"][0]).flatten(0, 1)
        summed = F.cross_entropy(logits, parts["targets"].flatten(), reduction="sum")
        return summed / tokens(0, 0)[:, 1:].numel()

    return replace(sequences(), loss=wrong)


def other_data() -> Program:
    """Batches that depend on the rank: those along `cp` get different ones."""
    rank = lambda: dist.get_rank() if dist.is_initialized() else 0  # noqa: E731
    return replace(sequences(), batch=lambda index: batch(10 * index + rank()))


def _without_cp(model: nn.Module, fully_shard: Callable[..., Any]) -> None:
    """Parameters on the ranks of one part of the sequences: those along `cp` train different models."""
    from torch.distributed.device_mesh import init_device_mesh

    given: dict[str, Any] = {}
    if dist.is_initialized():
        given["mesh"] = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("part", "cp"))["part"]
    shard_blocks(model, partial(fully_shard, **given))


def cp_left_out() -> Program:
    return replace(sequences(), shard=_without_cp)


def of_experts() -> Program:
    make = partial(llama, experts=4, experts_per_token=2)
    return Program(make, loss, batch)


def forgotten_divisor() -> Program:
    """Gradients of experts are divided by the ranks that hold them."""

    def shard(model: nn.Module, fully_shard: Callable[..., Any]) -> None:
        shard_blocks(model, fully_shard)
        for block in model.layers:  # type: ignore[union-attr]
            if isinstance(found := block.ffn.experts, FSDPModule):
                found.set_gradient_divide_factor(2.0)

    return replace(of_experts(), shard=shard)
