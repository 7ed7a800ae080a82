"""Conformance with what torch's own tests of FSDP2 check, where no other file has it: tests/harness/torch_suite.py maps
their classes to ours.

Written anew from what those tests are about; default settings. Ranks are threads, so values are real; `--ranks=gloo`
runs the same on processes (tests/procs/test_conformance_gloo.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import Implementation, for_each_implementation, kinds, run, sharded
from tests.harness.models import adamw, seeded
from tests.harness.threads import WORLD

STEPS, ROWS = 3, 2


def _linear(width: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def _stack(depth: int = 3) -> nn.Sequential:
    model = seeded(lambda: nn.Sequential(*(_linear() for _ in range(depth))))
    assert isinstance(model, nn.Sequential)
    return model


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(1000 * step + rank))


def _train_beside(
    rank: int,
    world: int,
    model: nn.Module,
    plain: nn.Module,
    backward: Callable[[Any, Tensor, int, float], None],
    steps: int = STEPS,
) -> None:
    """`backward(model, x, step, scale)` on this rank's rows, and on those of all ranks for the plain model."""
    optimizers = [adamw(model.parameters(), watched=False), adamw(plain.parameters())]
    for step in range(steps):
        backward(model, _batch(step, rank), step, 1.0)
        for each in range(world):
            backward(plain, _batch(step, each), step, 1.0 / world)
        for (name, p), (_, whole) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert (p.grad is None) == (whole.grad is None), f"step {step}, {name}: {p.grad} where {whole.grad}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    tolerance.assert_parameters_close(model, plain, optimizers[1])
    assert kinds(model) == {DTensor}, "full parameters left on the module"


# ---- autograd ------------------------------------------------------------------------------------------------


class _TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _linear(), _linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


@behaviour("an output that some steps leave out of the loss", area="autograd")
@for_each_implementation
@pytest.mark.parametrize("reshard", [True, False])
def test_an_output_that_is_not_used(reshard: bool, impl: Implementation) -> None:
    base = seeded(_TwoOutputs)

    def backward(model: Any, x: Tensor, step: int, scale: float) -> None:
        first, second = model(x)
        (scale * ((first * second).sum() if step < 2 else first.sum())).backward()

    def rank_main(rank: int, impl: Implementation) -> None:
        model = sharded(impl, copy.deepcopy(base), reshard_after_forward=reshard)
        _train_beside(rank, WORLD, model, copy.deepcopy(base), backward, steps=4)

    run(rank_main, impl)


