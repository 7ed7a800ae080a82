"""Conformance: `fully_shard` of a list makes one unit of several modules.

Each training program runs for plain modules in one process (the oracle), for torch's FSDP2 and for fullshard. Ranks are
threads, so values are real.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.observe import record
from tests.harness.behaviours import behaviour
from tests.harness.implementations import (
    FULLSHARD,
    Implementation,
    for_each_implementation,
    kinds,
    run,
)
from tests.harness.installed import fails_before
from tests.harness.models import Trained, adamw, assert_same_training, collect, seeded
from tests.harness.threads import WORLD

# Forward and backward of one batch, the loss multiplied with the last argument.
Program = Callable[[Any, Tensor, float], None]


class Model(nn.Module):
    """A body, and a norm and a head that make one unit. Odd sizes: the head has fewer rows than four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 3, bias=False)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))

    def forward(self, x: Tensor, order: str = "norm head") -> Tensor:
        x = self.hidden(x)
        for name in order.split():
            x = getattr(self, name)(x)
        return x


def _sharded(impl: Implementation, **options: Any) -> Any:
    model = seeded(Model)
    impl.fully_shard(model.body, **options)
    impl.fully_shard([model.norm, model.head], **options)
    return impl.fully_shard(model, **options)


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def _train(model: Any, program: Program, ranks: list[int], steps: int = 3) -> Trained:
    """Some steps of `program` on the batches of `ranks`; in one process that is the mean over them."""
    optimizer = adamw(model.parameters())
    for step in range(steps):
        for rank in ranks:
            program(model, _batch(step, rank), 1.0 / len(ranks))
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


def _assert_trains_as_plain(impl: Implementation, program: Program, world: int, **options: Any) -> None:
    expected = _train(seeded(Model), program, list(range(world)))

    def rank_main(rank: int, impl: Implementation) -> None:
        assert_same_training(_train(_sharded(impl, **options), program, [rank]), expected)

    run(rank_main, impl, world=world)


OLD_TORCH = fails_before((2, 13), "FSDP2 leaves a list full, and outputs uncast, until its last module has run")

# ---- lists: what they are ------------------------------------------------------------------------------------


@behaviour("a list of modules is one unit: class, methods, one set of full parameters", area="surface")
@for_each_implementation
def test_a_list_is_one_unit(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = seeded(Model)
        modules = [model.norm, model.head]
        assert impl.fully_shard(modules) is modules
        assert all(isinstance(module, impl.FSDPModule) for module in modules)
        assert not isinstance(model.body, impl.FSDPModule)
        impl.fully_shard(model)
        assert model.head.unshard() is None
        assert kinds(model.norm) == kinds(model.head) == {nn.Parameter} and kinds(model.body) == {DTensor}
        model.norm.reshard()
        assert kinds(model) == {DTensor}
        assert {name for name, _ in model.named_parameters()} == {name for name, _ in seeded(Model).named_parameters()}

    run(rank_main, impl)


@behaviour("of a list with a module inside another, the outer one is taken", area="surface")
@for_each_implementation
def test_a_module_inside_another_of_the_list_belongs_to_it(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = seeded(lambda: nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3)))
        impl.fully_shard([model[0], model[0][0], model[1]])
        assert [isinstance(m, impl.FSDPModule) for m in (model[0], model[0][0], model[1])] == [True, False, True]
        impl.fully_shard(model)(torch.ones(1, 3)).sum().backward()
        assert all(isinstance(p.grad, DTensor) for p in model.parameters())

    run(rank_main, impl)


