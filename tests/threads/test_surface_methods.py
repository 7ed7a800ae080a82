"""Conformance: registered forward methods gather, free and have gradients as forward does.

Each program runs for plain modules in one process (the oracle), for torch's FSDP2 and for fullshard.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fullshard
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import (
    FULLSHARD,
    Implementation,
    for_each_implementation,
    kinds,
    run,
)
from tests.harness.installed import needs
from tests.harness.models import Trained, adamw, assert_same_training, collect, seeded
from tests.harness.threads import WORLD


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))


# ---- registered forward methods ------------------------------------------------------------------------------


class Talker(nn.Module):
    """`encode` reads a weight of its own; `generate` calls forward and encode several times and reads it in between."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) * self.scale

    def encode(self, x: Tensor, *, factor: float = 1.0) -> Tensor:
        """What encode says."""
        return x * self.scale * factor

    def generate(self, x: Tensor, length: int) -> Tensor:
        for _ in range(length):
            x = self(x) + self.encode(x, factor=0.5) + self.scale
        return x

    def fail(self, x: Tensor) -> Tensor:
        raise ValueError(f"{type(self.scale).__name__} {tuple(x.shape)}")


class Inheriting(Talker):
    pass


def _talker(impl: Implementation, methods: tuple[str, ...], *, root: bool, **options: Any) -> Any:
    talker = seeded(Inheriting)
    impl.fully_shard(talker.inner, **options)
    impl.fully_shard(talker, **options)
    for method in methods:
        impl.namespace.register_fsdp_forward_method(talker, method)
    return talker if root else impl.fully_shard(nn.Sequential(talker))