class _Skipping(nn.Module):
    """Units that run in another order in each step, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_linear() for _ in range(4))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for i in order:
            x = self.layers[i](x)
        return x


@behaviour("units that run in another order in each step, or not at all", area="prefetch")
@for_each_implementation
def test_units_that_change_their_order(impl: Implementation) -> None:
    base = seeded(_Skipping)
    orders = [(0, 1, 2, 3), (0, 2, 3), (3, 0), (1, 2, 3, 0)]

    def backward(model: Any, x: Tensor, step: int, scale: float) -> None:
        (scale * model(x, orders[step]).square().mean()).backward()

    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = copy.deepcopy(base)
        for layer in model.layers:
            impl.fully_shard(layer)
        impl.fully_shard(model)
        _train_beside(rank, WORLD, model, copy.deepcopy(base), backward, steps=4)

    run(rank_main, impl)


@behaviour("a unit inside runs alone, forward and backward, between steps of the whole", area="autograd")
@for_each_implementation
def test_a_unit_inside_runs_alone(impl: Implementation) -> None:
    base = _stack()

    def backward(model: Any, x: Tensor, step: int, scale: float) -> None:
        (scale * model(x).square().mean()).backward()
        (scale * model[1](x).sin().mean()).backward()

    def rank_main(rank: int, impl: Implementation) -> None:
        model = sharded(impl, copy.deepcopy(base))
        _train_beside(rank, WORLD, model, copy.deepcopy(base), backward)

    run(rank_main, impl)


# ---- frozen --------------------------------------------------------------------------------------------------


class _Recomputed(nn.Module):
    """`how`: None keeps what backward needs; else `use_reentrant`."""

    def __init__(self, how: bool | None) -> None:
        super().__init__()
        self.layers, self.how = nn.ModuleList(_linear() for _ in range(3)), how
        self.layers[0].requires_grad_(False)
        self.layers[1].get_submodule("0").get_parameter("bias").requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.how is None else checkpoint(layer, x, use_reentrant=self.how)
        return x


@behaviour("frozen parts of units, recomputed or not, run twice before one backward", area="gradients")
@for_each_implementation
@pytest.mark.parametrize("recompute", [None, False], ids=["kept", "not reentrant"])
def test_frozen_parts_that_run_twice(recompute: bool | None, impl: Implementation) -> None:
    _run_twice(recompute, impl)


@behaviour(
    "frozen parts of units, in reentrant recomputation, run twice before one backward",
    area="gradients",
    torch="better",
    reason="torch trains on wrong gradients, without a word",
)
def test_frozen_parts_in_reentrant_recomputation(impl: Implementation) -> None:
    _run_twice(True, impl)


def _run_twice(recompute: bool | None, impl: Implementation) -> None:
    base = seeded(lambda: _Recomputed(recompute))

    def backward(model: Any, x: Tensor, step: int, scale: float) -> None:
        x = x.requires_grad_(recompute is True)  # reentrant recomputation asks for one
        (scale * (model(x).square().mean() + model(x.flip(0)).sin().mean())).backward()

    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = copy.deepcopy(base)
        for layer in model.layers:
            impl.fully_shard(layer)
        impl.fully_shard(model)
        _train_beside(rank, WORLD, model, copy.deepcopy(base), backward)

    run(rank_main, impl)


# ---- gathering by hand ----------------------------------------------------------------------------------------


@behaviour("`unshard` and `reshard` of a unit without parameters, before any forward", area="when parameters are full")
@for_each_implementation
def test_unshard_without_parameters(impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model = impl.fully_shard(nn.Sequential(nn.ReLU()))
        handle = model.unshard(async_op=True)
        handle.wait()
        model.reshard()
        x = torch.ones(2, requires_grad=True)
        model(x).sum().backward()
        assert torch.equal(x.grad, torch.ones(2))

    run(rank_main, impl)


@behaviour("units gathered explicitly, each while the one before runs", area="when parameters are full")
@for_each_implementation
def test_units_gathered_by_hand(impl: Implementation) -> None:
    base = _stack()

    def backward(model: Any, x: Tensor, step: int, scale: float) -> None:
        handle = model[0].unshard(async_op=True) if hasattr(model[0], "unshard") else None
        for i, layer in enumerate(model):
            following = model[i + 1] if i + 1 < len(model) else None
            if handle is not None:
                handle.wait()
                handle = following.unshard(async_op=True) if following is not None else None
            x = layer(x)
        (scale * x.square().mean()).backward()

    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = copy.deepcopy(base)
        for layer in model:
            impl.fully_shard(layer)
        _train_beside(rank, WORLD, model, copy.deepcopy(base), backward)

    run(rank_main, impl)


# ---- accumulation --------------------------------------------------------------------------------------------


@behaviour("one forward, one backward: micro-batches in flight, reduced with the last backward", area="gradients")
@for_each_implementation
def test_one_forward_one_backward(impl: Implementation) -> None:
    """As a pipeline does: the second forward runs before the first backward, and so on."""
    base = _stack()

    def backward(model: Any, x: Tensor, step: int, scale: float) -> None:
        losses = []
        micros, done = 4, 0

        def one(last: bool) -> None:
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
            (scale * losses.pop(0)).backward()

        for micro in range(micros):
            losses.append(model(x.roll(micro, 1)).square().mean())
            if len(losses) == 2:
                one(last=False)
                done += 1
        while losses:
            one(last=len(losses) == 1)
            done += 1
        assert done == micros

    def rank_main(rank: int, impl: Implementation) -> None:
        model = sharded(impl, copy.deepcopy(base))
        _train_beside(rank, WORLD, model, copy.deepcopy(base), backward)

    run(rank_main, impl)


@behaviour("held gradients of bfloat16 computation add up in the reduce dtype", area="mixed precision")
@for_each_implementation
def test_held_gradients_add_up_in_the_reduce_dtype(impl: Implementation) -> None:
    """1 + 1/512 has no bfloat16: a sum in the dtype of the computation would lose the second micro-batch."""

    def rank_main(rank: int, impl: Implementation) -> None:
        policy = impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = impl.fully_shard(seeded(lambda: nn.Linear(3, 4, bias=False)), mp_policy=policy)
        for last, value in ((False, 1.0), (True, 1 / 512)):
            model.set_requires_gradient_sync(last)
            model(torch.full((1, 3), value)).sum().backward()
        assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 3), 1 + 1 / 512))

    run(rank_main, impl)


# ---- mixed precision -----------------------------------------------------------------------------------------


class _Seen(nn.Module):
    """Notes the dtypes of its input and its weight, and passes on what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dtypes: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        self.dtypes.append((x.dtype, self.linear.weight.dtype))
        y = self.linear(x.to(self.linear.weight.dtype))
        return y if beside is None else y + beside.to(y.dtype)


class _Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = _Seen(), _Seen()

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(y, x)  # the second one gets an input from outside of the first


@behaviour("a unit in float16 inside a model in float32, with inputs from outside", area="mixed precision")
@for_each_implementation
@pytest.mark.parametrize("cast", [True, False])
def test_one_unit_in_float16(cast: bool, impl: Implementation) -> None:
    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = seeded(_Parts)
        impl.fully_shard(
            model.b, mp_policy=impl.MixedPrecisionPolicy(param_dtype=torch.float16, cast_forward_inputs=cast)
        )
        impl.fully_shard(model)
        out = model(torch.ones(2, 4))
        assert model.a.dtypes == [(torch.float32, torch.float32)]
        assert model.b.dtypes == [(torch.float16 if cast else torch.float32, torch.float16)]
        assert out.dtype == torch.float16
        out.float().sum().backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}

    run(rank_main, impl)


