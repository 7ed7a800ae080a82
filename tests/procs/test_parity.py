"""Over real gloo processes: sharded training equals plain training, DDP's and FSDP2's; twice the same; whoever is late.

Compared after every step, from equal state: gradients, parameters, and AdamW's step, exp_avg and exp_avg_sq. One rank:
bit by bit. Several: within 2 eps of each tensor's maximum.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.nn.parallel import DistributedDataParallel

import fullshard
from fullshard import MixedPrecisionPolicy
from fullshard.policy import use_options
from tests.harness.models import (
    BY_NAME,
    CASES,
    Case,
    Trained,
    adamw,
    assert_close_to_tensor_max,
    assert_same_training,
    collect,
    full_copy,
)
from tests.harness.parity import EPS, assert_same_bits, environment, train_beside_oracle
from tests.harness.pool import pool
from tests.harness.random_models import EXPLORING, BlockSpec, LeafSpec, ModelSpec, examples, model_specs

TIMEOUT = 30.0
WORLDS = [1, 2, pytest.param(4, marks=pytest.mark.slow)]
in_each_world = pytest.mark.parametrize("world", WORLDS)
exploring = pytest.mark.hang_after(7200 if EXPLORING else 120)


# ---- against plain training ----------------------------------------------------------------------------------


def _case_beside_oracle(rank: int, name: str, world: int, steps: int, options: dict[str, Any]) -> Trained:
    """Train one of the fixed models with DTensors in AdamW; rank 0 trains it plainly beside, from equal state."""
    case = BY_NAME[name]
    model = case.shard(case.build(), fullshard.fully_shard, **options)
    optimizer = adamw(model.parameters())
    plain = case.build()
    plain_optimizer = adamw(plain.parameters())
    eps = 0.0 if world == 1 else EPS
    trained = Trained()
    for step in range(steps):
        case.loss(model, case.batch(step, rank)).backward()
        gradients = {name: full_copy(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        trained = collect(model, optimizer)
        if rank == 0:
            expected = _plain_gradients(case, plain, step, world)
            assert gradients.keys() == expected.keys(), f"step {step}: {sorted(gradients.keys() ^ expected.keys())}"
            for key, gradient in expected.items():
                assert_close_to_tensor_max(gradients[key], gradient, eps, f"step {step}, gradient of {key}")
            for key, p in plain.named_parameters():
                p.grad = gradients.get(key)
            plain_optimizer.step()
            assert_same_training(trained, collect(plain, plain_optimizer), eps)
            _load(plain, plain_optimizer, trained)
    return trained


def _plain_gradients(case: Case, plain: nn.Module, step: int, world: int) -> dict[str, Tensor]:
    """Gradients of the ranks, added in rank order, divided."""
    total: dict[str, Tensor] = {}
    for rank in range(world):
        plain.zero_grad()
        case.loss(plain, case.batch(step, rank)).backward()
        for name, p in plain.named_parameters():
            if p.grad is not None:
                total[name] = total[name] + p.grad if name in total else p.grad
    return {name: gradient / world for name, gradient in total.items()}


def _load(model: nn.Module, optimizer: torch.optim.Optimizer, trained: Trained) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(trained.params[name])
            for key, value in optimizer.state.get(p, {}).items():
                value.copy_(trained.state[f"{name}.{key}"])


@pytest.mark.sample(2)
@in_each_world
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fixed_models_train_as_plain_training_does(case: Case, world: int) -> None:
    results = pool(world).run(_case_beside_oracle, case.name, world, 3, {}, timeout=TIMEOUT)
    for result in results:
        assert_same_bits(result, results[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["uneven_mlp", "tied"])
def test_two_runs_are_the_same(name: str) -> None:
    first, again = (pool(2).run(_case_beside_oracle, name, 2, 3, {}, timeout=TIMEOUT)[0] for _ in range(2))
    assert_same_bits(again, first)


@pytest.mark.slow
def test_after_many_steps() -> None:
    """With kept parameters, which are gathered again only because the optimizer wrote the shards."""
    pool(2).run(_case_beside_oracle, "residual", 2, 10, {"reshard_after_forward": False}, timeout=TIMEOUT)


def _random_model(rank: int, spec: ModelSpec, world: int) -> Trained:
    with use_options(**spec.options()):
        return train_beside_oracle(rank, spec, world, 3)


@exploring
@examples(4, 60)
@given(spec=model_specs(), world=st.sampled_from([2, 2, 1]))
def test_any_model_trains_as_plain_training_does(spec: ModelSpec, world: int) -> None:
    results = pool(world).run(_random_model, spec, world, timeout=TIMEOUT)
    for result in results:
        assert_same_bits(result, results[0])


@exploring
@pytest.mark.slow
@examples(4, 40)
@given(spec=model_specs())
def test_any_model_on_four_ranks_twice_the_same(spec: ModelSpec) -> None:
    first, again = (pool(4).run(_random_model, spec, 4, timeout=TIMEOUT) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert_same_bits(one, other)


# ---- against other implementations ---------------------------------------------------------------------------


def _ddp(model: nn.Module, case: Case) -> nn.Module:
    return DistributedDataParallel(model)


def _fsdp2(model: nn.Module, case: Case) -> nn.Module:
    return case.shard(model, torch_fsdp.fully_shard)


def _ours(model: nn.Module, case: Case) -> nn.Module:
    return case.shard(model, fullshard.fully_shard)


def _one_step(
    rank: int, case: Case, make: Callable[[nn.Module, Case], nn.Module], start: Trained, step: int
) -> Trained:
    inner = case.build()
    optimizer = adamw(inner.parameters())
    if start.params:  # the state is made by a step with zero gradients, then overwritten
        for p in inner.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        _load(inner, optimizer, start)
        inner.zero_grad()
    state = {name: optimizer.state[p] for name, p in inner.named_parameters() if p in optimizer.state}
    model = make(inner, case)
    optimizer = adamw(model.parameters())
    for name, p in _names(model).items():
        for key, value in state.get(name, {}).items():
            optimizer.state[p][key] = _like(value, p)
    case.loss(model, case.batch(step, rank)).backward()
    optimizer.step()
    found = collect(model, optimizer)
    return Trained(
        {name.removeprefix("module."): value for name, value in found.params.items()},
        {name.removeprefix("module."): value for name, value in found.state.items()},
    )


def _names(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name.removeprefix("module."): p for name, p in model.named_parameters()}


def _like(value: Tensor, p: Tensor) -> Tensor:
    """`value` as optimizer state of `p`: sharded as it is."""
    if value.ndim == 0 or not isinstance(p, torch.distributed.tensor.DTensor):
        return value
    return torch.distributed.tensor.distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)


def _beside(rank: int, name: str, other: Callable[[nn.Module, Case], nn.Module], steps: int) -> None:
    case = BY_NAME[name]
    start = Trained()
    for step in range(steps):
        theirs = _one_step(rank, case, other, start, step)
        ours = _one_step(rank, case, _ours, start, step)
        assert_same_training(ours, theirs, EPS)
        start = ours


@pytest.mark.sample(1)
@pytest.mark.parametrize("other", [_ddp, _fsdp2])
def test_a_step_is_that_of_other_implementations(other: Callable[[nn.Module, Case], nn.Module]) -> None:
    """Three steps of a transformer, each from equal state."""
    pool(2).run(_beside, "transformer", other, 3, timeout=TIMEOUT)


# ---- how gradients are reduced -------------------------------------------------------------------------------

CHAIN = ModelSpec(
    tuple(BlockSpec((LeafSpec("norm"), LeafSpec("dense", 13))) for _ in range(3)), width=7, sync=(False, True, True)
)


def _with_communication(rank: int, communication: str) -> Trained:
    with environment({"FULLSHARD_COMMUNICATION": communication}):
        return train_beside_oracle(rank, CHAIN, 2, 3)


@pytest.mark.slow
def test_the_torch_strategy_gives_the_same_result() -> None:
    """One reduce-scatter of gloo: also within 2 eps of the oracle; and of the default strategy after one step."""
    auto = pool(2).run(_with_communication, "auto", timeout=TIMEOUT)[0]
    native = pool(2).run(_with_communication, "torch", timeout=TIMEOUT)[0]
    assert_same_training(native, auto, EPS)


class _Chain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7))


def _bf16_gradients_summed_in_float32(rank: int, world: int) -> None:
    torch.manual_seed(3)
    model, plain = _Chain(), _Chain()
    plain.load_state_dict(model.state_dict())
    plain.to(torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fullshard.fully_shard(model[0], mp_policy=policy)
    fullshard.fully_shard(model, mp_policy=policy)

    # A float32 sum of a few bfloat16 numbers is exact in any order, unless they are far apart.
    scales = (1.0, 3e-6, 2e-6, 5e-6)

    def loss_of(module: nn.Module, of_rank: int) -> Tensor:
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(of_rank))
        return module(x.bfloat16()).float().pow(2).mean() * scales[of_rank]

    loss_of(model, rank).backward()
    per_rank, order_matters = [], False
    for other in range(world):
        plain.zero_grad()
        loss_of(plain, other).backward()
        per_rank.append([p.grad for p in plain.parameters()])
    for (name, ours), gradients in zip(model.named_parameters(), zip(*per_rank, strict=True), strict=True):
        total = gradients[0].float()
        for gradient in gradients[1:]:
            assert gradient.dtype is torch.bfloat16
            total = total + gradient.float()
        in_another_order = torch.stack(gradients).flip(0).float().sum(0)
        order_matters = order_matters or not torch.equal(in_another_order, total)
        found = full_copy(ours.grad)
        assert found.dtype is torch.float32
        assert torch.equal(found, total / world), name
    assert order_matters == (world > 2), "the values were chosen so that another order gives another sum"


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_bf16_gradients_are_summed_in_float32_in_rank_order(world: int) -> None:
    """Bit by bit, although they travel in bfloat16."""
    pool(world).run(_bf16_gradients_summed_in_float32, world, timeout=TIMEOUT)


# ---- whoever is late -----------------------------------------------------------------------------------------


def _late(model: nn.Module, step: int, rank: int, late: int) -> None:
    """Rank `late` sleeps in every block, in forward and in backward, at the first two steps."""
    if rank != late or step:
        return

    def sleep(_module: nn.Module, _args: Any, output: Tensor) -> None:
        time.sleep(0.01)
        if output.requires_grad:
            output.register_hook(lambda _gradient: time.sleep(0.01))

    for block in model.get_submodule("blocks").children():
        block.register_forward_hook(sleep)


class _Late:
    """`_late` for one rank; pickles."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, model: nn.Module, step: int, rank: int) -> None:
        _late(model, step, rank, self.rank)


def _with_a_late_rank(rank: int, late: int) -> Trained:
    return train_beside_oracle(rank, CHAIN, 3, 3, disturb=_Late(late))


@pytest.mark.slow
def test_results_do_not_depend_on_who_comes_first() -> None:
    """Bit by bit, on three ranks, where the order of a sum matters."""
    undisturbed = pool(3).run(_with_a_late_rank, -1, timeout=TIMEOUT)[0]
    for late in (0, 2):
        assert_same_bits(pool(3).run(_with_a_late_rank, late, timeout=TIMEOUT)[0], undisturbed)