@behaviour("modules of a list stay full from the first that runs to the last", area="when parameters are full")
@for_each_implementation
@OLD_TORCH
def test_a_list_is_full_from_the_first_module_to_the_last(impl: Implementation) -> None:
    """And no longer than the outermost forward where the last one does not run."""

    def rank_main(rank: int, impl: Implementation) -> None:
        model = _sharded(impl)
        seen: list[set[type]] = []
        model.norm.register_forward_hook(lambda *_: seen.append(kinds(model.norm) | kinds(model.head)))
        model.head.register_forward_pre_hook(lambda *_: seen.append(kinds(model.norm) | kinds(model.head)))
        for order in ("norm head", "norm norm head", "norm"):
            model(_batch(0, rank), order).sum().backward()
            assert kinds(model) == {DTensor}
        assert seen and all(found == {nn.Parameter} for found in seen)
        partly = model(_batch(0, rank), "norm")
        assert kinds(model.norm) == kinds(model.head) == {DTensor}, "the forward of the model ended"
        with torch.no_grad():
            model(_batch(0, rank), "norm")
        assert kinds(model) == {DTensor}
        partly.sum().backward()
        assert kinds(model) == {DTensor}

    run(rank_main, impl)


def test_one_gather_one_wait_and_one_reduction_for_a_list() -> None:
    """Forward, with and without the head; and a loss in chunks of which one backward follows."""

    def rank_main(rank: int, impl: Implementation) -> None:
        model = _sharded(impl)
        unit = "norm+head"
        assert [(info.name, info.param_names) for info in fullshard.report(model).units][2] == (
            unit,
            ("norm.weight", "norm.bias", "head.weight"),
        )

        def commands(order: str, chunks: int = 0) -> list[str]:
            with record(model) as trace:
                out = model(_batch(0, rank), order)
                loss = sum((model.head(c).sum() for c in out.chunk(chunks)), start=out.sum()) if chunks else out.sum()
                loss.backward()
            return [kind for kind, name in trace.commands if name == unit]

        once = ["unshard", "wait", "reshard"]
        for _ in range(2):
            assert commands("norm head") == [*once, *once, "reduce"]
            # Two uses, in the forward of the model, which ends without the head, and for all chunks; one message.
            found = commands("norm", chunks=3)
            assert found == [*once, *once, *once, "reduce"], found

    run(rank_main, FULLSHARD)


# ---- lists: training -----------------------------------------------------------------------------------------


def _whole(model: Any, x: Tensor, scale: float) -> None:
    (model(x).square().mean() * scale).backward()


def _chunks_of_one_loss(model: Any, x: Tensor, scale: float) -> None:
    hidden = model(x, "norm")
    loss = sum(model.head(chunk).square().mean() for chunk in hidden.chunk(3))
    (loss * scale).backward()


def _a_backward_for_each_chunk(model: Any, x: Tensor, scale: float) -> None:
    hidden = model(x, "norm")
    cut = hidden.detach().requires_grad_()
    for chunk in cut.chunk(3):
        (model.head(chunk).square().mean() * scale).backward()
    hidden.backward(cut.grad)


def _twice_in_one_forward(model: Any, x: Tensor, scale: float) -> None:
    (model(x, "norm norm head").square().mean() * scale).backward()


def _two_forwards(model: Any, x: Tensor, scale: float) -> None:
    (model(x).square().mean() * scale + model(x * 2, "norm").square().mean() * scale).backward()


def _never_the_head(model: Any, x: Tensor, scale: float) -> None:
    (model(x, "norm").square().mean() * scale).backward()


def _recomputed(model: Any, x: Tensor, scale: float) -> None:
    def tail(hidden: Tensor) -> Tensor:
        out: Tensor = model.head(model.norm(hidden))
        return out

    model.tail = partial(checkpoint, tail, use_reentrant=False)
    (model(x, "tail").square().mean() * scale).backward()


def _accumulated(model: Any, x: Tensor, scale: float) -> None:
    half = x.chunk(2)
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
    _chunks_of_one_loss(model, half[0], scale)
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(True)
    _whole(model, half[1], scale)


def _evaluated_in_between(model: Any, x: Tensor, scale: float) -> None:
    with torch.no_grad():
        model.head(model(x, "norm"))
    _a_backward_for_each_chunk(model, x, scale)


PROGRAMS = {
    "the whole model": _whole,
    "a loss in chunks, one backward": _chunks_of_one_loss,
    "a loss in chunks, a backward for each": _a_backward_for_each_chunk,
    "one of the modules twice": _twice_in_one_forward,
    "two forwards, of which one is partial": _two_forwards,
    "one of the modules never": _never_the_head,
    "recomputation of all of them": _recomputed,
    "micro-batches without synchronisation": _accumulated,
    "an evaluation of one of the modules in between": _evaluated_in_between,
}
ENDS_BEFORE_THE_HEAD = ("a loss in chunks, a backward for each", "an evaluation of one of the modules in between")


