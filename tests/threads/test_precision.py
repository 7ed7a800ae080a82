"""Mixed precision: the four fields of the policy, float16 with a gradient scaler, dtypes that are mixed or changed."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fullshard
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import Implementation, for_each_implementation, run
from tests.harness.models import seeded
from tests.harness.threads import WORLD, run_ranks

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Layer(nn.Module):
    """A linear that notes the dtypes of what it computes with."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(rows, columns)
        self.seen: set[tuple[torch.dtype, torch.dtype]] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add((self.linear.weight.dtype, x.dtype))
        if x.dtype is not self.linear.weight.dtype:
            x = x.to(self.linear.weight.dtype)
        return torch.relu(self.linear(x))


def layers() -> nn.Sequential:
    model = seeded(lambda: nn.Sequential(Layer(5, 7), Layer(7, 7), Layer(7, 3)))
    assert isinstance(model, nn.Sequential)
    return model


def sample(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(17 * step + rank))


# ---- the four fields -----------------------------------------------------------------------------------------

POLICIES: list[dict[str, Any]] = [
    {"param_dtype": BF16},
    {"param_dtype": BF16, "reduce_dtype": F32},
    {"param_dtype": F16, "reduce_dtype": F32, "output_dtype": F32},
    {"param_dtype": BF16, "reduce_dtype": F32, "cast_forward_inputs": False},
    {"reduce_dtype": BF16},
    {"output_dtype": torch.float64},
    {"param_dtype": torch.float64, "output_dtype": BF16},
]


@pytest.mark.sample(4)
@behaviour(
    "each field of the policy: dtypes of compute, outputs and gradients, and their values", area="mixed precision"
)
@pytest.mark.parametrize(
    "policy", POLICIES, ids=lambda p: "-".join(f"{k[:3]}={v}".replace("torch.", "") for k, v in p.items())
)
@for_each_implementation
def test_the_fields_of_a_policy(policy: dict[str, Any], impl: Implementation) -> None:
    """What computes, leaves and comes back has the dtypes that were asked for; one step is that of plain modules in
    these dtypes."""
    compute = policy.get("param_dtype") or F32
    reduce = policy.get("reduce_dtype") or impl.reduces_in(compute, F32)
    casts = policy.get("cast_forward_inputs", True) and "param_dtype" in policy
    reference = layers().to(compute)
    outputs, total = [], [torch.zeros(p.shape, dtype=reduce) for p in reference.parameters()]
    for rank in range(WORLD):
        reference.zero_grad()
        x = sample(rank, 0)
        for layer in reference:
            x = layer(x.to(compute) if casts else x).to(policy.get("output_dtype") or compute)
        outputs.append(x.detach())
        x.float().square().sum().backward()
        for sum_, p in zip(total, reference.parameters(), strict=True):
            assert p.grad is not None
            sum_ += p.grad.to(reduce)
    models = [layers() for _ in range(WORLD)]

    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = models[rank]
        options = {"mp_policy": impl.MixedPrecisionPolicy(**policy)}
        for layer in model:
            impl.fully_shard(layer, **options)
        impl.fully_shard(model, **options)
        out = model(sample(rank, 0))
        assert out.dtype is (policy.get("output_dtype") or compute)
        assert torch.equal(out.detach(), outputs[rank])
        assert model[0].seen == {(compute, compute if casts else F32)}
        out.float().square().sum().backward()
        eps = max(torch.finfo(reduce).eps, torch.finfo(F32).eps)
        for p, expected in zip(model.parameters(), total, strict=True):
            assert p.dtype is F32 and p.grad.dtype is F32 and p.grad.placements == p.placements
            mean = (expected / WORLD).float()
            torch.testing.assert_close(p.grad.full_tensor(), mean, rtol=4 * eps, atol=4 * eps * float(mean.abs().max()))

    run(rank_main, impl)


# ---- float16 and the gradient scaler -------------------------------------------------------------------------


