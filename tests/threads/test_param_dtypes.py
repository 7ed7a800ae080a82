"""Compute dtypes of single parameters (`param_dtype_override_fn`), and what `reduce_dtype=None` follows (`grad_dtype`).

The oracle is plain training with each parameter in its own compute dtype, for torch's FSDP2 too where the installed
torch has the field (2.15).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.engine import unit_of
from fullshard.policy import use_options
from fullshard.policy.options import REDUCE_DEFAULTS
from tests.harness.behaviours import behaviour
from tests.harness.implementations import Implementation, for_each_implementation
from tests.harness.models import seeded
from tests.harness.threads import run_ranks

BF16, F32 = torch.bfloat16, torch.float32
STEPS = 3


class Block(nn.Module):
    """Linears with odd dims, one smaller than a world of four, around a norm that computes in its own dtype."""

    def __init__(self, norm: str = "layer", recompute: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 6, bias=False)
        self.norm = nn.LayerNorm(6) if norm == "layer" else nn.BatchNorm1d(6, track_running_stats=False)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)

    def body(self, x: Tensor) -> Tensor:
        y = self.norm(x.to(self.norm.weight.dtype)).to(self.up.weight.dtype)
        out: Tensor = x + self.down(torch.relu(self.up(y)).to(self.down.weight.dtype)).to(x.dtype)
        return out


class Net(nn.Module):
    def __init__(self, norm: str = "layer", tied: bool = False, frozen: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.blocks = nn.ModuleList(Block(norm, recompute) for _ in range(2))
        self.last = nn.Linear(6, 3)
        if tied:
            self.blocks[1].up.weight = self.blocks[0].up.weight  # type: ignore[union-attr]
        if frozen:
            self.blocks[0].norm.requires_grad_(False)  # type: ignore[union-attr]
            self.blocks[1].down.requires_grad_(False)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x.to(self.last.weight.dtype))
        return out


@dataclass(frozen=True)
class Case:
    model: dict[str, Any] = field(default_factory=dict)
    # Whether a parameter, of the name, keeps float32.
    keeps: Callable[[str], bool] = lambda name: "norm" in name
    world: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    replicas: int = 1
    micro: int = 1
    clip: bool = False


CASES = {
    "norms": Case(),
    "norms, one rank": Case(world=1),
    "norms, four ranks": Case(world=4),
    "BatchNorm": Case({"norm": "batch"}),
    "a tied weight": Case({"tied": True}, keeps=lambda name: "norm" in name or ".up." in name),
    "frozen ones": Case({"frozen": True}),
    "all": Case(keeps=lambda name: True),
    "micro-batches": Case(micro=2),
    "clipped": Case(clip=True),
    "ZeRO-2": Case(options={"reshard_after_forward": False}),
    "kept within nodes": Case(world=4, options={"reshard_after_forward": 2}),
    "replicas": Case(world=4, replicas=2),
    "recomputed": Case({"recompute": True}),
    "offloaded": Case(options={"offload_policy": fullshard.CPUOffloadPolicy(pin_memory=False)}),
}


def _sample(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def _loss(out: Tensor) -> Tensor:
    return out.float().square().sum()


def _model(case: Case) -> Net:
    model = seeded(lambda: Net(**case.model))
    assert isinstance(model, Net)
    return model


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)


def _plain(case: Case) -> dict[str, tuple[Tensor, ...]]:
    """Parameters and AdamW's averages after plain training, each gradient rounded as its compute dtype has it."""
    model = _model(case)
    optimizer = _adamw(model)
    for step in range(STEPS):
        total: dict[str, Tensor] = {}
        for rank in range(case.world):
            held: dict[str, Tensor] = {}
            for micro in range(case.micro):
                computed = copy.deepcopy(model)
                for unit in (computed, *([] if case.model.get("tied") else computed.blocks)):
                    unit.register_forward_pre_hook(lambda _, args: tuple(arg.to(BF16) for arg in args))
                for name, p in computed.named_parameters():
                    p.data = p.data if case.keeps(name) else p.data.to(BF16)
                _loss(computed(_sample(step, micro, rank))).backward()
                for name, p in computed.named_parameters():
                    if p.grad is not None:
                        held[name] = held[name] + p.grad.float() if name in held else p.grad.float()
            for name, gradient in held.items():
                total[name] = total[name] + gradient if name in total else gradient
        for name, p in model.named_parameters():
            p.grad = total[name] / case.world if name in total else None
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return _collected(model, optimizer, lambda tensor: tensor)


