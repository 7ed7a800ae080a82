"""Tensor subclasses that say themselves how they are gathered: `fsdp_pre_all_gather` and `fsdp_post_all_gather`.

`Master` keeps a float32 weight and sends int8 and a scale for each shard, as float8 training does. What arrives is
a plain tensor in the compute dtype, or a `Quantized` that holds the int8 itself and is dequantised where it is used.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree

import fullshard
from fullshard.engine import unit_of
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import Implementation, for_each_implementation, run
from tests.harness.models import seeded
from tests.harness.threads import WORLD, run_ranks

aten = torch.ops.aten
# Operations whose results are of the class again: what sharding, saving and optimizers do with a shard.
KEEPING = {
    aten.detach.default,
    aten.split.Tensor,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten.clone.default,
    aten.empty_like.default,
}


class Wrapper(torch.Tensor):
    """A subclass around one plain tensor."""

    _inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, *_: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self._inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain_args, plain_kwargs = pytree.tree_map_only(Wrapper, lambda t: t._inner, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        if func in KEEPING:
            return pytree.tree_map_only(Tensor, cls, result)
        if func._schema.is_mutable:
            return args[0]
        return result


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 and one scale, (1,)."""
    scale = weight.abs().amax().clamp(min=1e-6).reshape(1) / 127 if weight.numel() else torch.ones(1)
    return (weight / scale).round().to(torch.int8), scale


