"""Conformance: what the parameters are, and when they are full or sharded.

Programs written for torch's FSDP2 rely on what is asserted here. Ranks are threads, so values are real; each test is a
function of (rank, impl) that asserts on its own rank.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.harness.behaviours import behaviour
from tests.harness.implementations import (
    Implementation,
    each_case,
    each_world,
    for_each_implementation,
    kinds,
    probes,
    run,
    sharded,
)
from tests.harness.models import (
    Case,
    Transformer,
    seeded,
)

# ---- parameters ----------------------------------------------------------------------------------------------


@pytest.mark.sample(9)
@behaviour("parameters are DTensors, cut as `torch.chunk` cuts, uneven and empty shards included", area="parameters")
@for_each_implementation
@each_case
@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_parameters_are_dtensors_cut_as_torch_chunk_cuts(case: Case, impl: Implementation, world: int) -> None:
    models = [case.build() for _ in range(world)]

    def rank_main(rank: int, impl: Implementation) -> None:
        mesh = init_device_mesh("cpu", (world,))
        model = models[rank]
        original = {name: p.detach().clone() for name, p in model.named_parameters()}
        case.shard(model, impl.fully_shard, mesh=mesh)
        assert dict(model.named_parameters()).keys() == original.keys()
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor) and isinstance(param, nn.Parameter), name
            assert param.placements == (Shard(0),) and param.device_mesh == mesh
            assert param.shape == original[name].shape and param.stride() == original[name].stride()
            chunks = original[name].chunk(world)
            mine = chunks[rank] if rank < len(chunks) else original[name][:0]
            assert torch.equal(param.to_local(), mine), name
            assert torch.equal(param.full_tensor(), original[name]), name

    run(rank_main, impl, world=world)


@behaviour("plain and full inside forward, sharded outside, and always the same object", area="parameters")
@for_each_implementation
@each_world
def test_full_in_forward_sharded_outside_and_always_the_same_object(impl: Implementation, world: int) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = sharded(impl, probes())
        before = dict(model.named_parameters())
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(2, 5)).sum().backward()
            optim.step()
            optim.zero_grad()
        for probe in model:
            for kind, shape, _, _ in probe.seen:
                assert kind is nn.Parameter and shape == (5, 5)
        for name, param in model.named_parameters():
            assert param is before[name]

    run(rank_main, impl, world=world)


@behaviour("`ignored_params` stay as they are and train locally", area="parameters")
@for_each_implementation
@each_world
def test_ignored_parameters_stay_as_they_are(impl: Implementation, world: int) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = probes()
        ignored = model[1].linear.weight
        impl.fully_shard(model, ignored_params={ignored})
        assert model[1].linear.weight is ignored
        assert sum(isinstance(p, DTensor) for p in model.parameters()) == 5
        model(torch.randn(2, 5)).sum().backward()
        assert model[1].linear.weight is ignored and not isinstance(ignored.grad, DTensor)

    run(rank_main, impl, world=world)


# ---- when parameters are full --------------------------------------------------------------------------------


@behaviour(
    "`reshard_after_forward={reshard}`: what is registered between forward and backward",
    area="when parameters are full",
)
@for_each_implementation
@each_world
@pytest.mark.parametrize("reshard", [True, False, None])
def test_registered_parameters_between_forward_and_backward(
    reshard: bool | None, impl: Implementation, world: int
) -> None:
    """Freed after forward: the sharded ones. Kept: the plain ones. None: freed but for the root's own."""

    def rank_main(rank: int, impl: Implementation) -> None:
        model = seeded(Transformer)
        for layer in model.layers:
            impl.fully_shard(layer, reshard_after_forward=reshard)
        impl.fully_shard(model, reshard_after_forward=reshard)
        loss = model(torch.zeros(1, 3, dtype=torch.long)).sum()
        layers = {DTensor} if reshard in (True, None) else {nn.Parameter}
        assert all(kinds(layer) == layers for layer in model.layers)
        own = DTensor if reshard is True else nn.Parameter
        assert isinstance(model.head.weight, DTensor) == (own is DTensor)
        loss.backward()
        assert kinds(model) == {DTensor}

    run(rank_main, impl, world=world)


@behaviour("`set_reshard_after_forward` and `set_reshard_after_backward`", area="when parameters are full")
@for_each_implementation
@each_world
def test_set_reshard_after_forward_and_backward(impl: Implementation, world: int) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = sharded(impl, probes())
        model.set_reshard_after_forward(False)
        loss = model(torch.randn(2, 5)).sum()
        assert kinds(model) == {nn.Parameter}
        model.set_reshard_after_backward(False)
        loss.backward()
        assert kinds(model) == {nn.Parameter}
        model.set_reshard_after_forward(True, recurse=False)  # has no parameters of its own: nothing changes
        for probe in model:
            probe.reshard()
        assert kinds(model) == {DTensor}
        model[0].set_reshard_after_forward(True)
        model(torch.randn(2, 5))
        assert [kinds(probe) for probe in model] == [{DTensor}, {nn.Parameter}, {nn.Parameter}]

    run(rank_main, impl, world=world)


@behaviour("`unshard`, `unshard(async_op=True)` and `reshard`, once or twice", area="when parameters are full")
@for_each_implementation
@each_world
def test_unshard_and_reshard(impl: Implementation, world: int) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = sharded(impl, probes())
        full = [p.full_tensor() for p in model[0].parameters()]
        assert model[0].unshard() is None
        assert model[0].unshard() is None, "a second call does nothing"
        assert [kinds(probe) for probe in model] == [{nn.Parameter}, {DTensor}, {DTensor}]
        assert all(torch.equal(p, f) for p, f in zip(model[0].parameters(), full, strict=True))
        model[0].reshard()
        model[0].reshard()
        assert kinds(model) == {DTensor}
        handle = model[1].unshard(async_op=True)
        assert handle is not None
        handle.wait()
        handle.wait()
        assert kinds(model[1]) == {nn.Parameter}
        model[2].unshard(async_op=True)  # never waited for: the forward does it
        model(torch.randn(2, 5)).sum().backward()
        assert kinds(model) == {DTensor}

    run(rank_main, impl, world=world)


@behaviour("forward under `torch.no_grad` frees what it gathered", area="when parameters are full")
@for_each_implementation
@each_world
def test_forward_without_grad(impl: Implementation, world: int) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = sharded(impl, probes())
        with torch.no_grad():
            assert not model(torch.randn(2, 5)).requires_grad
        assert all(kinds(probe) == {DTensor} for probe in model)
        model(torch.randn(2, 5)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    run(rank_main, impl, world=world)


@behaviour("explicit prefetch lists change no value", area="prefetch")
@for_each_implementation
@each_world
def test_explicit_prefetch_changes_no_value(impl: Implementation, world: int) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = sharded(impl, probes(4))
        x = torch.ones(2, 5)
        expected = [model(x).detach() for _ in range(2)]
        for i, probe in enumerate(model):
            probe.set_modules_to_forward_prefetch(list(model)[i + 1 : i + 3])
            probe.set_modules_to_backward_prefetch(list(model)[max(i - 2, 0) : i][::-1])
        for _ in range(2):
            out = model(x)
            assert torch.equal(out, expected[0])
            out.sum().backward()
            assert kinds(model) == {DTensor}

    run(rank_main, impl, world=world)
