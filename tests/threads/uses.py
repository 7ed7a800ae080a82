"""Valid programs that drive autograd in ways of their own: several backwards, transforms, hooks, recomputation.

As `programs.py`, but a use runs its backwards itself. `check_use` runs either on the sharded model on `world` threads
beside the plain one on the whole batch, and compares gradients, whether there is one at all, and parameters after
AdamW steps.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import fullshard
from tests.harness import tolerance
from tests.harness.implementations import FULLSHARD, Implementation, kinds
from tests.harness.threads import run_ranks
from tests.threads.programs import (
    WIDTH,
    Block,
    Model,
    OnVectors,
    Program,
    batch,
    compare_gradients,
    of_blocks,
    part,
    shard,
)

STEPS = 3


class Use(NamedTuple):
    """`run(model, tokens, step, scale)` runs forwards and backwards; every loss is to be multiplied by `scale`.

    `lasts`: after several backwards that recorded graphs the root's memory may stay until its shards changed
    (schedule/record.py).
    """

    run: Callable[[Any, Tensor, int, float], None]
    model: Callable[[], nn.Module] = Model
    shard: Callable[..., Any] = shard
    lasts: bool = True


def of_program(program: Program) -> Use:
    def run(model: Any, tokens: Tensor, step: int, scale: float) -> None:
        (scale * program.loss(model, tokens, step)).backward()

    return Use(run, program.model, lasts=False)


def vectors(tokens: Tensor) -> Tensor:
    """Inputs of `OnVectors` that require a gradient."""
    x = F.one_hot(tokens, 11)[..., :WIDTH].float() + 0.1 * tokens[..., None]
    return x.requires_grad_(True)


# ---- several backwards ---------------------------------------------------------------------------------------


def _losses_apart(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    out = model(tokens)
    (scale * out.pow(2).mean()).backward(retain_graph=True)
    (scale * out.sin().mean()).backward()


def _same_loss_twice(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    loss = scale * model(tokens).pow(2).mean()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)


def _forwards_and_backwards_crossed(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    first, second = model(tokens), model(tokens.flip(0))
    (scale * first.pow(2).mean()).backward()
    (scale * second.sin().mean()).backward()


def _loss_on_one_then_all(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    """The first backward stops at the input, and brings the parameters nothing."""
    x = vectors(tokens)
    out = model(x)
    (towards,) = torch.autograd.grad(out.sin().sum(), x, retain_graph=True)
    (scale * (out.pow(2).mean() + (towards.detach() * out.mean()).sum())).backward()


def _adversarial(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    x = vectors(tokens)
    (towards,) = torch.autograd.grad(model(x).pow(2).sum(), x)
    (scale * model(x.detach() + 0.1 * towards.sign()).pow(2).mean()).backward()


def _backward_to_an_activation(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    """The first backward stops in the middle: the first block takes no part in it."""
    kept: list[Tensor] = []
    handle = model.layers[1].register_forward_hook(lambda module, args, output: kept.append(output))
    out = model(tokens)
    handle.remove()
    (towards,) = torch.autograd.grad(out.sin().mean(), kept[0], retain_graph=True)
    (scale * (out.pow(2).mean() + (kept[0] * towards).sum())).backward()


def _inputs_of_backward(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    x = vectors(tokens)
    out = model(x)
    out.sin().mean().backward(inputs=[x], retain_graph=True)
    assert x.grad is not None
    (scale * (out * x.grad.mean()).pow(2).mean()).backward()


def _hessian_product(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    x = vectors(tokens)
    _, product = torch.autograd.functional.hvp(
        lambda y: model(y).pow(2).mean(), x.detach(), torch.ones_like(x), create_graph=True
    )
    (scale * (product.pow(2).sum() + model(x).mean())).backward()


def _jacobian(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    x = vectors(tokens).detach()[:1]
    jacobian: Any = torch.autograd.functional.jacobian(lambda y: model(y).mean((0, 1)), x, create_graph=True)
    (scale * jacobian.pow(2).sum()).backward()


class Force(OnVectors):
    """A forward that differentiates: an energy, and its gradient along the input."""

    def forward(self, x: Tensor, depth: int | None = None) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            energy = super().forward(x).pow(2).sum((1, 2))
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        return energy, force


def _force(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    energy, force = model(vectors(tokens))
    (scale * (energy.mean() + force.pow(2).mean())).backward()


def _force_in_evaluation(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    model.eval()
    with torch.no_grad():
        energy, force = model(vectors(tokens))
    assert not force.requires_grad and bool(force.abs().sum() > 0)
    model.train()
    _force(model, tokens, step, scale)


class Corrected(Block):
    """A block that takes a gradient step on its input in forward, and goes on with its own weights."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_(True)
            (towards,) = torch.autograd.grad(self.up(self.norm(y)).pow(2).sum(), y)
        return x + self.down(torch.tanh(self.up(self.norm(x - 0.1 * towards))))


