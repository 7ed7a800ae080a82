"""Conformance: what the parameters are, when they are full or sharded, mixed precision, state dicts; and in the fewest
lines what torch 2.13 refuses or gets wrong.

Programs written for torch's FSDP2 rely on what is asserted here. Ranks are threads, so values are real; each test is a
function of (rank, impl) that asserts on its own rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.harness import tolerance
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
from tests.harness.models import Case, Transformer, seeded

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


# ---- mixed precision and state dicts -------------------------------------------------------------------------

# ---- mixed precision -----------------------------------------------------------------------------------------


@behaviour("dtypes of parameters, inputs, outputs and gradients under a policy", area="mixed precision")
@for_each_implementation
@each_world
def test_mixed_precision_dtypes(impl: Implementation, world: int) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        policy = impl.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float64
        )
        model = sharded(impl, probes(2), mp_policy=policy)
        out = model(torch.randn(2, 5))
        assert out.dtype == torch.float64
        out.sum().backward()
        for probe in model:
            assert probe.seen == [(nn.Parameter, (5, 5), torch.bfloat16, torch.bfloat16)]
        for param in model.parameters():
            assert param.dtype == torch.float32, "storage stays in the original dtype"
            assert param.grad is not None and param.grad.dtype == torch.float32

    run(rank_main, impl, world=world)


@behaviour("inputs are cast in any nesting, or left alone by `cast_forward_inputs=False`", area="mixed precision")
@for_each_implementation
@each_world
def test_inputs_are_left_alone_when_asked(impl: Implementation, world: int) -> None:
    class KeepsInput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.dtypes: list[torch.dtype] = []

        def forward(self, x: torch.Tensor, *, extra: dict[str, list[torch.Tensor]]) -> torch.Tensor:
            self.dtypes += [x.dtype, extra["a"][0].dtype, extra["a"][1].dtype]
            return x.to(self.weight.dtype) * self.weight

    def rank_main(rank: int, impl: Implementation) -> None:
        for cast, floating in ((True, torch.bfloat16), (False, torch.float32)):
            policy = impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=cast)
            model = impl.fully_shard(KeepsInput(), mp_policy=policy)
            out = model(torch.ones(4), extra={"a": [torch.ones(2), torch.arange(2)]})
            assert model.dtypes == [floating, floating, torch.int64], "floating-point tensors in any nesting, no others"
            assert out.dtype == torch.bfloat16

    run(rank_main, impl, world=world)


@behaviour("bfloat16 gradients are reduced in float32", area="mixed precision")
@for_each_implementation
@each_world
def test_reduction_in_float32_of_bfloat16_gradients(impl: Implementation, world: int) -> None:
    """Each rank's bfloat16 gradient is exact here, and so is their float32 mean; a bfloat16 sum would round it away."""
    contributions = [1.0, 1 / 512, 0.0, 0.0][:world]  # 1 + 1/512 has no bfloat16

    def rank_main(rank: int, impl: Implementation) -> None:
        policy = impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = impl.fully_shard(seeded(lambda: nn.Linear(3, 4, bias=False)), mp_policy=policy)
        model(torch.full((1, 3), contributions[rank])).sum().backward()
        expected = torch.full((4, 3), sum(contributions) / world)
        assert torch.equal(model.weight.grad.full_tensor(), expected)

    run(rank_main, impl, world=world)


# ---- state dicts ---------------------------------------------------------------------------------------------


@behaviour("`state_dict` is sharded and needs no communication; `load_state_dict` puts it back", area="state")
@for_each_implementation
@each_world
def test_state_dict_is_sharded_and_needs_no_communication(impl: Implementation, world: int) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        plain = seeded(Transformer)
        plain.register_buffer("steps", torch.tensor(3))
        keys = list(plain.state_dict())
        model = plain
        for layer in model.layers:
            impl.fully_shard(layer)
        impl.fully_shard(model)
        model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
        if rank == 0:  # alone: a collective in here would wait for rank 1 and the test would hang
            state = model.state_dict()
            assert list(state) == keys
            for name, value in state.items():
                assert isinstance(value, DTensor) == (name != "steps"), name
                if isinstance(value, DTensor):
                    assert value.placements == (Shard(0),) and not value.requires_grad
        dist.barrier()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        model.load_state_dict(state)
        for name, value in model.state_dict().items():
            local, wanted = (t.to_local() if isinstance(t, DTensor) else t for t in (value, state[name]))
            assert torch.equal(local, wanted), name
        before = model(torch.zeros(1, 3, dtype=torch.long))
        with torch.no_grad():
            model.head.weight.mul_(2)
        assert tolerance.close(model(torch.zeros(1, 3, dtype=torch.long)), 2 * before), (
            "a change is seen by the next forward"
        )

    run(rank_main, impl, world=world)