def _collected(model: nn.Module, optimizer: Any, whole: Callable[[Any], Tensor]) -> dict[str, tuple[Tensor, ...]]:
    found = {}
    for name, p in model.named_parameters():
        state = optimizer.state.get(p, {})
        found[name] = tuple(
            whole(t.detach()).clone() for t in (p, *(state[k] for k in ("exp_avg", "exp_avg_sq") if state))
        )
    return found


def _sharded(case: Case, namespace: Any, calls: list[nn.Parameter]) -> Any:
    model = _model(case)
    kept = {id(p) for name, p in model.named_parameters() if case.keeps(name)}

    def override(parameter: nn.Parameter) -> torch.dtype | None:
        calls.append(parameter)
        return F32 if id(parameter) in kept else None

    policy = namespace.MixedPrecisionPolicy(BF16, param_dtype_override_fn=override)
    options: dict[str, Any] = {"mp_policy": policy, **case.options}
    if case.replicas > 1:
        sizes = (case.replicas, case.world // case.replicas)
        options["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    for block in () if case.model.get("tied") else model.blocks:
        namespace.fully_shard(block, **options)
    return namespace.fully_shard(model, **options)


def _trained(case: Case, namespace: Any, rank: int) -> dict[str, tuple[Tensor, ...]]:
    calls: list[nn.Parameter] = []
    model = _sharded(case, namespace, calls)
    names = [name for name, _ in model.named_parameters()]
    assert len(calls) == len(names) == len({id(parameter) for parameter in calls})
    seen: dict[str, torch.dtype] = {}
    model.last.register_forward_hook(lambda module, *_: seen.update(last=module.weight.dtype))
    model.blocks[0].norm.register_forward_hook(lambda module, *_: seen.update(norm=module.weight.dtype))
    optimizer = _adamw(model)
    for step in range(STEPS):
        for micro in range(case.micro):
            model.set_requires_gradient_sync(micro == case.micro - 1)
            _loss(model(_sample(step, micro, rank))).backward()
        for p in model.parameters():
            assert p.dtype is F32 and (p.grad is None or p.grad.dtype is F32)
        if case.clip:
            (fullshard if namespace is fullshard else nn.utils).clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert seen == {"last": F32 if case.keeps("last.weight") else BF16, "norm": F32}
    assert {value.dtype for value in model.state_dict().values()} == {F32}
    return _collected(model, optimizer, lambda tensor: tensor.full_tensor())


def _assert_same(found: dict[str, tuple[Tensor, ...]], expected: dict[str, tuple[Tensor, ...]]) -> None:
    """Within two eps of the tensor's maximum for each step: the order of a sum of four, and of the norm's squares."""
    assert found.keys() == expected.keys()
    for name, tensors in expected.items():
        assert len(found[name]) == len(tensors), name
        for mine, plain in zip(found[name], tensors, strict=True):
            atol = 2 * STEPS * torch.finfo(F32).eps * float(plain.abs().max())
            torch.testing.assert_close(mine, plain, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.sample(2)
@behaviour(
    "`param_dtype_override_fn`: parameters compute in dtypes of their own ({case}); parameters and optimizer state of "
    "plain training",
    area="mixed precision",
    since="2.15",
)
@for_each_implementation
@pytest.mark.parametrize("case", CASES)
def test_parameters_compute_in_dtypes_of_their_own(impl: Implementation, case: str) -> None:
    """The function is asked once for each parameter, and training is plain training in these dtypes."""
    chosen = CASES[case]
    expected = _plain(chosen)

    def rank_main(rank: int) -> None:
        _assert_same(_trained(chosen, impl.namespace, rank), expected)

    run_ranks(chosen.world, rank_main)


@pytest.mark.parametrize("answer", [torch.float16, "float32", 1])
def test_a_wrong_answer_is_refused_and_changes_nothing(answer: Any) -> None:
    def rank_main(rank: int) -> None:
        model = nn.Linear(3, 3)
        policy = fullshard.MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda p: answer if p.ndim == 1 else None)
        with pytest.raises(ValueError, match="bias: expected param_dtype_override_fn to return None, param_dtype"):
            fullshard.fully_shard(model, mp_policy=policy)
        assert type(model) is nn.Linear and type(model.weight) is nn.Parameter

    run_ranks(1, rank_main)


def test_ranks_that_answer_differently_are_named() -> None:
    def rank_main(rank: int) -> None:
        model = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
        policy = fullshard.MixedPrecisionPolicy(
            BF16, param_dtype_override_fn=lambda p: F32 if rank == 1 and p.ndim == 1 else None
        )
        fullshard.fully_shard(model, mp_policy=policy)
        with pytest.raises(RuntimeError, match=r"0.bias: expected the same compute dtype on every rank.*rank 1"):
            model(torch.ones(2, 3))

    run_ranks(2, rank_main)


# ---- what reduce_dtype=None follows --------------------------------------------------------------------------


@behaviour(
    "`reduce_dtype=None`: bfloat16 gradients of float32 parameters are accumulated and reduced in {followed}",
    area="mixed precision",
    since="2.15",
)
@for_each_implementation
@pytest.mark.parametrize(
    ("followed", "grad_dtype"),
    [("float32, the dtype of the parameters", None), ("bfloat16 where `grad_dtype` says so", BF16)],
    ids=["own", "grad_dtype"],
)
def test_none_follows_the_parameter(impl: Implementation, followed: str, grad_dtype: torch.dtype | None) -> None:
    """256 and 1 over two micro-batches: their sum is 257, which bfloat16 rounds to 256. Both are bfloat16's."""

    def rank_main(rank: int) -> None:
        model: Any = seeded(lambda: nn.Linear(4, 4, bias=False))
        if grad_dtype is not None:
            model.weight.grad_dtype = grad_dtype
        impl.fully_shard(model, mp_policy=impl.MixedPrecisionPolicy(BF16))
        for micro, factor in enumerate((256.0, 1.0)):
            model.set_requires_gradient_sync(micro == 1)
            (model(torch.ones(1, 4)) * factor).sum().backward()
        gradient = model.weight.grad
        assert gradient.dtype is (grad_dtype or F32)
        assert torch.equal(gradient.full_tensor().float(), torch.full((4, 4), 257.0 if grad_dtype is None else 256.0))

    run_ranks(2, rank_main)


def _precisions(model: Any) -> dict[str, Any]:
    unit = unit_of(model)
    assert unit is not None
    return {param.name: group.precision for group in unit.groups for param in group.params}


def test_what_none_follows() -> None:
    """The parameter's dtype, its grad_dtype, or with the switch the dtype of compute. The wire stays narrow."""

    def rank_main(rank: int) -> None:
        policy = fullshard.MixedPrecisionPolicy(BF16)
        model = fullshard.fully_shard(seeded(lambda: nn.Linear(3, 3)), mp_policy=policy)
        found = _precisions(model)["weight"]
        assert (found.wire, found.reduce, found.sum, found.gradient) == (BF16, F32, F32, F32)
        assert fullshard.report(model).units[0].reduce_dtypes == ("float32",)
        with use_options(reduce_default="param_dtype"):
            former = fullshard.fully_shard(seeded(lambda: nn.Linear(3, 3)), mp_policy=policy)
        assert _precisions(former)["weight"].reduce is BF16
        said = fullshard.report(former)
        assert said.reduce_default == "param_dtype" and "FULLSHARD_REDUCE_DTYPE=param_dtype" in str(said)
        assert "FULLSHARD_REDUCE_DTYPE" not in str(fullshard.report(model))

    run_ranks(1, rank_main)


def test_ranks_that_follow_different_meanings_are_named() -> None:
    def rank_main(rank: int) -> None:
        model: Any = seeded(lambda: nn.Linear(3, 3))
        policy = fullshard.MixedPrecisionPolicy(BF16)
        for turn in range(2):  # options hold for all threads
            if rank == turn:
                with use_options(reduce_default=REDUCE_DEFAULTS[rank]):
                    fullshard.fully_shard(model, mp_policy=policy)
            dist.barrier()
        with pytest.raises(RuntimeError, match=r"expected the same reduce dtype on every rank, found .*bfloat16"):
            model(torch.ones(2, 3))

    run_ranks(2, rank_main)


@pytest.mark.parametrize("late", [False, True])
def test_grad_dtype_of_a_parameter(late: bool) -> None:
    """Reduced shards have it, set before or after `fully_shard`. Beside a wider one, the reduction has the promoted
    dtype. None is the dtype of the gradients."""

    def rank_main(rank: int) -> None:
        def prepare(module: nn.Module) -> None:
            module.get_parameter("0.weight").grad_dtype = BF16
            module.get_parameter("1.weight").grad_dtype = None

        model: Any = seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)))
        if not late:
            prepare(model)
        fullshard.fully_shard(model, mp_policy=fullshard.MixedPrecisionPolicy(BF16))
        if late:
            prepare(model)
        plain = seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))).to(BF16)
        total = [torch.zeros(p.shape) for p in plain.parameters()]
        for each in range(2):
            plain.zero_grad()
            _loss(plain(_sample(0, 0, each).to(BF16))).backward()
            for sum_, p in zip(total, plain.parameters(), strict=True):
                assert p.grad is not None
                sum_ += p.grad.float()
        model.set_requires_gradient_sync(False)
        _loss(model(_sample(0, 0, rank))).backward()
        model.zero_grad()
        model.set_requires_gradient_sync(True)
        _loss(model(_sample(0, 0, rank))).backward()
        dtypes = (BF16, F32, F32, F32)
        for (name, p), expected, dtype in zip(model.named_parameters(), total, dtypes, strict=True):
            assert p.dtype is F32 and p.grad.dtype is dtype, name
            assert torch.equal(p.grad.full_tensor(), (expected / 2).to(dtype)), name
        assert {precision.reduce for precision in _precisions(model).values()} == {F32}

    run_ranks(2, rank_main)


