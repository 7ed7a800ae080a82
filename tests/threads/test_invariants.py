"""`check_invariants`: sound training passes, each broken message is named, and it costs nothing between checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard
from fullshard import check_invariants, fully_shard
from fullshard.extras import InvariantBroken
from tests.harness.models import seeded as model_of
from tests.harness.seeded_faults import SeededFault, seeded
from tests.harness.threads import run_ranks


def build() -> nn.Module:
    """Uneven rows, fewer rows than ranks, one parameter that is not used, one that is frozen."""

    def made() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 2), nn.Linear(2, 5, bias=False))
        model.unused = nn.Parameter(torch.ones(4))
        model[2].bias.requires_grad_(False)
        return model

    return model_of(made)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(7, 6, generator=torch.Generator().manual_seed(10 * step + rank))


Train = Callable[[nn.Module, int], None]


def plain_steps(model: Any, rank: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        if step:  # gradients of the first two add up
            optimizer.zero_grad()


def held(model: Any, rank: int) -> None:
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        model(batch(step, rank)).square().mean().backward()


def partial_sums(model: Any, rank: int) -> None:
    for step in range(4):
        model.set_requires_all_reduce(step % 2 == 1)
        model(batch(step, rank)).square().mean().backward()


def shard(model: nn.Module, **options: Any) -> Any:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


MP = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
LOW = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
SOUND: dict[str, tuple[int, tuple[int, ...], dict[str, Any], Train]] = {
    "zero3": (2, (2,), {}, plain_steps),
    "three ranks": (3, (3,), {}, plain_steps),
    "zero2": (2, (2,), {"reshard_after_forward": False}, plain_steps),
    "parts": (4, (4,), {"reshard_after_forward": 2}, plain_steps),
    "hsdp": (4, (2, 2), {}, plain_steps),
    "bf16": (2, (2,), {"mp_policy": MP}, plain_steps),
    "reduced in bf16": (2, (2,), {"mp_policy": LOW}, plain_steps),
    "held": (2, (2,), {"mp_policy": MP}, held),
    "partial sums": (4, (2, 2), {}, partial_sums),
    "offload": (2, (2,), {"offload_policy": fullshard.CPUOffloadPolicy(pin_memory=False)}, plain_steps),
    "columns": (2, (2,), {"shard_placement_fn": lambda p: torch.distributed.tensor.Shard(p.ndim - 1)}, plain_steps),
    "alone": (1, (1,), {}, plain_steps),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SOUND)
def test_sound_training_passes(name: str) -> None:
    world, shape, options, train = SOUND[name]

    def rank_main(rank: int) -> tuple[int, dict[str, str]]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = shard(build(), mesh=mesh, **options)
        checks = check_invariants(model)
        train(model, rank)
        return checks.checked, checks.skipped

    for checked, skipped in run_ranks(world, rank_main):
        assert checked == (3 if train is plain_steps else 2)
        assert skipped == {}


def test_beside_tensor_parallelism() -> None:
    def rank_main(rank: int) -> int:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        model = model_of(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["shard"])
        checks = check_invariants(model)
        plain_steps(model, rank // 2)
        return checks.checked

    assert run_ranks(4, rank_main) == [3] * 4


def test_gradients_of_one_rank_alone() -> None:
    def rank_main(rank: int) -> int:
        model = build()
        model.forward = lambda x, run=model.forward, own=model: run(x)  # type: ignore[method-assign]
        shard(model)
        checks = check_invariants(model)
        plain_steps(model, rank)
        return checks.checked

    assert run_ranks(2, rank_main) == [3, 3]


_RECEIVE, _TAKE = "param.group:ParamGroup.receive", "param.group:ParamGroup.take_gradients"
_REDUCED = "gradients.reduced = part if"
_RANK = "__import__('torch').distributed.get_rank()"
_THEN = "vars(self).setdefault('then', [view.clone() for view in staging.views[: len(destinations)]])"
# Faults of the engine, and what must be said.
FAULTS = {
    "doubled": (SeededFault(_RECEIVE, _REDUCED, "gradients.reduced = part * 2 if"), "sum of what 2 ranks sent"),
    "on one rank": (
        SeededFault(_RECEIVE, _REDUCED, f"gradients.reduced = part * (1 + {_RANK}) if"),
        "sum of what 2 ranks sent",
    ),
    "rows rolled": (SeededFault(_RECEIVE, _REDUCED, "gradients.reduced = part.roll(1, 0) if"), "misplaced a part"),
    "dropped on one rank": (
        SeededFault(_RECEIVE, "part is None:", f"part is None or {_RANK} == 1:"),
        "that were sent and 1 that arrived",
    ),
    "weights are stale": (
        SeededFault("comm.gather:PlannedGather.complete", "staging.views[: len(destinations)]", _THEN),
        "what the shards hold when it is freed",
    ),
    "weights of one rank": (
        SeededFault(
            "comm.gather:PlannedGather.complete",
            "staging.views[: len(destinations)]",
            f"[view * (1 + 0.01 * {_RANK}) for view in staging.views[: len(destinations)]]",
        ),
        "weight: expected the full parameter of rank 1 to be what the shards hold",
    ),
    "swapped shards": (
        SeededFault(
            "comm.gather:PlannedGather.complete",
            "staging.views[: len(destinations)]",
            "[view.roll(1, 0) for view in staging.views[: len(destinations)]]",
        ),
        "what the shards hold when it is freed",
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_on_all_ranks(name: str) -> None:
    fault, said = FAULTS[name]

    def rank_main(rank: int) -> str:
        model = shard(build())
        check_invariants(model)
        with pytest.raises(InvariantBroken) as caught:
            plain_steps(model, rank)
        return str(caught.value)

    with seeded(fault):
        messages = run_ranks(2, rank_main)
    assert messages[0] == messages[1]
    assert said in messages[0], messages[0]


def test_only_every_third_step_is_checked() -> None:
    def rank_main(rank: int) -> list[int]:
        model = shard(build())
        checks = check_invariants(model, every=3)
        counts = []
        for step in range(7):
            model(batch(step, rank)).square().mean().backward()
            counts.append(checks.checked)
        checks.remove()
        model(batch(7, rank)).square().mean().backward()
        return [*counts, checks.checked]

    assert run_ranks(2, rank_main) == [[1, 1, 1, 2, 2, 2, 3, 3]] * 2


def test_what_cannot_be_checked_is_said() -> None:
    def rank_main(rank: int) -> dict[str, str]:
        model = shard(build())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fullshard.step_in_backward(model, optimizer)
        checks = check_invariants(model)
        model(batch(0, rank)).square().mean().backward()
        return checks.skipped

    for skipped in run_ranks(2, rank_main):
        assert set(skipped) == {"root", "0", "2", "3"} and "stepped with in backward" in skipped["0"]


def test_values_that_are_not_finite_are_for_others() -> None:
    def rank_main(rank: int) -> int:
        model = shard(build())
        checks = check_invariants(model)
        (model(batch(0, rank)).square().mean() * torch.inf).backward()
        return checks.checked

    assert run_ranks(2, rank_main) == [1, 1]


def test_a_failed_backward_leaves_nothing_for_the_next() -> None:
    def rank_main(rank: int) -> int:
        model = shard(build())
        checks = check_invariants(model)

        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                raise RuntimeError("on purpose")

        handle = model[0].register_forward_hook(lambda *args: Fails.apply(args[2]))
        with pytest.raises(RuntimeError, match="on purpose"):
            model(batch(0, rank)).square().mean().backward()
        handle.remove()
        model(batch(1, rank)).square().mean().backward()
        return checks.checked

    assert run_ranks(2, rank_main) == [1, 1]


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_another_every_is_refused(every: Any) -> None:
    def rank_main(rank: int) -> None:
        with pytest.raises((ValueError, TypeError), match="every: expected a whole number of at least 1"):
            check_invariants(shard(build()), every=every)

    run_ranks(1, rank_main)


def test_a_plain_model_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a module with sharded parts"):
        check_invariants(nn.Linear(2, 2))