@behaviour("float16 with torch.amp.GradScaler: inf on one shard skips the step on all ranks", area="mixed precision")
@for_each_implementation
def test_inf_on_one_shard_skips_on_all_ranks(impl: Implementation) -> None:
    """Step 1 overflows in one row of one weight, which one rank owns: nobody steps, the scale is halved everywhere; the
    other steps are those of plain training."""
    reference = layers()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.05)
    expected = []
    for step in range(3):
        if step != 1:
            plain.zero_grad()
            for rank in range(WORLD):
                (reference(sample(rank, step)).square().sum() / WORLD).backward()
            plain.step()
        expected.append([p.detach().clone() for p in reference.parameters()])
    models = [layers() for _ in range(WORLD)]

    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = models[rank]
        options = {"mp_policy": impl.MixedPrecisionPolicy(F16, F32, F32)}
        for layer in model:
            impl.fully_shard(layer, **options)
        impl.fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
        for step in range(3):
            optimizer.zero_grad()
            loss = model(sample(rank, step)).square().sum()
            scaler.scale(loss).backward()
            if step == 1:
                # What an overflow in the last row of the first weight, of its last owner, comes to.
                weight = model[0].linear.weight
                owner = len(weight.full_tensor().chunk(WORLD)) - 1
                if rank == owner:
                    weight.grad.to_local()[-1, 0] = math.inf
                own = bool(torch.isfinite(weight.grad.to_local()).all())
                assert own == (rank != owner), "the overflow is to be seen by one rank alone"
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (64.0 if step == 0 else 32.0)
            for p, wanted in zip(model.parameters(), expected[step], strict=True):
                torch.testing.assert_close(p.full_tensor(), wanted, rtol=0.02, atol=0.02)
        assert {int(state["step"]) for state in optimizer.state.values()} == {2}

    run(rank_main, impl)


@behaviour(
    "a gradient scaler over parameters on several meshes",
    area="mixed precision",
    torch="none",
    reason="torch.amp.GradScaler asks the mesh of the first gradient alone: ranks go apart. fullshard.GradScaler",
)
@pytest.mark.parametrize("order", [1, -1])
def test_inf_anywhere_is_seen_everywhere_with_several_meshes(order: int) -> None:
    """Parameters on dp, on tp, on both and plain; an inf in one element of one rank's part of each of them, in turn."""

    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        value = torch.ones(4, 4)
        own = [
            (mesh["dp"], [Shard(0)]),
            (mesh["tp"], [Shard(1)]),
            (mesh, [Shard(0), Shard(1)]),
            (mesh, [Replicate(), Shard(0)]),
        ]
        parameters = [nn.Parameter(distribute_tensor(value, m, placements)) for m, placements in own][::order]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scaler = fullshard.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.ones(()))
        for broken in (None, *range(len(parameters))):
            for p in parameters:
                p.grad = torch.ones_like(p.detach())
            if broken is not None and rank == broken:
                parameters[broken].grad.to_local()[0, 0] = math.inf  # type: ignore[union-attr]
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (scale if broken is None else scale / 2), broken
        for p in parameters:
            tolerance.assert_close(p.detach().full_tensor(), value - 0.1 / 2)  # type: ignore[attr-defined]

    run_ranks(4, rank_main)


# ---- dtypes that are mixed, or change ------------------------------------------------------------------------


class Mixed(nn.Module):
    """Float32 and bfloat16 weights, an integer table and a frozen float64 weight in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.narrow = nn.Linear(6, 5).to(BF16)
        self.wide = nn.Linear(5, 3)
        self.table = nn.Parameter(torch.arange(7), requires_grad=False)
        self.frozen = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.narrow(self.norm(x).to(self.narrow.weight.dtype)).to(self.wide.weight.dtype)
        return self.wide(y) * self.frozen.to(F32) + self.table.sum()


@behaviour(
    "parameters of several dtypes in one unit",
    area="mixed precision",
    torch="better",
    reason="torch refuses them; here each dtype is a group of its own",
)
@pytest.mark.parametrize("reduce", [None, F32], ids=str)
def test_several_storage_dtypes_in_one_unit(reduce: torch.dtype | None, impl: Implementation) -> None:
    reference = seeded(Mixed)
    x = [torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    for rank in range(3):
        (reference(x[rank]).square().mean() / 3).backward()
    models = [seeded(Mixed) for _ in range(3)]

    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = impl.fully_shard(models[rank], mp_policy=impl.MixedPrecisionPolicy(reduce_dtype=reduce))
        for _ in range(2):
            model.zero_grad()
            model(x[rank]).square().mean().backward()
        for (name, p), plain in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert p.dtype is plain.dtype and p.requires_grad == plain.requires_grad, name
            if plain.grad is None:
                assert p.grad is None
                assert torch.equal(p.full_tensor(), plain), name
            else:
                eps = 0.02 if BF16 in (p.dtype, reduce) or name.startswith("norm") else 1e-5
                torch.testing.assert_close(p.grad.full_tensor(), plain.grad, rtol=eps, atol=eps)

    run(rank_main, impl, world=3)


@behaviour(
    "the reduce dtype after unfreezing",
    area="mixed precision",
    torch="better",
    reason="torch 2.13 decides the reduce dtype before the parameter is trainable (pytorch#187376)",
)
def test_unfrozen_parameters_are_reduced_in_the_reduce_dtype(impl: Implementation) -> None:
    """256 + 1 over two ranks: 257 in float32, 256 in bfloat16. The unit was wholly frozen in its first step."""

    def rank_main(rank: int, impl: Implementation) -> None:
        policy = impl.MixedPrecisionPolicy(BF16, F32)
        model: Any = seeded(lambda: nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False)))
        model[0].requires_grad_(False)
        with torch.no_grad():
            model[1].weight.fill_(1.0)
        for layer in model:
            impl.fully_shard(layer, mp_policy=policy)
        impl.fully_shard(model, mp_policy=policy)
        model(torch.ones(1, 1)).sum().backward()
        model[0].requires_grad_(True)
        model.zero_grad()
        model(torch.tensor([[256.0 if rank == 0 else 1.0]])).sum().backward()
        assert torch.equal(model[0].weight.grad.full_tensor(), torch.full((2, 1), 257.0 / 2))

    run(rank_main, impl, world=2)


@behaviour("a frozen parameter of another dtype than the trained ones", area="mixed precision")
@for_each_implementation
def test_a_frozen_parameter_of_another_dtype(impl: Implementation) -> None:
    """As in adapters (LoRA): a bfloat16 base, float32 on top, one unit."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(4, 4, bias=False).to(BF16).requires_grad_(False)
            self.adapter = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x.to(BF16)).float() + self.adapter(x)

    reference = seeded(Adapted)
    x = [torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(WORLD)]
    for rank in range(WORLD):
        (reference(x[rank]).square().sum() / WORLD).backward()
    models = [seeded(Adapted) for _ in range(WORLD)]

    def rank_main(rank: int, impl: Implementation) -> None:
        model: Any = impl.fully_shard(models[rank])
        model(x[rank]).square().sum().backward()
        assert model.base.weight.grad is None and model.base.weight.dtype is BF16
        tolerance.assert_close(model.adapter.weight.grad.full_tensor(), reference.adapter.weight.grad)

    run(rank_main, impl)