def dequantise(data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`data` of all ranks; each rank's rows have a scale of their own."""
    rows = data.shape[0] // scales.shape[0]
    return (data.float() * scales.repeat_interleave(rows).view(-1, 1)).to(dtype)


class Master(Wrapper):
    """The full arity; a plain tensor arrives."""

    calls: ClassVar[list[tuple[Any, ...]]] = []
    # torch leaves it to the method to tell autograd that filling again is no edit, and nothing to differentiate.
    keeps_version: ClassVar[bool] = True

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        rows = -(-outer_size[0] // mesh.size())
        inner = nn.functional.pad(self._inner, (0, 0, 0, rows - self._inner.shape[0]))
        self.calls.append((mesh.ndim, tuple(outer_size), tuple(outer_stride), type(module).__mro__[-2:], mp_policy))
        return quantise(inner), outer_size[0]

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        full = dequantise(*outputs, param_dtype)[:metadata]
        if out is None:
            full = full.clone()
            return full, (full,)
        if self.keeps_version:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(full)
        else:
            out.copy_(full)
        return None


class OldMaster(Master):
    """The arity of one."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return quantise(self._inner), self._inner.shape[0] * mesh.size()


class Quantized(torch.Tensor):
    """A full parameter that is the int8 that arrived."""

    @staticmethod
    def __new__(cls, data: Tensor, scales: Tensor, dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)

    def __init__(self, data: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self._data, self._scales, self._dtype = data, scales, dtype

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.as_strided.default:
            assert tuple(args[1]) == tuple(args[0].shape)  # torch takes the padding off so
        if func in (aten.detach.default, aten.alias.default, aten.as_strided.default):
            return cls(args[0]._data, args[0]._scales, args[0]._dtype)
        plain = lambda q: dequantise(q._data, q._scales, q._dtype)  # noqa: E731
        return func(*pytree.tree_map_only(cls, plain, args), **pytree.tree_map_only(cls, plain, kwargs or {}))


class Kept(Master):
    """What arrives is kept as it is: the memory of the outputs is that of the full parameter."""

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        data, scales = outputs
        if out is None:
            return Quantized(data, scales, param_dtype), (data, scales)
        assert out._data.data_ptr() == data.data_ptr() and out._scales.data_ptr() == scales.data_ptr()
        return None


class First(nn.Module):
    def __init__(self, kind: type[Wrapper], rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(kind(nn.Linear(3, rows).weight.detach().clone()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.mm(x, Transposed.apply(self.weight)))


class Model(nn.Module):
    def __init__(self, kind: type[Wrapper], rows: int) -> None:
        super().__init__()
        self.first, self.second = First(kind, rows), nn.Linear(rows, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Transposed(torch.autograd.Function):
    """Reads the weight in forward and again in backward, as a matrix multiplication of a float8 library does."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return (weight * 1.0).t().contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        assert bool(torch.isfinite((weight * 1.0).float()).all())
        return gradient.t().contiguous()


def expected_training(
    kind: type[Wrapper], rows: int, world: int, dtype: torch.dtype, steps: int, *, ranks: int | None = None
) -> list[Tensor]:
    """Plain training of the float32 weight, with the gradient taken at the quantised one.

    `world` ranks share the weight; gradients are the mean of `ranks` (None: of those).
    """
    ranks = ranks or world
    model = seeded(lambda: Model(Master, rows))
    weight = nn.Parameter(model.first.weight._inner.clone())  # type: ignore[attr-defined]
    second = model.second
    optimizer = torch.optim.SGD([weight, *second.parameters()], lr=0.1)
    padded = -(-rows // world)
    for step in range(steps):
        optimizer.zero_grad()
        parts = [quantise(nn.functional.pad(p, (0, 0, 0, padded - len(p)))) for p in _shards(weight.detach(), world)]
        used = dequantise(torch.cat([d for d, _ in parts]), torch.cat([s for _, s in parts]), dtype)[:rows]
        used.requires_grad_()
        for rank in range(ranks):
            compute = [p.to(dtype) for p in second.parameters()]
            x = inputs(step, rank).to(dtype)
            out = nn.functional.linear(torch.tanh(torch.mm(x, (used * 1.0).t())), *compute)
            (out.square().sum() / ranks).backward()
        assert used.grad is not None
        weight.grad = used.grad.float()
        optimizer.step()
    return [weight.detach(), *(p.detach() for p in second.parameters())]


def _shards(tensor: Tensor, world: int) -> list[Tensor]:
    chunks = list(tensor.chunk(world))
    return chunks + [tensor[:0]] * (world - len(chunks))


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(31 * step + rank))


def values(model: nn.Module) -> list[Tensor]:
    """The whole float32 parameters."""
    found = []
    for p in model.parameters():
        assert isinstance(p, DTensor)
        local = p.to_local().detach()
        plain = local._inner if isinstance(local, Wrapper) else local
        found.append(
            DTensor.from_local(plain, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()).full_tensor()
        )
    return found


@pytest.mark.sample(3)
@behaviour("fsdp_pre_all_gather and fsdp_post_all_gather on a shard, both arities", area="extensions")
@pytest.mark.parametrize("kind", [Master, OldMaster, Kept], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@for_each_implementation
def test_training_through_the_methods(dtype: torch.dtype | None, kind: type[Wrapper], impl: Implementation) -> None:
    """Three steps, freed after forward, equal to plain training with the same quantisation on each shard."""
    expected = expected_training(kind, 4, WORLD, dtype or torch.float32, 3)
    models = [seeded(lambda: Model(kind, 4)) for _ in range(WORLD)]
    Master.calls.clear()

    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = models[rank]
        policy = impl.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        impl.fully_shard(model.first, mp_policy=policy)
        impl.fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            weight = model.first.weight
            assert isinstance(weight, DTensor) and type(weight.to_local()) is kind
            model(inputs(step, rank)).square().sum().backward()
            grad = model.first.weight.grad
            assert isinstance(grad, DTensor) and type(grad.to_local()) is Tensor and grad.dtype is torch.float32
            optimizer.step()
        for value, wanted in zip(values(model), expected, strict=True):
            rtol = 0.05 if dtype else 1e-5
            torch.testing.assert_close(value, wanted, rtol=rtol, atol=rtol / 10)
        if kind is not OldMaster:
            assert (1, (4, 3), (3, 1)) in {call[:3] for call in Master.calls}
            assert all(call[4].param_dtype is dtype for call in Master.calls)

    run(rank_main, impl)


@behaviour(
    "extensions with uneven and empty shards",
    area="extensions",
    torch="better",
    reason="torch raises on the short ranks alone unless the method pads, and the others hang; here shards are padded",
)
@pytest.mark.parametrize(("rows", "world"), [(5, 2), (2, 3), (5, 4), (4, 1)])
def test_short_and_empty_shards(rows: int, world: int, impl: Implementation) -> None:
    """`Master` with methods that know nothing of padding, and nothing of autograd's versions."""

    class Unpadded(Master):
        keeps_version = False

        def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, mp_policy: Any) -> Any:  # type: ignore[override]
            assert self._inner.shape[0] == -(-size[0] // mesh.size()), "the padded shape, on every rank"
            return quantise(self._inner), size[0]

    expected = expected_training(Master, rows, world, torch.float32, 2)
    models = [seeded(lambda: Model(Unpadded, rows)) for _ in range(world)]

    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = models[rank]
        impl.fully_shard(model.first)
        impl.fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            model(inputs(step, rank)).square().sum().backward()
            optimizer.step()
        for value, wanted in zip(values(model), expected, strict=True):
            tolerance.assert_close(value, wanted)

    run(rank_main, impl, world=world)


@pytest.mark.parametrize("kind", [Master, Kept])
def test_memory_comes_and_goes(kind: type[Wrapper]) -> None:
    """Full parameters, and what arrived, have no bytes outside of compute; nothing is made anew after one step."""

    def rank_main(rank: int) -> None:
        model: Any = seeded(lambda: Model(kind, 4))
        fullshard.fully_shard(model.first)
        fullshard.fully_shard(model)
        unit = unit_of(model.first)
        assert unit is not None
        (group,) = unit.groups
        live = []
        model.second.register_forward_pre_hook(lambda *_: live.append(group.memory.live_nbytes))
        model.first.register_forward_pre_hook(lambda *_: live.append(group.memory.live_nbytes))
        fulls = set()
        for step in range(2):
            model(inputs(step, rank)).sum().backward()
            fulls.add(id(group.params[0].full))
            assert group.memory.live_nbytes == 0
        sent = 4 * 3 + WORLD * 4
        assert len(fulls) == 1 and set(live) == {0, sent + (0 if kind is Kept else 4 * 3 * 4)}

    run_ranks(WORLD, rank_main)


def test_evaluation_frozen_accumulation_and_a_retry() -> None:
    def rank_main(rank: int) -> None:
        model: Any = seeded(lambda: Model(Master, 4))
        fullshard.fully_shard(model.first)
        fullshard.fully_shard(model)
        with torch.inference_mode():
            first = model(inputs(0, rank))
        assert torch.equal(model(inputs(0, rank)).detach(), first)
        with pytest.raises(ArithmeticError):
            out = model(inputs(0, rank))
            out.register_hook(_raise)
            out.sum().backward()
        model(inputs(0, rank)).sum().backward()
        model(inputs(1, rank)).sum().backward()
        both = [p.grad.full_tensor().clone() for p in model.parameters()]
        model.zero_grad()
        for step in range(2):
            model.set_requires_gradient_sync(step == 1)
            model(inputs(step, rank)).sum().backward()
        for p, expected in zip(model.parameters(), both, strict=True):
            tolerance.assert_close(p.grad.full_tensor(), expected)
        model.zero_grad()
        model.first.requires_grad_(False)
        model(inputs(0, rank)).sum().backward()
        assert model.first.weight.grad is None and model.second.weight.grad is not None

    run_ranks(WORLD, rank_main)


def _raise(_: Tensor) -> None:
    raise ArithmeticError


def test_beside_tensor_parallelism() -> None:
    """A subclass as the local tensor of a DTensor on tp: in compute, the DTensor holds what the method made."""

    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        value = torch.arange(-12.0, 12.0).view(8, 3)
        whole = distribute_tensor(value, mesh["tp"], [Shard(0)])
        model: Any = nn.Linear(3, 8, bias=False)
        local = DTensor.from_local(Master(whole.to_local()), mesh["tp"], [Shard(0)], run_check=False)
        model.weight = nn.Parameter(local)
        fullshard.fully_shard(model, mesh=mesh["dp"])
        assert model.weight.placements[1] == Shard(0) and type(model.weight.to_local()) is Master
        model.unshard()
        assert model.weight.placements == (Shard(0),) and model.weight.device_mesh == mesh["tp"]
        torch.testing.assert_close(model.weight.full_tensor().detach(), value, rtol=0, atol=0.06)
        model.reshard()

    run_ranks(4, rank_main)


def test_on_a_mesh_that_replicates_too() -> None:
    """(2, 2): the methods see the axis that shards; the gradient is the mean over all four. An axis that only
    replicates is refused: the methods would divide by its size."""
    reference = expected_training(Master, 4, 2, torch.float32, 0)[0]
    data, scales = zip(*(quantise(part) for part in reference.chunk(2)), strict=True)
    used = dequantise(torch.cat(data), torch.cat(scales), torch.float32).requires_grad_()
    for rank in range(4):
        (torch.tanh(inputs(0, rank) @ (used * 1.0).t()).sum() / 4).backward()
    models = [seeded(lambda: Model(Master, 4)) for _ in range(5)]

    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("re", "dp"))
        first: Any = fullshard.fully_shard(models[rank].first, mesh=mesh)
        first(inputs(0, rank)).sum().backward()
        tolerance.assert_close(first.weight.grad.full_tensor(), used.grad)
        whole: Any = First(Master, 4)
        own = DTensor.from_local(Master(reference), mesh, [Replicate(), Replicate()], run_check=False)
        whole.weight = nn.Parameter(own)
        dims = fullshard.DataParallelMeshDims(replicate="re")
        with pytest.raises(NotImplementedError, match="weight: expected a mesh with an axis that shards"):
            fullshard.fully_shard(whole, mesh=mesh, dp_mesh_dims=dims)

    run_ranks(4, rank_main)


def _half(name: str) -> type[Wrapper]:
    return type("Half", (Wrapper,), {name: getattr(Master, name)})


@pytest.mark.parametrize("name", ["fsdp_pre_all_gather", "fsdp_post_all_gather"])
def test_one_method_without_the_other_is_refused(name: str) -> None:
    def rank_main(rank: int) -> None:
        model = nn.Linear(3, 4, bias=False)
        model.weight = nn.Parameter(_half(name)(torch.ones(4, 3)))
        with pytest.raises(AssertionError, match=f"weight: expected both of .* found only {name}; define"):
            fullshard.fully_shard(model)

    run_ranks(1, rank_main)


def test_what_is_returned_is_checked() -> None:
    class Wrong(Master):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
            return self._inner

    def rank_main(rank: int) -> None:
        model = nn.Linear(3, 4, bias=False)
        model.weight = nn.Parameter(Wrong(torch.ones(4, 3)))
        fullshard.fully_shard(model)
        with pytest.raises(TypeError, match=r"weight: expected fsdp_pre_all_gather to return \(tensors to send"):
            model(torch.ones(1, 3))

    run_ranks(WORLD, rank_main)


def test_a_refused_call_leaves_the_model_as_it_was() -> None:
    """Found in the second group of parameters, when the first one was made: then the corrected call is the first."""

    def rank_main(rank: int) -> None:
        model: Any = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4, bias=False)))
        good = model[1].weight
        model[1].weight = nn.Parameter(_half("fsdp_pre_all_gather")(torch.ones(4, 4)))
        before, kinds = list(model.parameters()), [type(module) for module in model.modules()]
        marks = [dict(p.__dict__) for p in before]
        with pytest.raises(AssertionError, match="expected both of"):
            fullshard.fully_shard(model)
        assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
        assert [type(module) for module in model.modules()] == kinds
        assert [dict(p.__dict__) for p in before] == marks
        model[1].weight = good
        fullshard.fully_shard(model)
        model(torch.ones(1, 3)).sum().backward()
        assert all(isinstance(p, DTensor) and p.grad is not None for p in model.parameters())

    run_ranks(WORLD, rank_main)