@behaviour("norms kept in float32, as units of their own, inside a model in bfloat16", area="mixed precision")
@for_each_implementation
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm], ids=lambda norm: norm.__name__)
def test_norms_in_float32(norm: Callable[[int], nn.Module], impl: Implementation) -> None:
    base = seeded(lambda: nn.Sequential(nn.Linear(4, 4), norm(4), nn.Linear(4, 4)))

    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = copy.deepcopy(base)
        seen: list[torch.dtype] = []
        model[1].register_forward_hook(lambda module, args, out: seen.append(module.weight.dtype))
        lower = torch.bfloat16
        impl.fully_shard(model[1], mp_policy=impl.MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=lower))
        impl.fully_shard(model, mp_policy=impl.MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=torch.float32))
        out = model(torch.ones(2, 4))
        assert seen == [torch.float32] and out.dtype == lower
        out.float().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())

    run(rank_main, impl)


# ---- initialisation ------------------------------------------------------------------------------------------


@behaviour("meshes made from process groups, of one axis and of two", area="placement")
@for_each_implementation
@pytest.mark.parametrize("axes", [1, 2])
def test_meshes_from_process_groups(axes: int, impl: Implementation) -> None:
    base = _stack()

    def backward(model: Any, x: Tensor, step: int, scale: float) -> None:
        (scale * model(x).square().mean()).backward()

    def rank_main(rank: int, impl: Implementation) -> None:
        if axes == 1:
            mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("shard",))
        else:
            made = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            mesh = DeviceMesh.from_group(
                [made.get_group("replicate"), made.get_group("shard")],
                "cpu",
                mesh=made.mesh,
                mesh_dim_names=("replicate", "shard"),
            )
        model = sharded(impl, copy.deepcopy(base), mesh=mesh)
        assert all(p.device_mesh == mesh for p in model.parameters())
        _train_beside(rank, 2 * axes, model, copy.deepcopy(base), backward)

    run(rank_main, impl, world=2 * axes)


@behaviour("parameters and gradients cut along their longest dim are contiguous", area="placement")
@for_each_implementation
def test_shards_are_contiguous(impl: Implementation) -> None:
    def longest(p: nn.Parameter) -> Shard:
        return Shard(max(range(p.ndim), key=lambda i: p.shape[i]))

    base = seeded(lambda: nn.Sequential(nn.Linear(8, 2), nn.Tanh(), nn.Linear(2, 4), nn.Conv1d(4, 2, 4, padding=2)))

    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = copy.deepcopy(base)
        for layer in model:
            impl.fully_shard(layer, shard_placement_fn=longest)
        impl.fully_shard(model, shard_placement_fn=longest)
        x = torch.ones(4, 8)
        model[3](model[2](model[1](model[0](x))).T[None]).sum().backward()
        for name, p in model.named_parameters():
            assert p.placements == (longest(p),) and p.is_contiguous() and p.to_local().is_contiguous(), name
            assert p.grad.to_local().is_contiguous() and p.grad.stride() == p.stride(), name

    run(rank_main, impl, world=2)


@behaviour("replicas of other values become one model when values are sent along the replicas", area="initialisation")
@for_each_implementation
def test_values_sent_along_replicas(impl: Implementation) -> None:
    bases = [seeded(lambda: nn.Sequential(_linear(), _linear()), seed) for seed in (0, 1)]

    def rank_main(rank: int, impl: Implementation) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = sharded(impl, copy.deepcopy(bases[mesh.get_local_rank("replicate")]), mesh=mesh)
        group = mesh.get_group("replicate")
        with torch.no_grad():
            for p in model.parameters():
                dist.broadcast(p.to_local(), dist.get_global_rank(group, 0), group)
        for name, p in model.named_parameters():
            assert torch.equal(p.full_tensor(), bases[0].get_parameter(name)), name
        model(_batch(0, rank)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    run(rank_main, impl, world=4)


@behaviour("a world of one: gradients are the plain ones, divided by no number of ranks", area="gradients")
@for_each_implementation
@pytest.mark.parametrize("factor", [None, 4.0])
def test_gradients_in_a_world_of_one(factor: float | None, impl: Implementation) -> None:
    base = _stack()

    def rank_main(rank: int, impl: Implementation) -> None:
        model, plain = sharded(impl, copy.deepcopy(base)), copy.deepcopy(base)
        if factor is not None:
            for unit in model:
                unit.set_gradient_divide_factor(factor)
        for each in (model, plain):
            each(_batch(0, 0)).square().sum().backward()
        for p, whole in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad.full_tensor(), whole.grad / (factor or 1.0))

    run(rank_main, impl, world=1)
