"""Conformance: gradients, recomputation, clipping, and training as a whole.

Programs written for torch's FSDP2 rely on what is asserted here. Ranks are threads, so values are real; each test is a
function of (rank, impl) that asserts on its own rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import (
    FULLSHARD,
    Implementation,
    Probe,
    each_case,
    each_world,
    for_each_implementation,
    kinds,
    probes,
    run,
    sharded,
)
from tests.harness.installed import fails_before
from tests.harness.models import (
    BY_NAME,
    Case,
    adamw,
    assert_same_training,
    collect,
    seeded,
    train_reference,
)

# ---- gradients -----------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@behaviour("gradients are DTensors with the mean over ranks, and add up", area="gradients")
@for_each_implementation
@each_world
@each_case
def test_gradients_are_dtensors_with_the_mean_over_ranks(case: Case, impl: Implementation, world: int) -> None:
    reference = case.build()
    for rank in range(world):
        (case.loss(reference, case.batch(0, rank)) / world).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    models = [case.build() for _ in range(world)]

    def rank_main(rank: int, impl: Implementation) -> None:
        model = case.shard(models[rank], impl.fully_shard)
        assert all(p.grad is None for p in model.parameters())
        for times in (1, 2):  # the second backward adds to what is there
            case.loss(model, case.batch(0, rank)).backward()
            for name, param in model.named_parameters():
                if not param.requires_grad:
                    assert param.grad is None, name
                    continue
                grad, wanted = param.grad, expected[name]
                assert isinstance(grad, DTensor) and wanted is not None
                assert (grad.placements, grad.shape, grad.dtype) == (param.placements, param.shape, param.dtype)
                assert grad.device_mesh == param.device_mesh
                tolerance.assert_close(grad.full_tensor(), times * wanted, what=name)

    run(rank_main, impl, world=world)


@behaviour("a parameter that no rank used has no gradient", area="gradients")
@for_each_implementation
@each_world
def test_a_parameter_that_no_rank_used_has_no_gradient(impl: Implementation, world: int) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    def rank_main(rank: int, impl: Implementation) -> None:
        model = impl.fully_shard(seeded(Partly))
        model(torch.randn(2, 3)).sum().backward()
        assert model.used.weight.grad is not None
        assert model.unused.weight.grad is None and model.unused.bias.grad is None

    run(rank_main, impl, world=world)


@behaviour("`requires_grad` may be switched between steps", area="gradients")
@for_each_implementation
@each_world
def test_requires_grad_may_be_switched_between_steps(impl: Implementation, world: int) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = sharded(impl, probes())
        for trainable in (False, True, False, True):
            model[1].requires_grad_(trainable)
            model(torch.randn(2, 5)).sum().backward()
            assert all((p.grad is not None) == trainable for p in model[1].parameters())
            assert all(p.grad is not None for p in model[2].parameters())
            model.zero_grad()
        assert all(p.grad is None for p in model.parameters())

    run(rank_main, impl, world=world)


@behaviour("accumulation under `set_requires_gradient_sync(False)`", area="gradients")
@for_each_implementation
@each_world
def test_accumulation_without_synchronisation(impl: Implementation, world: int) -> None:
    """Two micro-batches of which only the second reduces: the gradient is the sum of both, averaged over ranks."""
    case = BY_NAME["transformer"]
    reference = case.build()
    for rank in range(world):
        for micro in range(2):
            (case.loss(reference, case.batch(micro, rank)) / world).backward()
    models = [case.build() for _ in range(world)]

    def rank_main(rank: int, impl: Implementation) -> None:
        model = case.shard(models[rank], impl.fully_shard)
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            case.loss(model, case.batch(micro, rank)).backward()
            if micro == 0:  # nothing was reduced yet. torch: None; ours: a gradient that refuses to be read
                for param in model.parameters():
                    if param.grad is not None:
                        assert impl is FULLSHARD
                        with pytest.raises(RuntimeError, match="only accumulated"):
                            param.grad.full_tensor()
        for name, param in model.named_parameters():
            assert isinstance(param.grad, DTensor)
            wanted = reference.get_parameter(name).grad
            assert wanted is not None
            tolerance.assert_close(param.grad.full_tensor(), wanted, what=name)

    run(rank_main, impl, world=world)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    first: Any
    second: Any


CONTAINERS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda a, b: (a, b), lambda out: out[0] + out[1]),
    "nested list": (lambda a, b: [[a], {"b": b}], lambda out: out[0][0] + out[1]["b"]),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda out: out["a"] + out["b"]),
    "namedtuple": (Pair, lambda out: out.first + out.second),
    "dataclass": (Record, lambda out: out.first + out.second),
}
OLD_TORCH = {"dataclass": fails_before((2, 12), "FSDP2 finds no tensors in a dataclass that a forward returns")}


@behaviour("outputs in a {container} reach backward", area="autograd")
@for_each_implementation
@each_world
@pytest.mark.parametrize("container", [pytest.param(name, marks=OLD_TORCH.get(name, ())) for name in CONTAINERS])
def test_outputs_in_any_container_reach_backward(container: str, impl: Implementation, world: int) -> None:
    pack, unpack = CONTAINERS[container]

    class Packs(Probe):
        def forward(self, x: torch.Tensor) -> Any:
            return pack(super().forward(x), 2 * x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.children_ = nn.ModuleList([Packs(), Packs()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for child in self.children_:
                x = unpack(child(x))
            return x

    expected = seeded(Outer)
    expected(torch.ones(2, 5)).sum().backward()

    def rank_main(rank: int, impl: Implementation) -> None:
        model = seeded(Outer)
        for child in model.children_:
            impl.fully_shard(child, reshard_after_forward=True)  # backward must gather again
        impl.fully_shard(model)
        out = model(torch.ones(2, 5))
        assert kinds(model.children_) == {DTensor}
        out.sum().backward()
        assert kinds(model.children_) == {DTensor}
        for name, param in model.named_parameters():
            tolerance.assert_close(param.grad.full_tensor(), expected.get_parameter(name).grad, what=name)

    run(rank_main, impl, world=world)


@behaviour("`register_post_accumulate_grad_hook` sees the reduced gradient", area="gradients")
@for_each_implementation
@each_world
def test_hooks_on_sharded_parameters_see_the_reduced_gradient(impl: Implementation, world: int) -> None:
    """`register_post_accumulate_grad_hook`, as an optimizer that steps inside backward uses it."""

    def rank_main(rank: int, impl: Implementation) -> None:
        model = sharded(impl, probes())
        seen: list[Any] = []
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda p: seen.append((id(p), type(p.grad))))
        model(torch.randn(2, 5)).sum().backward()
        assert sorted(seen) == sorted((id(p), DTensor) for p in model.parameters())

    run(rank_main, impl, world=world)


# ---- clipping and optimizer ----------------------------------------------------------------------------------


@behaviour("`clip_grad_norm_` by the global norm: {norm_type}", area="clipping")
@for_each_implementation
@each_world
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_by_the_global_norm(norm_type: float, impl: Implementation, world: int) -> None:
    # On four ranks some own no row, of which torch's clipping cannot take the largest; test_conformance_basic.py.
    case = BY_NAME["uneven_mlp" if world < 4 or norm_type < float("inf") else "transformer"]
    reference = case.build()
    for rank in range(world):
        (case.loss(reference, case.batch(0, rank)) / world).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
    clips = (impl.clip, torch.nn.utils.clip_grad_norm_)  # torch's own must work on either
    models = [[case.build() for _ in clips] for _ in range(world)]

    def rank_main(rank: int, impl: Implementation) -> None:
        for clip, built in zip(clips, models[rank], strict=True):
            model = case.shard(built, impl.fully_shard)
            case.loss(model, case.batch(0, rank)).backward()
            found = clip(model.parameters(), 0.01, norm_type)
            found = found.full_tensor() if isinstance(found, DTensor) else found
            tolerance.assert_close(found, norm)
            for name, param in model.named_parameters():
                wanted = reference.get_parameter(name).grad
                assert wanted is not None and param.grad is not None
                tolerance.assert_close(param.grad.full_tensor(), wanted, what=name)

    run(rank_main, impl, world=world)


@pytest.mark.sample(3)
@behaviour("training with AdamW equals the plain model, optimizer state included", area="training")
@for_each_implementation
@each_case
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_with_adamw_equals_the_plain_model(case: Case, impl: Implementation, world: int) -> None:
    """Parameters and optimizer state after three steps: a world of one the same bits; two ranks 2 eps per step.

    Relative to each tensor's maximum.
    """
    steps = 3
    batches = [[case.batch(step, rank) for rank in range(world)] for step in range(steps)]
    expected = train_reference(case.build(), case.loss, batches)
    models = [case.build() for _ in range(world)]

    def rank_main(rank: int, impl: Implementation) -> None:
        model = case.shard(models[rank], impl.fully_shard)
        optim = adamw(model.parameters())
        for step in range(steps):
            case.loss(model, batches[step][rank]).backward()
            optim.step()
            optim.zero_grad()
        assert_same_training(collect(model, optim), expected, 0 if world == 1 else None)

    run(rank_main, impl, world=world)