# ---- inputs and outputs --------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclass
class Record:
    tensor: Tensor
    other: Any = None


@dataclass(frozen=True)
class Frozen:
    tensor: Tensor


class Named(OrderedDict[str, Any]):
    """A dict with a class of its own, as model outputs are."""


def nests(x: Tensor) -> list[Any]:
    return [x, (x, 1), [x, "word"], {"key": x, 3: None}, Pair(x, [x]), Record(x, {"a": (x,)}), Frozen(x), Named(a=x)]


def leaves(value: Any) -> list[Tensor]:
    """The tensors in the kinds of containers above."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in leaves(item)]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in leaves(item)]
    return [t for item in vars(value).values() for t in leaves(item)] if isinstance(value, (Record, Frozen)) else []


def shape_of(value: Any) -> Any:
    """The value with `...` in the place of its tensors."""
    if isinstance(value, Tensor):
        return ...
    if isinstance(value, dict):
        return type(value), {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value), [shape_of(item) for item in value]
    if isinstance(value, (Record, Frozen)):
        return type(value), {key: shape_of(item) for key, item in vars(value).items()}
    return value


@behaviour("inputs and outputs cast in tuples, lists, dicts, dataclasses, named tuples", area="mixed precision")
@pytest.mark.parametrize("index", range(8))
@for_each_implementation
def test_inputs_and_outputs_are_cast_in_any_container(index: int, impl: Implementation) -> None:
    """Also as keyword arguments; integers, strings and integer tensors stay what they are, the caller's containers too;
    gradients come back in the dtype of the input."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, value: Any, *, named: Any, mask: Tensor) -> Any:
            assert mask.dtype is torch.int64
            seen = [*leaves(value), *leaves(named)]
            assert seen and all(t.dtype is BF16 for t in seen), [t.dtype for t in seen]
            total: Tensor = sum((t * self.weight for t in seen), torch.zeros(3, dtype=BF16))
            return nests(total)[index]

    def rank_main(rank: int, impl: Implementation) -> None:
        model = impl.fully_shard(Model(), mp_policy=impl.MixedPrecisionPolicy(BF16, F32, torch.float64))
        x = torch.ones(3, requires_grad=True)
        given, named = nests(x)[index], nests(x * 1)[index]
        out = model(given, named=named, mask=torch.ones(2, dtype=torch.int64))
        assert shape_of(out) == shape_of(given)
        assert all(t.dtype is torch.float64 for t in leaves(out))
        assert all(t.dtype is F32 for t in leaves(given))
        leaves(out)[0].sum().backward()
        assert x.grad is not None and x.grad.dtype is F32
        assert torch.equal(x.grad, torch.full((3,), 2.0 * len(leaves(given))))

    run(rank_main, impl, world=1)