@behaviour("a list trains as plain modules do: {program}", area="training")
@for_each_implementation
@pytest.mark.parametrize("program", [pytest.param(name, marks=OLD_TORCH if name in ENDS_BEFORE_THE_HEAD else ())
                                     for name in PROGRAMS])  # fmt: skip
def test_a_list_trains_as_plain_modules_do(program: str, impl: Implementation) -> None:
    _assert_trains_as_plain(impl, PROGRAMS[program], WORLD)


@pytest.mark.sample(2)
@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_list_trains_in_any_world(world: int, reshard: bool) -> None:
    for program in (_chunks_of_one_loss, _a_backward_for_each_chunk, _two_forwards):
        _assert_trains_as_plain(FULLSHARD, program, world, reshard_after_forward=reshard)


@behaviour(
    "after one module of a list ran alone in an evaluation, nothing is full and `zero_grad` clears",
    area="when parameters are full",
    torch="better",
    reason="no backward follows that would free it: torch's unit stays full, and `zero_grad()` misses its gradients",
)
def test_a_module_of_a_list_alone_in_an_evaluation_leaves_nothing_full(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = _sharded(impl)
        parameters = list(model.parameters())
        model(_batch(0, rank)).sum().backward()
        with torch.no_grad():
            model.head(model(_batch(0, rank), "norm"))
        assert kinds(model) == {DTensor}
        model.zero_grad()
        assert all(parameter.grad is None for parameter in parameters)

    run(rank_main, impl)


@behaviour("inputs and outputs of each module of a list are cast", area="mixed precision")
@for_each_implementation
@OLD_TORCH
def test_inputs_and_outputs_of_each_module_of_a_list_are_cast(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = seeded(Model)
        half = impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
        impl.fully_shard([model.norm, model.head], mp_policy=half)
        impl.fully_shard(model)
        seen: list[tuple[torch.dtype, torch.dtype]] = []
        for module in (model.norm, model.head):
            module.register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)), prepend=True)
        out = model(_batch(0, rank), "norm")
        assert out.dtype is torch.float64
        for chunk in out.chunk(2):
            assert model.head(chunk).dtype is torch.float64
        assert seen == [(torch.bfloat16, torch.bfloat16)] * 3

    run(rank_main, impl)


def test_an_exception_between_the_modules_of_a_list_leaves_nothing() -> None:
    """The next step is what it would have been."""
    expected = _train(seeded(Model), _whole, list(range(WORLD)))

    def failing(model: Any, x: Tensor, scale: float) -> None:
        with pytest.raises(AttributeError, match="no_such"):
            model(x, "norm no_such head")
        _whole(model, x, scale)

    def rank_main(rank: int, impl: Implementation) -> None:
        assert_same_training(_train(_sharded(impl), failing, [rank]), expected)

    run(rank_main, FULLSHARD)


class Tied(nn.Module):
    """The head has the weight of the embedding, and other modules run in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.middle = nn.Linear(5, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.middle(self.embedding(x))))
        return out


def _tokens(model: Any, x: Tensor, scale: float) -> None:
    (model((x[:, 0] * 5).long().clamp(0, 10)).square().mean() * scale).backward()


@behaviour("a list holds tied weights together", area="training")
@for_each_implementation
def test_a_list_holds_tied_weights_together(impl: Implementation) -> None:
    expected = _train(seeded(Tied), _tokens, list(range(WORLD)))

    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = seeded(Tied)
        impl.fully_shard([model.embedding, model.head])
        impl.fully_shard(model.middle)
        impl.fully_shard(model)
        assert model.head.weight is model.embedding.weight
        assert_same_training(_train(model, _tokens, [rank]), expected)
        assert model.head.weight is model.embedding.weight and kinds(model) == {DTensor}

    run(rank_main, impl)
