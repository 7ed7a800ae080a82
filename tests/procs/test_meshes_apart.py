"""Ranks that give meshes of other ranks, over gloo: those that wait for each other in vain say so within seconds; those
that wait for ranks which train happily on another mesh, at the time limit of the process group."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard import PeerFailed, RanksDisagree
from fullshard.peers import watch
from tests.harness import worlds
from tests.harness.behaviours import behaviour
from tests.harness.forked import run_forks
from tests.harness.hang import patience
from tests.harness.models import seeded
from tests.threads.programs import Model, batch, part, shard

Axes = Callable[[int, DeviceMesh], DeviceMesh]
# In place of the time limit of a process group.
LIMIT = 3.0


def _axis(rank: int, mesh: DeviceMesh) -> DeviceMesh:
    return mesh["data" if rank < 2 else "model"]


def _half(rank: int, mesh: DeviceMesh) -> DeviceMesh:
    """The third and fourth rank without the others."""
    everyone, halves = init_device_mesh("cpu", (4,)), mesh["model"]
    return halves if rank >= 2 else everyone


def _ring(rank: int, mesh: DeviceMesh) -> DeviceMesh:
    """Each rank with the next one."""
    pairs = [DeviceMesh("cpu", pair) for pair in ([0, 1], [1, 2], [2, 3], [0, 3])]
    return pairs[rank]


def _crossed(rank: int, mesh: DeviceMesh) -> DeviceMesh:
    """Everybody is waited for by somebody who is waited for."""
    return mesh["data" if rank in (0, 3) else "model"]


def _train(rank: int, model: Any) -> tuple[str, float]:
    """Until an error comes, or for two limits."""
    begun = time.monotonic()
    for _ in range(20):
        try:
            model(part(batch(4, 0), rank)).pow(2).mean().backward()
        except (RanksDisagree, PeerFailed) as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - begun
        model.zero_grad()
        time.sleep(LIMIT / 10)
    return "", time.monotonic() - begun


def _mended(rank: int, mesh: DeviceMesh) -> Tensor:
    """By whoever catches the error: it trains, with connections of its own."""
    dist.barrier()  # a rank that mends its model at once is met by those who still wait
    model: Any = shard(seeded(Model), mesh=mesh["data"])
    failed = 0
    while failed < 5:
        try:
            for _ in range(2):
                model(part(batch(4, 0), rank // 2)).pow(2).mean().backward()
            gradient: Tensor = model.head.weight.grad.full_tensor()
            return gradient
        except (RanksDisagree, PeerFailed):
            failed += 1
            model.zero_grad()
    raise AssertionError("they do not meet")


def _apart(rank: int, mesh_of: Axes, train: tuple[int, ...]) -> tuple[str, float, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    here = watch()
    assert here is not None
    if train:
        here.settings = replace(here.settings, limit_seconds=LIMIT)
    model: Any = shard(seeded(Model), mesh=mesh_of(rank, mesh))
    dist.barrier()  # all have said where they are, however slow the machine is
    text, seconds = _train(rank, model)
    here.settings = replace(here.settings, limit_seconds=60.0)
    return text, seconds, _mended(rank, mesh)


@pytest.mark.sample(1)
@behaviour(
    "ranks that give a model meshes of other ranks and wait for each other: an error on all of them, within seconds",
    area="failures",
    torch="none",
    reason="all wait until the time limit of the process group",
)
@pytest.mark.parametrize("mesh_of", [_ring, _crossed])
def test_ranks_that_wait_for_each_other_on_whatever_meshes_are_told(mesh_of: Axes) -> None:
    worlds.note("gloo", 4)
    found = run_forks(4, _apart, (mesh_of, ()), timeout=60)
    for text, seconds, _ in found:
        assert text.startswith("RanksDisagree: expected all ranks to do the same, found ranks 0 to 3 waiting in"), text
        # A bound that a process group's timeout would break, not a measurement.
        assert seconds < patience(15)
    assert all(torch.equal(grad, found[rank % 2][2]) for rank, (_, _, grad) in enumerate(found))


@pytest.mark.slow
@pytest.mark.sample(1)
@behaviour(
    "ranks that wait for others which train on another mesh: at the time limit, who did not come and where it is",
    area="failures",
    torch="none",
    reason="a backend's words, without a rank or a place",
)
@pytest.mark.parametrize("mesh_of", [_axis, _half])
def test_who_waits_for_ranks_that_train_elsewhere_is_told_where_these_are(mesh_of: Axes) -> None:
    worlds.note("gloo", 4)
    found = run_forks(4, _apart, (mesh_of, (2, 3)), timeout=60)
    for text, seconds, _ in found[:2]:
        assert text.startswith("PeerFailed: expected every rank to take part in the units and parameters"), text
        assert re.search(r"the time limit of the process group: it is rank [23] in .* \(.*\.py:\d+ in ", text), text
        # Counted by the rank that reads, which may have begun to wait a moment before this one.
        assert LIMIT / 2 < seconds < patience(LIMIT + 10)
    assert [text for text, _, _ in found[2:]] == ["", ""]
    assert all(torch.equal(grad, found[rank % 2][2]) for rank, (_, _, grad) in enumerate(found))
