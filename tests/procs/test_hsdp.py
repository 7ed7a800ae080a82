"""Meshes that replicate over gloo processes: DDP and plain FSDP beside them, real asynchrony, bits."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fullshard
from fullshard.engine import unit_of
from tests.harness.models import BY_NAME, Trained, adamw, assert_same_training, collect, train_reference
from tests.harness.parity import assert_same_bits
from tests.harness.pool import pool

STEPS = 4
CASE = BY_NAME["transformer"]


def _train(rank: int, model: nn.Module, *, jitter: bool = False, one_message: bool = False) -> Trained:
    """AdamW steps on this rank's batches. `jitter`: ranks come late, each in its own way."""
    if one_message:
        model.set_communication("torch")  # type: ignore[operator]
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        if jitter:
            time.sleep(0.02 * ((rank * 7 + step * 3) % 4))
        CASE.loss(model, CASE.batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


def _sharded(shape: tuple[int, ...] | None, model: nn.Module | None = None) -> Any:
    mesh = None
    if shape is not None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return CASE.shard(model or CASE.build(), fullshard.fully_shard, mesh=mesh)


def _without_wrapper(trained: Trained) -> Trained:
    """Names as they were before DistributedDataParallel."""
    params, state, allowed = (
        {k.removeprefix("module."): v for k, v in d.items()} for d in (trained.params, trained.state, trained.allowed)
    )
    return Trained(params, state, allowed=allowed)


def _beside_ddp(rank: int) -> tuple[Trained, Trained]:
    world = dist.get_world_size()
    ours = _train(rank, _sharded((world, 1)))
    # One bucket for all, where ours has one for each unit.
    ddp = DistributedDataParallel(CASE.build())
    return ours, _without_wrapper(_train(rank, ddp))


@pytest.mark.slow
def test_replicas_of_one_shard_train_as_ddp() -> None:
    """Parameters and AdamW state: the same bits on two ranks, where a sum has one order; within rounding on four."""
    for ours, ddp in pool(2).run(_beside_ddp):
        assert_same_bits(ours, ddp)
    for ours, ddp in pool(4).run(_beside_ddp):
        assert_same_training(ours, ddp)


def _all_ways(rank: int) -> list[Trained]:
    ways = [_train(rank, _sharded(None)), _train(rank, _sharded((2, 2))), _train(rank, _sharded((2, 2)), jitter=True)]
    return [*ways, _train(rank, _sharded((2, 2)), one_message=True), _train(rank, fullshard.replicate(CASE.build()))]


@pytest.mark.slow
def test_two_copies_of_two_shards_train_as_four_shards() -> None:
    """Within rounding; bit by bit the same on every rank and in every run, whoever comes late."""
    everyones = pool(4).run(_all_ways)
    batches = [[CASE.batch(step, rank) for rank in range(4)] for step in range(STEPS)]
    allowed = train_reference(CASE.build(), CASE.loss, batches).allowed
    plain, first, *_ = everyones[0]
    for _, hsdp, late, one_message, replicated in everyones:
        assert_same_bits(hsdp, first)
        assert_same_bits(late, first)
        for other in (hsdp, one_message, replicated):
            assert_same_training(other, replace(plain, allowed=allowed))


def _overlap(rank: int) -> list[tuple[str, int]]:
    """For each exchange that is sent, how many sums over the replicas are under way then."""
    model = _sharded((2, 2))
    CASE.loss(model, CASE.batch(0, rank)).backward()
    unit = unit_of(model)
    assert unit is not None and unit.root is not None
    executor = unit.root.executor
    noted: list[tuple[str, int]] = []
    executor.listeners.append(
        lambda command: (
            noted.append((command.unit.name, executor.replicating_nbytes))
            if command.kind in ("reduce", "finish")
            else None
        )
    )
    CASE.loss(model, CASE.batch(1, rank)).backward()
    return noted


def test_sums_over_replicas_travel_while_other_gradients_are_reduced() -> None:
    """With three layers and the root, two in flight: when the root's gradients are sent, the first sum is under way."""
    for noted in pool(4).run(_overlap):
        assert [name for name, _ in noted] == ["layers.2", "layers.1", "layers.0", "root", "root"]
        assert [nbytes > 0 for _, nbytes in noted] == [False, False, False, True, True]


def _windows(rank: int) -> list[torch.Tensor]:
    """Gradients of two micro-batches: all-reduced each; once; over a communicator of their own."""
    gradients = []
    for setting in ("each", "once", "apart"):
        model = _sharded((2, 2))
        model.set_separate_reduce_scatter_group(setting == "apart")
        for micro in range(2):
            model.set_requires_all_reduce(setting == "each" or micro == 1)
            CASE.loss(model, CASE.batch(micro, rank)).backward()
        gradients.append(torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]))
    return gradients


def test_accumulation_without_all_reduce_and_a_communicator_apart() -> None:
    everyones = pool(4).run(_windows)
    for each, once, apart in everyones:
        assert torch.equal(once, apart) and torch.equal(once, everyones[0][1])
        assert (each - once).abs().max() <= 4 * torch.finfo(torch.float32).eps * each.abs().max()
