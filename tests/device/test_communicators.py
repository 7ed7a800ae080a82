"""How many communicators a training step opens on the device, beside those of FSDP2; `report` names them.

NCCL makes the communicator of a process group with its first message, and each takes memory of the device. The data
groups of fullshard replace the mesh's own groups, which stay without a message, so without one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard
from tests.harness.on_device import Setup, case_of, sharded
from tests.harness.pool import pool

# What is done, and the purposes of the communicators of fullshard.
CASES = {
    "ZeRO-3": (Setup(), ["data"]),
    "clip": (Setup(clip=1.0), ["data", "small"]),
    "HSDP": (Setup(replicas=2), ["data", "data"]),
    "HSDP, clip": (Setup(replicas=2, clip=1.0), ["data", "data", "small"]),
    # FSDP2 makes groups for each module.
    "hpZ": (Setup(reshard=2), ["block", "data"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ("clip", "HSDP") else name for name in CASES]
)
def test_at_most_one_communicator_more_than_fsdp2(name: str) -> None:
    setup, purposes = CASES[name]
    groups = pool(4, backend="nccl")
    for (used, told), (used_by_fsdp2, _) in zip(
        groups.run(_train, setup, "fullshard"), groups.run(_train, setup, "torch"), strict=True
    ):
        assert told == purposes and used == len(purposes)
        # One more for small messages on the device, as of `clip_grad_norm_`, and none without them.
        assert used <= used_by_fsdp2 + bool(setup.clip)


def _train(rank: int, setup: Setup, library: str) -> tuple[int, list[str]]:
    from tests.harness import nccl, simulated

    before, told = nccl.library().made(), []
    device, case = torch.device("simulated", 0), case_of(setup)
    clip = fullshard.clip_grad_norm_ if library == "fullshard" else nn.utils.clip_grad_norm_
    with simulated.watched():
        model: Any = sharded(case.build().to(device), setup, library)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(3):
            case.loss(model, tuple(part.to(device) for part in case.batch(step, rank))).backward()
            if setup.clip:
                clip(model.parameters(), setup.clip)
            optimizer.step()
            optimizer.zero_grad()
        if library == "fullshard":
            told = [term.name.split('"')[1] for term in fullshard.report(model).communicators]
    return nccl.library().made() - before, sorted(told)


@pytest.mark.slow
def test_a_bound_device_makes_no_group_of_ours_a_split_of_all_ranks() -> None:
    """Torch would make it one at once: a collective over ranks that do not come, and memory that no message uses."""
    assert pool(4, backend="nccl").run(_make_groups, timeout=30) == [(0, 2), (0, 2), (0, 0), (0, 0)]


def _make_groups(rank: int) -> tuple[int, int]:
    """The splits that were made, and the communicators."""
    from tests.harness import nccl

    device, case = torch.device("simulated", 0), case_of(Setup())
    assert dist.group.WORLD is not None
    # The mesh has half of the ranks, like a stage of a pipeline: the others make no group.
    # Its name makes it unlike the mesh of any job of two ranks: torch keeps the specs of DTensors for meshes that are
    # equal, and later jobs of this process would get this one, whose group is gone.
    group = dist.new_group([0, 1])
    stage = DeviceMesh.from_group(group, "simulated", mesh_dim_names=("stage",)) if rank < 2 else group
    # From now on as with `init_process_group(device_id=)`.
    dist.group.WORLD.bound_device_id = device
    dist.group.WORLD._get_backend(device).eager_connect_single_device(device)
    made = nccl.library().made()
    try:
        if rank < 2:
            model: Any = case.build().to(device)
            for name in case.units:
                fullshard.fully_shard(model.get_submodule(name), mesh=stage, reshard_after_forward=2)
            fullshard.fully_shard(model, mesh=stage)
            model.set_separate_reduce_scatter_group()
            case.loss(model, tuple(part.to(device) for part in case.batch(0, rank))).backward()
        assert dist.group.WORLD.bound_device_id == device
    finally:
        dist.group.WORLD.bound_device_id = None
    return nccl.library().splits(), nccl.library().made() - made
