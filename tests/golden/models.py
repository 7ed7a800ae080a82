"""The models of the scenarios and how they are cut into units; see scenarios.py.

Embedding and head belong to the root unit and take integer tokens, so the inputs of every block need a gradient;
each block is a unit, named layers.0, layers.1 and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as checkpoint_by_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

FullyShard = Callable[..., Any]
# A model whose units have this reshard_after_forward.
Build = Callable[[FullyShard, bool | None], Any]

FEATURES = 4
VOCABULARY = 8


# ---- models ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two linear layers and a residual. `recompute`: whether its own forward is checkpointed."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, 2 * FEATURES)
        self.down = nn.Linear(2 * FEATURES, FEATURES)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(self._compute, x, use_reentrant=self.recompute == "reentrant")
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class NestedBlock(nn.Module):
    """A block that holds another one, which is a unit of its own: layers.0.inner."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(FEATURES, FEATURES)
        self.inner = Block()
        self.after = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.inner(self.before(x)))


class TwoOutputs(Block):
    """A block whose two outputs both reach the loss."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = torch.relu(self.up(x))
        return x + self.down(hidden), hidden


class Model(nn.Module):
    """Embedding, blocks, head. `order`: which blocks run. `recompute`: checkpoints outside of the units."""

    def __init__(self, layers: Sequence[nn.Module], *, recompute: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, FEATURES)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(FEATURES, VOCABULARY)
        self.recompute = recompute

    def forward(self, tokens: Tensor, order: Sequence[int] | None = None) -> Tensor:
        x = self.embed(tokens)
        chosen = [self.layers[i] for i in (range(len(self.layers)) if order is None else order)]
        if self.recompute == "segments":
            for first in range(0, len(chosen), 2):
                x = checkpoint(_chain, chosen[first : first + 2], x, use_reentrant=False)
        else:
            for layer in chosen:
                if self.recompute:
                    x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
                else:
                    x = layer(x)
        return self.head(x)


class SideModel(Model):
    """The output of layers.1 is returned but does not reach the loss."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.layers[0](self.embed(tokens))
        side = self.layers[1](x)
        return self.head(self.layers[2](x)), side


class TwoOutputsModel(Model):
    """Both outputs of layers.0 reach the loss, the second one directly."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        x, hidden = self.layers[0](self.embed(tokens))
        return self.head(self.layers[1](x)).sum() + hidden.sum()


class FloatModel(nn.Module):
    """No embedding: the input of the first block needs no gradient."""

    def __init__(self, *, head: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(FEATURES, VOCABULARY) if head else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _chain(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


# ---- building ----------------------------------------------------------------------------------------------


def shard(model: Any, fully_shard: FullyShard, reshard: bool | None) -> Any:
    """Every block is a unit (what it holds first), then the model itself."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in reversed(list(model.modules())):
        if module is model or isinstance(module, Block | NestedBlock):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    return model


def plain(fully_shard: FullyShard, reshard: bool | None) -> Any:
    return shard(Model([Block() for _ in range(3)]), fully_shard, reshard)


def deep(fully_shard: FullyShard, reshard: bool | None) -> Any:
    return shard(Model([Block() for _ in range(4)]), fully_shard, reshard)


def recompute_inside(kind: str) -> Build:
    def build(fully_shard: FullyShard, reshard: bool | None) -> Any:
        return shard(Model([Block(recompute=kind) for _ in range(3)]), fully_shard, reshard)

    return build


def recompute_outside(kind: str) -> Build:
    def build(fully_shard: FullyShard, reshard: bool | None) -> Any:
        layers = [Block() for _ in range(4 if kind == "segments" else 3)]
        return shard(Model(layers, recompute=kind), fully_shard, reshard)

    return build


def recompute_by_hooks(fully_shard: FullyShard, reshard: bool | None) -> Any:
    return shard(Model([checkpoint_by_hooks(Block()) for _ in range(3)]), fully_shard, reshard)


def side(fully_shard: FullyShard, reshard: bool | None) -> Any:
    return shard(SideModel([Block() for _ in range(3)]), fully_shard, reshard)


def two_outputs(fully_shard: FullyShard, reshard: bool | None) -> Any:
    return shard(TwoOutputsModel([TwoOutputs(), Block()]), fully_shard, reshard)


def nested(fully_shard: FullyShard, reshard: bool | None) -> Any:
    return shard(Model([NestedBlock() for _ in range(2)]), fully_shard, reshard)


def nested_recomputed(kind: str) -> Build:
    def build(fully_shard: FullyShard, reshard: bool | None) -> Any:
        return shard(Model([NestedBlock() for _ in range(2)], recompute=kind), fully_shard, reshard)

    return build


def frozen(fully_shard: FullyShard, reshard: bool | None) -> Any:
    model = Model([Block() for _ in range(3)])
    model.layers[1].requires_grad_(False)
    return shard(model, fully_shard, reshard)


def float_inputs(fully_shard: FullyShard, reshard: bool | None) -> Any:
    return shard(FloatModel(head=True), fully_shard, reshard)


def bare_root(fully_shard: FullyShard, reshard: bool | None) -> Any:
    return shard(FloatModel(head=False), fully_shard, reshard)


def forward_lists(fully_shard: FullyShard, reshard: bool | None) -> Any:
    model = deep(fully_shard, reshard)
    layers = list(model.layers)
    model.set_modules_to_forward_prefetch(layers[:2])
    for i, layer in enumerate(layers[:-1]):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
    return model


def backward_lists(fully_shard: FullyShard, reshard: bool | None) -> Any:
    model = deep(fully_shard, reshard)
    layers = list(model.layers)
    model.set_modules_to_backward_prefetch([layers[3], layers[2]])
    for i in range(1, len(layers)):
        layers[i].set_modules_to_backward_prefetch(layers[max(0, i - 2) : i][::-1])
    return model