# ---- methods of one tensor -------------------------------------------------------------------------------------------


def _send_half(self: Tensor, mesh: Any, size: Any, stride: Any, module: Any, mp_policy: Any) -> Any:
    rows = -(-size[0] // mesh.size())
    return (nn.functional.pad(self.to(torch.bfloat16), (0, 0, 0, rows - self.shape[0])),), size[0]


def _receive_half(self: Tensor, outputs: Any, rows: int, dtype: Any, *, out: Any = None) -> Any:
    (arrived,) = outputs
    full = arrived[:rows].to(dtype, copy=True)
    if out is None:
        return full, (full,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(full)
    return None


def _set_methods(tensor: Any) -> None:
    tensor.fsdp_pre_all_gather = MethodType(_send_half, tensor)
    tensor.fsdp_post_all_gather = MethodType(_receive_half, tensor)


class _Halves(nn.Module):
    """Plain training with the first and the third of three weights rounded to bfloat16 where they are used."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, rows), nn.Linear(rows, 4), nn.Linear(4, 4)])
        self.rounds = False

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            weight = layer.weight
            if self.rounds and index != 1:
                weight = weight + (weight.detach().to(torch.bfloat16).to(weight.dtype) - weight.detach())
            x = nn.functional.linear(x, weight, layer.bias).tanh()
        return x


@pytest.mark.sample(2)
@behaviour("extension methods set on a local tensor after fully_shard", area="extensions")
@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("rows", [4, 5])
@for_each_implementation
def test_methods_of_one_local_tensor(rows: int, offload: bool, impl: Implementation) -> None:
    """Before the first forward, on two of the parameters that were sharded together."""
    models = [seeded(lambda: _Halves(rows)) for _ in range(WORLD)]
    plain = seeded(lambda: _Halves(rows))
    plain.rounds = True
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(3):
        reference.zero_grad()
        torch.stack([plain(inputs(step, rank)).square().sum() for rank in range(WORLD)]).mean().backward()
        reference.step()

    def rank_main(rank: int, impl: Implementation) -> None:
        model = models[rank]
        options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
        impl.fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        weights: Any = [model.layers[index].weight for index in (0, 2)]
        for weight in weights:
            _set_methods(weight._local_tensor)
        for step in range(3):
            optimizer.zero_grad()
            model(inputs(step, rank)).square().sum().backward()
            optimizer.step()
        assert all(optimizer.state[weight]["exp_avg"].full_tensor().any() for weight in weights)
        for value, wanted in zip(values(model), plain.parameters(), strict=True):
            tolerance.assert_close(value, wanted.detach())

    run(rank_main, impl)


def test_methods_that_nothing_would_call_are_refused() -> None:
    def rank_main(rank: int) -> None:
        x = torch.ones(2, 4)

        def linears(sharded: bool = True) -> Any:
            model: Any = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
            return fullshard.fully_shard(model) if sharded else model

        # On the parameter, before and after: it stays whole, and continues once they are gone.
        model = linears(False)
        _set_methods(model[1].weight)
        with pytest.raises(ValueError, match=r"1\.weight: expected fsdp_pre_all_gather of the class"):
            fullshard.fully_shard(model)
        assert not isinstance(model[1].weight, DTensor)
        model = linears()
        _set_methods(model[1].weight)
        with pytest.raises(
            RuntimeError, match=r"1\.weight: expected fsdp_pre_all_gather .* found them set on the DTen"
        ):
            model(x)
        del model[1].weight.fsdp_pre_all_gather, model[1].weight.fsdp_post_all_gather
        model(x).sum().backward()

        # Too late: ranks agreed on their messages.
        with torch.no_grad():
            local = model[0].weight._local_tensor
        _set_methods(local)
        with pytest.raises(RuntimeError, match=r"0\.weight: expected .* before the first forward"):
            model(x)
        del local.fsdp_pre_all_gather, local.fsdp_post_all_gather
        model(x).sum().backward()

        # One alone, and taken off again.
        model = linears()
        model[0].weight._local_tensor.fsdp_pre_all_gather = _send_half
        with pytest.raises(AssertionError, match=r"0\.weight: expected both of .* found only fsdp_pre"):
            model(x)
        model = linears()
        _set_methods(model[0].weight._local_tensor)
        model(x).sum().backward()
        del model[0].weight._local_tensor.fsdp_pre_all_gather, model[0].weight._local_tensor.fsdp_post_all_gather
        with pytest.raises(RuntimeError, match=r"0\.weight: .* found that they were taken off"):
            model(x)

    run_ranks(WORLD, rank_main)


def test_methods_that_cannot_be_called_are_refused() -> None:
    """With secondary shards; and a function that is not bound, where it would have to be called on a copy."""

    def rank_main(rank: int) -> None:
        def sharded(**options: Any) -> Any:
            return fullshard.fully_shard(seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4))), **options)

        x = torch.ones(2, 4)
        model = sharded(reshard_after_forward=2)
        _set_methods(model[0].weight._local_tensor)
        with pytest.raises(
            NotImplementedError, match=r"0\.weight: .* integer reshard_after_forward.*use True or False"
        ):
            model(x)
        for options in ({}, {"offload_policy": fullshard.CPUOffloadPolicy(pin_memory=False)}):
            model = sharded(**options)
            local = model[0].weight._local_tensor
            _set_methods(local)
            bound = local.fsdp_pre_all_gather
            local.fsdp_pre_all_gather = lambda *args, bound=bound: bound(*args)
            with pytest.raises(
                NotImplementedError, match=r"0\.weight: expected fsdp_pre_all_gather bound to the local"
            ):
                model(x)
            local.fsdp_pre_all_gather = bound
            model(x).sum().backward()

    run_ranks(4, rank_main)


def test_methods_on_some_ranks_alone_are_named() -> None:
    def rank_main(rank: int) -> None:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        fullshard.fully_shard(model)
        if rank == 1:
            weight: Any = model[0].weight
            _set_methods(weight._local_tensor)
        with pytest.raises(fullshard.RanksDisagree, match=r"0\.weight: expected the same tensor class on every rank"):
            model(torch.ones(2, 4))

    run_ranks(2, rank_main)