def _train_method(model: Any, talker: Any, method: Callable[[Any, Tensor], Tensor], ranks: list[int]) -> Trained:
    optimizer = adamw(model.parameters())
    for step in range(3):
        for rank in ranks:
            (method(talker, _batch(step, rank)).square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


def _encode(talker: Any, x: Tensor) -> Tensor:
    out: Tensor = talker.encode(x, factor=2.0)
    return out


def _encode_and_forward(talker: Any, x: Tensor) -> Tensor:
    out: Tensor = talker(talker.encode(x)) + talker.encode(talker(x))
    return out


def _generate(talker: Any, x: Tensor) -> Tensor:
    out: Tensor = talker.generate(x, 3)
    return out


def _assert_method_trains(
    impl: Implementation,
    method: Callable[[Any, Tensor], Tensor],
    *,
    root: bool = True,
    world: int = WORLD,
    **options: Any,
) -> None:
    plain = seeded(Inheriting)
    expected = _train_method(plain if root else nn.Sequential(plain), plain, method, list(range(world)))

    def rank_main(rank: int, impl: Implementation) -> None:
        model = _talker(impl, ("encode", "generate"), root=root, **options)
        talker = model if root else model[0]
        if not root:
            model(_batch(0, rank))  # the outermost module runs first
        found = _train_method(model, talker, method, [rank])
        assert_same_training(found, expected)
        assert kinds(model) == {DTensor}

    run(rank_main, impl, world=world)


def _recomputed(talker: Any, x: Tensor, *, reentrant: bool) -> Tensor:
    out: Tensor = checkpoint(talker.encode, x.requires_grad_(), use_reentrant=reentrant)
    return out


@behaviour("a registered method may be recomputed", area="recomputation")
@for_each_implementation
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_registered_method_may_be_recomputed(reentrant: bool, impl: Implementation) -> None:
    _assert_method_trains(impl, partial(_recomputed, reentrant=reentrant), root=False)


@behaviour("a registered method gathers, frees and has gradients as forward", area="surface")
@for_each_implementation
@pytest.mark.parametrize("method", [_encode, _encode_and_forward])
def test_a_registered_method_trains(method: Callable[[Any, Tensor], Tensor], impl: Implementation) -> None:
    for root in (True, False):
        _assert_method_trains(impl, method, root=root)


@behaviour(
    "a registered method may call forward and other registered methods",
    area="surface",
    torch="better",
    reason="torch frees at the end of the inner call, and what is left of the method finds sharded parameters",
)
def test_a_registered_method_may_call_forward(impl: Implementation) -> None:
    for root in (True, False):
        _assert_method_trains(impl, _generate, root=root, reshard_after_forward=True)


@pytest.mark.parametrize("world", [1, 3])
def test_registered_methods_train_in_any_world(world: int) -> None:
    _assert_method_trains(FULLSHARD, _generate, world=world)
    _assert_method_trains(FULLSHARD, _encode_and_forward, root=False, world=world)


@behaviour("a registered method casts inputs and outputs, and runs without gradients", area="surface")
@for_each_implementation
def test_a_registered_method_casts_and_runs_without_gradients(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        policy = impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
        model = _talker(impl, ("encode",), root=True, mp_policy=policy, reshard_after_forward=True)
        with torch.no_grad():
            out = model.encode(torch.ones(2, 5), factor=2.0)
        expected = (2 * seeded(Talker).scale.detach()).bfloat16().double().expand(2, 5)
        assert out.dtype is torch.float64 and torch.equal(out, expected)
        assert kinds(model) == {DTensor}
        assert model.encode.__name__ == "encode" and model.encode.__doc__ == "What encode says."

    run(rank_main, impl)


@behaviour("an exception in a registered method is the user's, and the next call works", area="failures")
@for_each_implementation
@needs("torch.distributed.fsdp.FSDPModule.reset_iter_state", half="torch")
def test_an_exception_in_a_registered_method(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = _talker(impl, ("encode", "fail"), root=True)
        with pytest.raises(ValueError, match=r"Parameter \(6, 5\)"):
            model.fail(_batch(0, rank))
        if impl is not FULLSHARD:
            model.reset_iter_state()
        model.encode(_batch(0, rank)).sum().backward()
        plain = [seeded(Talker) for _ in range(WORLD)]
        for other, talker in enumerate(plain):
            talker.encode(_batch(0, other)).sum().backward()
        expected = sum(talker.scale.grad for talker in plain) / WORLD  # type: ignore[misc]
        assert tolerance.close(model.scale.grad.full_tensor(), expected)

    run(rank_main, impl)


def test_an_exception_in_a_nested_call_may_be_caught() -> None:
    """By the method around it, which goes on with full parameters."""

    class Catching(Talker):
        def try_twice(self, x: Tensor) -> Tensor:
            try:
                self.fail(x)
            except ValueError:
                return self.encode(x) + self.scale
            raise AssertionError("fail did not fail")

    def rank_main(rank: int, impl: Implementation) -> None:
        model = seeded(Catching)
        impl.fully_shard(model)
        for method in ("fail", "encode", "try_twice"):
            fullshard.register_fsdp_forward_method(model, method)
        for _ in range(2):
            model.zero_grad()
            x = torch.ones(2, 5)
            model.try_twice(x).sum().backward()
            assert torch.equal(model.scale.grad.full_tensor(), torch.full((5,), 4.0))
            assert kinds(model) == {DTensor}

    run(rank_main, FULLSHARD)


def test_registering_is_done_once_and_refuses_what_runs_later() -> None:
    class Streaming(nn.Linear):
        def stream(self, x: Tensor) -> Any:
            yield self(x)

    def rank_main(rank: int, impl: Implementation) -> None:
        model = impl.fully_shard(seeded(lambda: Streaming(2, 2)))
        fullshard.register_fsdp_forward_method(model, "extra_repr")
        registered = model.extra_repr
        fullshard.register_fsdp_forward_method(model, "extra_repr")
        assert model.extra_repr is registered and model.extra_repr() == nn.Linear(2, 2).extra_repr()
        with pytest.raises(NotImplementedError, match=r"expected .*, found 'stream'.*; call unshard\(\)"):
            fullshard.register_fsdp_forward_method(model, "stream")
        theirs = torch_fsdp.fully_shard(nn.Linear(2, 2))
        with pytest.raises(ValueError, match="sharded by torch"):
            fullshard.register_fsdp_forward_method(theirs, "extra_repr")

    run(rank_main, FULLSHARD)
