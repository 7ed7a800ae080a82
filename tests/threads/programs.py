"""Valid training programs that drive autograd and units in every way we know, each written once for any model.

A program is a model and a loss; `check_use` of uses.py trains it beside the plain model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness import tolerance
from tests.harness.implementations import FULLSHARD, Implementation
from tests.harness.models import seeded

VOCABULARY, WIDTH, ROWS = 11, 6, 2
STEPS = 3


class Block(nn.Module):
    """Uneven sizes on purpose: 6 and 13 rows on 2 and 3 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding and head belong to the root; three blocks, a unit each."""

    block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(type(self).block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, depth: int | None = None) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers[:depth]:
            x = self.call(layer, x)
        return self.out(x)

    def call(self, layer: nn.Module, x: Any) -> Any:
        return layer(x)

    def out(self, x: Tensor) -> Any:
        return self.head(x)


def of_blocks(block: Callable[[], nn.Module]) -> type[Model]:
    return type("Model", (Model,), {"block": staticmethod(block)})


class Program(NamedTuple):
    """`loss(model, tokens, step)` is what is differentiated."""

    loss: Callable[[Any, Tensor, int], Tensor]
    model: Callable[[], nn.Module] = Model


def _mean_square(model: Any, tokens: Tensor, step: int) -> Tensor:
    return model(tokens).pow(2).mean()


def _capture(model: Any, tokens: Tensor) -> tuple[Any, Tensor]:
    """The model's output and an intermediate of the second block."""
    kept: dict[str, Tensor] = {}
    handle = model.layers[1].up.register_forward_hook(lambda module, args, output: kept.update(up=output))
    out = model(tokens)
    handle.remove()
    return out, kept["up"]


def _intermediate_only(model: Any, tokens: Tensor, step: int) -> Tensor:
    return _capture(model, tokens)[1].pow(2).mean()


def _intermediate_too(model: Any, tokens: Tensor, step: int) -> Tensor:
    out, up = _capture(model, tokens)
    return out.pow(2).mean() + up.pow(2).mean()


class Box:
    """An object that no traversal of outputs looks into."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class BoxedBlock(Block):
    def forward(self, x: Any) -> Any:
        return Box(super().forward(x.value if isinstance(x, Box) else x))


class BoxedModel(Model):
    block = BoxedBlock

    def out(self, x: Any) -> Any:
        return Box(self.head(x.value))


class ViewBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :2]


class EditedViews(Model):
    block = ViewBlock

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        y = layer(x)
        y += 1.0
        y *= 1.5
        return torch.cat([y, x[:, :1]], 1)


class OnVectors(Model):
    """No embedding: the input is a float tensor that may require a gradient."""

    def forward(self, x: Tensor, depth: int | None = None) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _vectors(tokens: Tensor) -> Tensor:
    return F.one_hot(tokens, VOCABULARY)[..., :WIDTH].float() + 0.1 * tokens[..., None]


def _inputs_without_gradient(model: Any, tokens: Tensor, step: int) -> Tensor:
    return model(_vectors(tokens)).pow(2).mean()


def _gradient_penalty(model: Any, tokens: Tensor, step: int) -> Tensor:
    x = _vectors(tokens).requires_grad_(True)
    out = model(x)
    (gradient,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
    return out.mean() + gradient.pow(2).mean()


def _no_grad_first(model: Any, tokens: Tensor, step: int) -> Tensor:
    with torch.no_grad():
        model(tokens)
    return _mean_square(model, tokens, step)


def _inference_first(model: Any, tokens: Tensor, step: int) -> Tensor:
    with torch.inference_mode():
        model(tokens)
    return _mean_square(model, tokens, step)


def _unused_layer(model: Any, tokens: Tensor, step: int) -> Tensor:
    return model(tokens, depth=2 if step % 2 else None).pow(2).mean()


def _two_losses(model: Any, tokens: Tensor, step: int) -> Tensor:
    out = model(tokens)
    return out.pow(2).mean() + out.sin().mean()


def _two_forwards(model: Any, tokens: Tensor, step: int) -> Tensor:
    return model(tokens).pow(2).mean() + model(tokens.flip(0)).sin().mean()


def recomputing(reentrant: bool) -> Callable[[], nn.Module]:
    class Recomputing(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    return Recomputing


def recomputed(reentrant: bool) -> type[Model]:
    class Recomputed(Model):
        def call(self, layer: nn.Module, x: Tensor) -> Tensor:
            return checkpoint(layer, x, use_reentrant=reentrant)

    return Recomputed


class TwiceInOneSegment(Model):
    """A block used twice inside one reentrant checkpoint."""

    def forward(self, tokens: Tensor, depth: int | None = None) -> Any:
        x = self.embedding(tokens)
        x = checkpoint(lambda y: self.layers[1](self.layers[0](self.layers[1](y))), x, use_reentrant=True)
        return self.head(self.layers[2](x))


class SharedBlocks(Model):
    def forward(self, tokens: Tensor, depth: int | None = None) -> Any:
        x = self.embedding(tokens)
        for i in (0, 1, 0, 1, 2):
            x = self.layers[i](x)
        return self.head(x)


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Frozen(Model):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up.weight.requires_grad_(False)
        self.layers[1].requires_grad_(False)


def _freeze_every_other_step(model: Any, tokens: Tensor, step: int) -> Tensor:
    for layer in model.layers:
        layer.up.weight.requires_grad_(step % 2 == 0)
    return _mean_square(model, tokens, step)


class DetachedWeight(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(torch.tanh(self.up(self.norm(x))), self.down.weight.detach(), self.down.bias)


class _Times(torch.autograd.Function):
    """x @ weight.T. What it saves is a view of the weight that was made where no gradients are recorded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        turned = weight.t()
        ctx.save_for_backward(x, turned)
        return x @ turned

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, turned = ctx.saved_tensors
        return gradient @ turned.t(), gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class _TimesLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = _Times.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return product + self.bias