def test_grad_dtype_outlives_a_conversion() -> None:
    def rank_main(rank: int) -> None:
        model: Any = seeded(lambda: nn.Linear(3, 3))
        model.weight.grad_dtype = F32
        model.weight.grad_dtype = torch.float64
        fullshard.fully_shard(model)
        model.bfloat16()
        model(torch.ones(2, 3, dtype=BF16)).float().sum().backward()
        assert (model.weight.dtype, model.weight.grad.dtype) == (BF16, torch.float64)
        assert (model.bias.dtype, model.bias.grad.dtype) == (BF16, BF16)

    run_ranks(2, rank_main)


class _Wider(torch.autograd.Function):
    """An operation whose gradient of a bfloat16 weight is a float32 sum, as fused gradient accumulation has it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.float().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full((3, 3), 1 + 2**-12)


class _Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self) -> Tensor:
        return _Wider.apply(self.weight)


def test_a_wider_gradient_is_kept_or_refused() -> None:
    """With a wider grad_dtype it travels whole; with None and no reduce_dtype it would be rounded, which is said."""

    def rank_main(rank: int) -> None:
        model: Any = _Fused()
        model.weight.grad_dtype = torch.float64
        fullshard.fully_shard(model, mp_policy=fullshard.MixedPrecisionPolicy(BF16))
        model().backward()
        assert torch.equal(model.weight.grad.full_tensor(), torch.full((3, 3), 1 + 2**-12, dtype=torch.float64))
        model = _Fused()
        model.weight.grad_dtype = None
        fullshard.fully_shard(model, mp_policy=fullshard.MixedPrecisionPolicy(BF16))
        with pytest.raises(RuntimeError, match=r"weight: expected a gradient in torch.bfloat16.*set reduce_dtype"):
            model().backward()

    run_ranks(1, rank_main)