class Learner(Block):
    """A block whose forward runs a backward that reaches its own parameters."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            (0.1 * self.up(self.norm(x.detach())).pow(2).mean() * self.scale).backward()
        return super().forward(x)

    scale = 1.0


def _learners(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    for layer in model.layers:
        layer.scale = scale
    mean_square(model, tokens, step, scale)


def mean_square(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    (scale * model(tokens).pow(2).mean()).backward()


# ---- accumulation --------------------------------------------------------------------------------------------


def _accumulate(model: Any, tokens: Tensor, step: int, scale: float, *, sync: bool) -> None:
    """Micro-batches that use one, all and two of the blocks: a parameter may be missing in the first or the last."""
    depths = (1, None, 2) if step % 2 else (3, 2, 1)
    for i, depth in enumerate(depths):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(sync or i == len(depths) - 1)
        (scale * model(tokens.roll(i, 0), depth=depth).pow(2).mean()).backward()


# ---- hooks ---------------------------------------------------------------------------------------------------


def _hooks(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    """Hooks that change what passes, on units and on modules inside them."""
    handles = []
    for module in (model.layers[0], model.layers[1].up, model.head, model):
        handles.append(module.register_forward_hook(lambda module, args, output: output * 1.5))
        if module is not model:  # its inputs are tokens
            half = lambda module, inputs, outputs: tuple(0.5 * g for g in inputs)  # noqa: E731
            handles.append(module.register_full_backward_hook(half))
            double = lambda module, outputs: tuple(2.0 * g for g in outputs)  # noqa: E731
            handles.append(module.register_full_backward_pre_hook(double))
    for module in (model.layers[1], model.layers[2].down):
        handles.append(module.register_forward_pre_hook(lambda module, args: tuple(1.25 * a for a in args)))
    mean_square(model, tokens, step, scale)
    for handle in handles:
        handle.remove()


def _hooks_on_activations(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: 2.0 * gradient)
        output.retain_grad()
        kept.append(output)

    kept: list[Tensor] = []
    handles = [module.register_forward_hook(watch) for module in (model.layers[0], model.layers[1].up, model.head)]
    mean_square(model, tokens, step, scale)
    for handle in handles:
        handle.remove()
    assert all(output.grad is not None for output in kept)


# ---- transforms ----------------------------------------------------------------------------------------------


def _functional_call(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    out: Any = torch.func.functional_call(model, dict(model.named_parameters()), (tokens,))
    (scale * out.pow(2).mean()).backward()


def _vmap(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    out = torch.func.vmap(model)(vectors(tokens))
    (scale * out.pow(2).mean()).backward()


def _func_grad(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    x = vectors(tokens)
    towards = torch.func.grad(lambda y: model(y).sin().sum())(x)
    (scale * (model(x).pow(2).mean() + towards.pow(2).mean())).backward()


def _func_vjp(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    out, back = torch.func.vjp(model, vectors(tokens))
    (towards,) = back(torch.ones_like(out))
    (scale * (out.pow(2).mean() + towards.pow(2).mean())).backward()


def _func_jvp(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    x = vectors(tokens)
    out, along = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    (scale * (out.pow(2).mean() + along.pow(2).mean())).backward()


def _func_jacrev(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    x = vectors(tokens)[:1]
    jacobian = torch.func.jacrev(lambda y: model(y).mean((0, 1)))(x)
    (scale * jacobian.pow(2).sum()).backward()


def _forward_ad(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    import torch.autograd.forward_ad as forward_ad

    x = vectors(tokens)
    with forward_ad.dual_level():
        out, along = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
        assert along is not None
        (scale * (out.pow(2).mean() + along.pow(2).mean())).backward()


# ---- what holds weights --------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    """Keeps its weight for backward in two ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        assert weight.data_ptr() == ctx.weight.data_ptr()
        return gradient @ ctx.weight, gradient.flatten(0, -2).T @ x.flatten(0, -2), gradient.flatten(0, -2).sum(0)


class CustomBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Any = _Linear.apply(self.norm(x), self.up.weight, self.up.bias)
        return x + self.down(torch.tanh(y))


def _saved_elsewhere(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    with torch.autograd.graph.save_on_cpu():
        out = model(tokens)
    (scale * out.pow(2).mean()).backward()


class _OfTheProcess:
    """A mode of the process, for ranks that are threads: the first to enter sets it, the last to leave ends it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._lock, self._inside = threading.Lock(), 0
        self._mode: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._mode = self._make()
                self._mode.__enter__()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._mode.__exit__(None, None, None)


_ANOMALY_MODE = _OfTheProcess(lambda: torch.autograd.set_detect_anomaly(True))
_NO_EARLY_STOP = _OfTheProcess(lambda: set_checkpoint_early_stop(False))


def _anomaly(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    with _ANOMALY_MODE:
        mean_square(model, tokens, step, scale)
        assert torch.is_anomaly_enabled()


def _autocast(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out = model(tokens)
    (scale * out.float().pow(2).mean()).backward()


class Recurrent(Model):
    """One block, used at each step of a sequence whose state goes on."""

    def forward(self, tokens: Tensor, state: Any = None) -> Any:  # type: ignore[override]
        x = self.embedding(tokens)
        state = self.layers[0](x if state is None else x + state)
        return self.head(self.layers[1](state)), state


def _through_time(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    """Two steps before each backward; the state goes on detached."""
    state: Any = None
    for _ in range(2):
        first, state = model(tokens, state)
        second, state = model(tokens.flip(1), state)
        (scale * (first.pow(2).mean() + second.sin().mean())).backward()
        state = state.detach()


# ---- list units ----------------------------------------------------------------------------------------------


class Chunked(Model):
    """Norm and head are one unit; the loss is taken chunk by chunk, and calls the head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor, depth: int | None = None) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers[:depth]:
            x = layer(x)
        return self.norm(x)


def shard_chunked(model: Any, impl: Implementation = FULLSHARD, **options: Any) -> Any:
    for layer in model.layers:
        impl.fully_shard(layer, **options)
    impl.fully_shard([model.norm, model.head], **options)
    return impl.fully_shard(model, **options)