class SavesView(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = _TimesLinear(WIDTH, 2 * WIDTH + 1)


class TwoDtypes(Block):
    """Parameters of two dtypes in one unit, which torch's FSDP2 refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x.double()).float())))


class ReturnsParameter(Model):
    def out(self, x: Tensor) -> Any:
        return self.head(x), self.head.weight


class Named(NamedTuple):
    first: Tensor
    rest: dict[str, list[Tensor]]


class Structured(Block):
    def forward(self, x: Any) -> Any:  # type: ignore[override]
        y = super().forward(x.first if isinstance(x, Named) else x)
        return Named(y, {"rest": [y * 2.0]})


class StructuredModel(Model):
    block = Structured

    def out(self, x: Any) -> Any:
        return self.head(x.first + x.rest["rest"][0])


PROGRAMS: dict[str, Program] = {
    "plain": Program(_mean_square),
    "two_losses": Program(_two_losses),
    "two_forwards_one_backward": Program(_two_forwards),
    "loss_on_an_intermediate_only": Program(_intermediate_only),
    "loss_on_an_intermediate_too": Program(_intermediate_too),
    "intermediate_of_a_saved_view": Program(_intermediate_only, of_blocks(SavesView)),
    "outputs_in_objects": Program(lambda m, t, s: m(t).value.pow(2).mean(), BoxedModel),
    "outputs_in_structures": Program(_mean_square, StructuredModel),
    "edited_view_outputs": Program(_mean_square, EditedViews),
    "inputs_without_gradient": Program(_inputs_without_gradient, OnVectors),
    "gradient_penalty": Program(_gradient_penalty, OnVectors),
    "no_grad_first": Program(_no_grad_first),
    "inference_mode_first": Program(_inference_first),
    "unused_layer": Program(_unused_layer),
    "recompute_inside": Program(_mean_square, of_blocks(recomputing(False))),
    "recompute_inside_reentrant": Program(_mean_square, of_blocks(recomputing(True))),
    "recompute_outside": Program(_mean_square, recomputed(False)),
    "recompute_outside_reentrant": Program(_mean_square, recomputed(True)),
    "twice_in_one_reentrant_segment": Program(_mean_square, TwiceInOneSegment),
    "shared_blocks": Program(_mean_square, SharedBlocks),
    "tied_weights": Program(_mean_square, Tied),
    "frozen": Program(_mean_square, Frozen),
    "freeze_every_other_step": Program(_freeze_every_other_step),
    "detached_weight": Program(_mean_square, of_blocks(DetachedWeight)),
    "two_dtypes_in_a_unit": Program(_mean_square, of_blocks(TwoDtypes)),
    "returns_a_parameter": Program(lambda m, t, s: m(t)[0].pow(2).mean(), ReturnsParameter),
}


class Adapted(nn.Module):
    """A linear module with a low-rank adapter beside it, which begins as PEFT's do: the second factor is zero."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        self.base = base
        self.a = seeded(lambda: nn.Linear(base.in_features, 2, bias=False), seed=seed)
        self.b = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.b(self.a(x))
        return out


def adapt(model: Any, seed: int = 3, *, trains: bool = True) -> Any:
    """Freeze the model, and put adapters into its blocks."""
    model.requires_grad_(False)
    for layer in model.layers:
        layer.up = Adapted(layer.up, seed).requires_grad_(trains)
        layer.up.base.requires_grad_(False)
    return model


def shard(model: Any, impl: Implementation = FULLSHARD, **options: Any) -> Any:
    """Every block a unit, then the whole."""
    for layer in model.layers:
        impl.fully_shard(layer, **options)
    return impl.fully_shard(model, **options)


def batch(world: int, step: int) -> Tensor:
    """Tokens of all ranks; rank r's are rows [r * ROWS, (r + 1) * ROWS)."""
    return torch.randint(0, VOCABULARY, (world * ROWS, 3), generator=torch.Generator().manual_seed(step))


def part(tokens: Tensor, rank: int) -> Tensor:
    return tokens[rank * ROWS : (rank + 1) * ROWS]


def compare_gradients(model: nn.Module, reference: nn.Module, step: int) -> None:
    for (name, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        where = f"step {step}, {name}"
        assert (ours.grad is None) == (theirs.grad is None), f"{where}: {ours.grad} where {theirs.grad}"
        if theirs.grad is not None:
            # At each step the weights are off by as much again.
            terms, dtype = tolerance.TERMS * (step + 1) ** 2, tolerance.coarsest(reference.parameters())
            tolerance.assert_close(ours.grad, theirs.grad, terms, where, dtype=dtype)
