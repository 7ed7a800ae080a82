"""Ranks that give meshes of other ranks, over gloo: those that wait for each other in vain say so, and those that train
happily on another mesh hear it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.guard import RanksDisagree
from tests.harness import worlds
from tests.harness.behaviours import behaviour
from tests.harness.forked import run_forks
from tests.harness.models import seeded
from tests.threads.programs import Model, batch, part, shard

Axes = Callable[[int, DeviceMesh], DeviceMesh]


def _axis(rank: int, mesh: DeviceMesh) -> DeviceMesh:
    return mesh["data" if rank < 2 else "model"]


def _half(rank: int, mesh: DeviceMesh) -> DeviceMesh:
    """The third and fourth rank without the others."""
    everyone, halves = init_device_mesh("cpu", (4,)), mesh["model"]
    return halves if rank >= 2 else everyone


def _alone(rank: int, mesh: DeviceMesh) -> DeviceMesh:
    return mesh["model" if rank == 3 else "data"]


def _train_until_told(rank: int, model: Any) -> tuple[str, float]:
    begun = time.monotonic()
    with pytest.raises(RanksDisagree) as caught:
        while time.monotonic() - begun < 30:
            model(part(batch(4, 0), rank)).pow(2).mean().backward()
            model.zero_grad()
    return str(caught.value), time.monotonic() - begun


def _apart(rank: int, mesh_of: Axes, again: bool) -> tuple[list[tuple[str, float]], Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model: Any = shard(seeded(Model), mesh=mesh_of(rank, mesh))
    told = [_train_until_told(rank, model)]
    if again:
        told.append(_train_until_told(rank, model))
    dist.barrier()  # a rank that mends its model at once is met by those who still wait
    # Mended, by whoever catches the error: it trains, with connections of its own.
    model = shard(seeded(Model), mesh=mesh["data"])
    for _ in range(2):
        model(part(batch(4, 0), rank // 2)).pow(2).mean().backward()
    return told, model.head.weight.grad.full_tensor()


@behaviour(
    "ranks that give a model meshes of other ranks: an error that names both meshes, on all ranks, within seconds",
    area="failures",
    torch="none",
    reason="some ranks train, and the others wait for them until the time limit of the process group",
)
@pytest.mark.parametrize(("mesh_of", "again"), [(_axis, True), (_half, False), (_alone, False)])
def test_all_ranks_hear_of_meshes_that_never_meet(mesh_of: Axes, again: bool) -> None:
    worlds.note("gloo", 4)
    found = run_forks(4, _apart, (mesh_of, again), timeout=60)
    told = [text for attempts, _ in found for text, _ in attempts]
    assert all(text.startswith("root: expected the same mesh on every rank, found cpu (") for text in told)
    assert all("('model',) of ranks [2, 3] on rank" in text for text in told), told
    # A bound that a process group's timeout would break, not a measurement.
    assert max(seconds for attempts, _ in found for _, seconds in attempts) < 15
    assert all(torch.equal(grad, found[rank % 2][1]) for rank, (_, grad) in enumerate(found))
