"""Descriptors that private groups on gloo take, counted on ranks, and the table of docs/how-to/large-clusters.md."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard
from tests.harness.pool import pool

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "large-clusters.md"
# Of one group of gloo beside its connections: a socket that listens, a pipe, and what waits for all of them.
OF_A_GROUP = 4
# To torch's store, if that is a server; those of the pool's ranks are files.
TO_THE_STORE = 1


def of_groups(groups: int, ranks: int, store: int = TO_THE_STORE) -> int:
    """Descriptors of so many groups of `ranks` ranks: each has a connection to every other rank."""
    return groups * (OF_A_GROUP + store + ranks - 1)


def counted(rank: int) -> list[int]:
    """Descriptors that a model on ranks without private groups opens: until its backward is over, and for clipping."""
    ranks = list(range(dist.get_world_size()))
    # A group of its own, in another order than those of other tests, whose private groups would be used again.
    dist.barrier()
    group = dist.new_group(ranks, backend="gloo")
    dist.barrier(group)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fullshard.fully_shard(model, mesh=mesh)
    before = _open()
    model(torch.ones(2, 8)).sum().backward()
    dist.barrier(group)
    trained = _open()
    fullshard.clip_grad_norm_(model.parameters(), 1.0)
    dist.barrier(group)
    return [len(trained - before), len(_open() - trained)]


def _open() -> set[tuple[str, str]]:
    """The open descriptors, and of what they are. Those of former tests may be closed at any time."""
    found = set[tuple[str, str]]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_group_costs_four_descriptors_and_one_for_each_further_rank(world: int) -> None:
    """Two groups at the first backward, for the model's messages and for comparisons; a third when it is needed."""
    for trained, clipped in pool(world).run(counted):
        assert (trained, clipped) == (of_groups(2, world, store=0), of_groups(1, world, store=0))


def test_the_table_of_the_page() -> None:
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", PAGE.read_text(), flags=re.M)
    found = [tuple(int(cell.replace(",", "")) for cell in row) for row in rows]
    assert found == [(n, of_groups(2, n), of_groups(3, n), of_groups(3, n) + of_groups(1, 8)) for n in (8, 64, 256)]