# ---- what torch refuses or gets wrong ------------------------------------------------------------------------


def _odd() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 7)))


@behaviour(
    "`shard_placement_fn`: `Shard(i)` of a dim that the world does not divide",
    area="placement",
    torch="better",
    reason="shards are cut as `torch.chunk` cuts along any dim; torch asks for even ones",
)
@pytest.mark.parametrize("world", [2, 4])
def test_uneven_columns(world: int, impl: Implementation) -> None:
    expected = _odd()
    expected(torch.ones(1, 5)).sum().backward()

    def rank_main(rank: int, impl: Implementation) -> None:
        model = impl.fully_shard(_odd(), shard_placement_fn=lambda p: Shard(p.ndim - 1))
        model(torch.ones(1, 5)).sum().backward()
        for name, p in model.named_parameters():
            grad, whole = p.grad, expected.get_parameter(name).grad
            chunks = whole.chunk(world, dim=p.ndim - 1)
            assert grad.placements == (Shard(p.ndim - 1),)
            assert grad.to_local().shape[-1] == (chunks[rank].shape[-1] if rank < len(chunks) else 0)
            tolerance.assert_close(grad.full_tensor(), whole)

    run(rank_main, impl, world=world)


@behaviour(
    "`clip_grad_norm_` by the largest element, where a rank owns none",
    area="clipping",
    torch="better",
    reason="`fullshard.clip_grad_norm_` takes an empty shard for 0; torch's function fails on it",
)
def test_largest_element_of_an_empty_shard(impl: Implementation) -> None:
    expected = _odd()
    expected(torch.ones(1, 5)).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.01, float("inf"))

    def rank_main(rank: int, impl: Implementation) -> None:
        model = impl.fully_shard(_odd())  # 3 and 7 rows
        model(torch.ones(1, 5)).sum().backward()
        found = impl.clip(model.parameters(), 0.01, float("inf"))
        tolerance.assert_close(found.full_tensor() if hasattr(found, "full_tensor") else found, norm)
        for name, p in model.named_parameters():
            tolerance.assert_close(p.grad.full_tensor(), expected.get_parameter(name).grad)

    run(rank_main, impl, world=4)


class _Rotary(nn.Module):
    """A buffer that was computed on a real device, and no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.arange(4, device="cpu") + 1.0, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.frequencies


@behaviour(
    "a buffer with data keeps it through `to_empty`",
    area="initialisation",
    torch="better",
    reason="only what has no data is given new memory; torch leaves whatever is in memory",
)
def test_buffers_with_data_keep_it(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = impl.fully_shard(_Rotary())
        torch.full((4,), 7.0)  # freed at once: memory that is likely to be handed out next is not as it should be
        model.to_empty(device="cpu")
        assert torch.equal(model.frequencies, torch.arange(4) + 1.0)

    run(rank_main, impl)


@behaviour(
    "parameters that nothing wrote since `to_empty` are an error of the first forward, by name",
    area="initialisation",
    torch="better",
    reason="torch trains on whatever is in memory",
)
def test_uninitialised_parameters_are_named(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        with torch.device("meta"):
            model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        impl.fully_shard(model)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for p in (*model[0].parameters(), model[1].bias):
                p.zero_()
        with pytest.raises(RuntimeError, match="1.weight"):
            model(torch.ones(1, 4))

    run(rank_main, impl)


@behaviour(
    "a child sharded after its root is an error that names the parameter",
    area="errors",
    torch="better",
    reason="torch raises a TypeError that names nothing ('value was None')",
)
def test_root_sharded_before_its_children(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = impl.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        with pytest.raises((ValueError, RuntimeError), match="weight"):
            impl.fully_shard(model[0])

    run(rank_main, impl)