def _chunked_loss(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    x = model(tokens)
    loss = sum(model.head(chunk).pow(2).mean() for chunk in x.chunk(3, dim=1))
    (scale * loss).backward()


def _chunked_backward(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    """Each chunk has a backward of its own, which ends at the detached hidden state."""
    x = model(tokens)
    hidden = x.detach().requires_grad_(True)
    for chunk in hidden.chunk(3, dim=1):
        (scale * model.head(chunk).pow(2).mean()).backward()
    x.backward(hidden.grad)


# ---- recomputation -------------------------------------------------------------------------------------------


def _keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


_SELECT = partial(create_selective_checkpoint_contexts, _keep_products)


class SelectiveInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False, context_fn=_SELECT)
        return out


class SelectiveOutside(Model):
    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(layer, x, use_reentrant=False, context_fn=_SELECT)
        return out


class Nested(Model):
    """A checkpoint around all blocks, and one around each of them."""

    reentrant = False

    def forward(self, tokens: Tensor, depth: int | None = None) -> Any:
        def blocks(x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
            return x

        return self.head(checkpoint(blocks, self.embedding(tokens), use_reentrant=self.reentrant))


class NestedReentrant(Nested):
    reentrant = True


class InsideAndOutside(SelectiveOutside):
    """Recomputed around each block, and inside it."""

    block = SelectiveInside

    def call(self, layer: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(layer, x, use_reentrant=False)
        return out


class Pairs(Model):
    """A checkpoint around two blocks; the third one and the head are not recomputed."""

    def forward(self, tokens: Tensor, depth: int | None = None) -> Any:
        x = checkpoint(lambda y: self.layers[1](self.layers[0](y)), self.embedding(tokens), use_reentrant=False)
        return self.head(self.layers[2](x))


def _no_early_stop(model: Any, tokens: Tensor, step: int, scale: float) -> None:
    with _NO_EARLY_STOP:
        out = model(tokens)
    (scale * out.pow(2).mean()).backward()


USES: dict[str, Use] = {
    "losses_apart": Use(_losses_apart),
    "same_loss_twice": Use(_same_loss_twice),
    "forwards_and_backwards_crossed": Use(_forwards_and_backwards_crossed),
    "gradient_of_the_input_first": Use(_loss_on_one_then_all, OnVectors),
    "adversarial_input": Use(_adversarial, OnVectors),
    "gradient_of_an_activation_first": Use(_backward_to_an_activation),
    "backward_with_inputs": Use(_inputs_of_backward, OnVectors),
    "hessian_product": Use(_hessian_product, OnVectors),
    "jacobian": Use(_jacobian, OnVectors),
    "force": Use(_force, Force),
    "force_in_evaluation": Use(_force_in_evaluation, Force),
    "gradient_inside_a_block": Use(mean_square, of_blocks(Corrected)),
    "backward_inside_a_block": Use(_learners, of_blocks(Learner)),
    "accumulate_unused_held": Use(partial(_accumulate, sync=False)),
    "accumulate_unused_reduced": Use(partial(_accumulate, sync=True)),
    "hooks": Use(_hooks),
    "hooks_on_activations": Use(_hooks_on_activations),
    "functional_call": Use(_functional_call),
    "vmap": Use(_vmap, OnVectors),
    "func_grad": Use(_func_grad, OnVectors),
    "func_vjp": Use(_func_vjp, OnVectors),
    "func_jvp": Use(_func_jvp, OnVectors),
    "func_jacrev": Use(_func_jacrev, OnVectors),
    "forward_ad": Use(_forward_ad, OnVectors),
    "custom_function": Use(mean_square, of_blocks(CustomBlock)),
    "saved_elsewhere": Use(_saved_elsewhere),
    "anomaly": Use(_anomaly),
    "autocast": Use(_autocast),
    "through_time": Use(_through_time, Recurrent),
    "chunked_loss": Use(_chunked_loss, Chunked, shard_chunked),
    "chunked_backward": Use(_chunked_backward, Chunked, shard_chunked),
    "selective_inside": Use(mean_square, of_blocks(SelectiveInside)),
    "selective_outside": Use(mean_square, SelectiveOutside),
    "nested": Use(mean_square, Nested),
    "nested_reentrant": Use(mean_square, NestedReentrant),
    "inside_and_outside": Use(mean_square, InsideAndOutside),
    "pairs": Use(mean_square, Pairs),
    "pairs_without_early_stop": Use(_no_early_stop, Pairs),
}


def check_use(
    use: Use, world: int, *, impl: Implementation = FULLSHARD, accumulate: bool = False, **options: Any
) -> None:
    """Train and compare; AssertionError names the parameter and the step.

    `accumulate`: each step has a micro-batch more, without synchronisation.
    """
    torch.manual_seed(0)
    base = use.model()
    run_ranks(world, _train, use, base, impl, world, accumulate, options)


def _train(
    rank: int, use: Use, base: nn.Module, impl: Implementation, world: int, accumulate: bool, options: Any
) -> None:
    reference: Any = copy.deepcopy(base)
    model = use.shard(copy.deepcopy(base), impl, **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    tolerance.watch(optimizers[1])
    for step in range(STEPS):
        for number in (step, step + 100) if accumulate else (step,):
            tokens = batch(world, number)
            if accumulate:
                model.set_requires_gradient_sync(number != step)
            use.run(model, part(tokens, rank), step, 1.0)
            for r in range(world):
                use.run(reference, part(tokens, r), step, 1.0 / world)
        compare_gradients(model, reference, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    tolerance.assert_parameters_close(model, reference, optimizers[1])
    if impl is FULLSHARD:
        if use.lasts:
            model.reshard()
        live = {unit.name: unit.full_nbytes_live for unit in fullshard.report(model).units if unit.full_nbytes_live}
        assert not live, f"full parameters left in memory: {live}"
    else:
        assert kinds(model) == {DTensor}, "full parameters left on the module"
