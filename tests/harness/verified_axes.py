"""Programs for `fullshard verify` whose layers are divided over `tp`: by their own styles, and with faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fullshard import Parallelism, balance_loss
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


# ---- pipelines -------------------------------------------------------------------------------------------------------


def pairs(index: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets apart, as pipelines take them."""
    whole = tokens(index, 0)
    return whole[:, :-1], whole[:, 1:].contiguous()


def cross_entropy(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def staged() -> Program:
    """The trainer's model with four layers."""
    return Program(
        lambda: llama(layers=4),
        lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        pairs,
        loss_fn=cross_entropy,
    )


class _Scales(torch.autograd.Function):
    """Scales a gradient by `factor`."""

    @staticmethod
    def forward(context: Any, x: Tensor, factor: float) -> Tensor:
        context.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * context.factor, None


def _scaling(factor: Callable[[], float]) -> Program:
    """The second of two stages scales the gradient that it sends, in a pipeline alone."""

    def build() -> nn.Module:
        model = llama(layers=4)
        if dist.is_initialized():
            layer: Any = model.layers[2]
            inner = layer.forward
            layer.forward = lambda x, *args, **kwargs: inner(_Scales.apply(x, factor()), *args, **kwargs)
        return model

    return replace(staged(), model=build)


def scaled_gradient() -> Program:
    """A stage gives twice the gradient to the one before it."""
    return _scaling(lambda: 2.0)


def lost_gradient() -> Program:
    """The gradient of the second micro-batch of two does not arrive in the first stage."""
    # The first forward is that for the shapes.
    number = count()
    return _scaling(lambda: 0.0 if (found := next(number)) and found % 2 == 0 else 1.0)


def sent_twice() -> Program:
    """The gradients of the first stage are added to themselves, after they were reduced."""

    class Twice(torch.optim.AdamW):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=1e-3)
            if dist.is_initialized() and dist.get_rank() < dist.get_world_size() // 2:
                for parameter in self.param_groups[0]["params"]:
                    parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))

    return replace(staged(), optimizer=Twice)


def other_values() -> Program:
    """The ranks of the second stage begin with another weight."""

    def build() -> nn.Module:
        model = llama(layers=4)
        if dist.is_initialized() and dist.get_rank() >= dist.get_world_size() // 2:
            with torch.no_grad():
                model.norm.weight.add_(0.25)
        return model

    return replace(staged(), model=build)


def left_out() -> Program:
    """The last stage trains on the first micro-batch twice, and on the second not at all."""
    calls = []

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        loss = cross_entropy(output, target)
        if dist.is_initialized():
            calls.append(loss)
            if len(calls) % 2:
                return loss * 0
        return loss

    return replace(staged(), loss_fn=loss_fn)


def with_dropout() -> Program:
    """Its forward draws random numbers."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(32, 16), nn.Dropout(0.5), nn.Linear(16, 32))

    return replace(staged(), model=build)


def without_loss_fn() -> Program:
    return replace(staged(), loss_fn=None)


def another_loss_fn() -> Program:
    return replace(staged(), loss_fn=lambda output, target: cross_entropy(output, target) * 2)


def one_tensor() -> Program:
    return replace(declared(), loss_fn=cross_entropy)


def tied() -> Program:
    """The embedding is the head too."""
    return replace(staged(), model=lambda: llama(layers=4, tied=True))


def tied_modules() -> Program:
    """Two modules share the weight."""

    def build() -> nn.Module:
        model = llama(layers=4)
        model.output.weight = model.embedding.weight  # type: ignore[union-attr]
        return model

    return replace(staged(), model=build)


def balanced() -> Program:
    """Experts with a balance loss in each layer."""

    def build() -> nn.Module:
        model = llama(layers=4, experts=4, experts_per_token=2)
        for layer in model.layers:
            layer.ffn.balance = 0.1  # type: ignore[union-attr]
        return model

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1]) + balance_loss(model)

    return replace(staged(), model=build, loss=loss)
