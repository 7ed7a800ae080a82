"""Blocks of k neighbours among the ranks that share parameters: for an integer `reshard_after_forward`.

Eight ranks in blocks of two are the mesh ((0, 1), (2, 3), (4, 5), (6, 7)). The process groups of a mesh and degree are
made once and serve every unit: FSDP2 makes them again for each module, and a group costs memory on the device.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..guard import ask, scope_of
from .group import Block, ShardGroup, other_backend

# By the process group of the axis that shards, with which they go; then by ranks and degree.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], DeviceMesh]] = weakref.WeakKeyDictionary()


def block_of(mesh: DeviceMesh, degree: int, device: torch.device) -> Block:
    """This rank's block of `degree` consecutive ranks along the last axis of `mesh`, a divisor of its size.

    A collective call at the first time: every rank of `mesh` makes two groups (its block, and the ranks of equal
    position in the other blocks).
    """
    shard = mesh.get_group(mesh.ndim - 1)
    ranks = mesh.mesh.reshape(-1, degree)
    key = (mesh.device_type, degree, tuple(ranks.flatten().tolist()))
    known = _made.setdefault(shard, {})
    blocks = known.get(key)
    if blocks is None:
        blocks = known[key] = _make(mesh.device_type, ranks, shard)
    return Block(blocks, ShardGroup(blocks.get_group(1), device))


def _make(device_type: str, ranks: torch.Tensor, like: dist.ProcessGroup) -> DeviceMesh:
    # Ranks that made no groups would be waited for.
    scope = scope_of(tuple(sorted(ranks.flatten().tolist())))
    degree = ranks.size(1)
    if scope is not None:
        scope.resume()
        ask(scope, f"fully_shard(..., reshard_after_forward={degree})", "")
    row, column = (ranks == dist.get_rank()).nonzero()[0].tolist()
    # Only the members take part, so a mesh over some ranks (a pipeline stage) needs nothing of the others.
    groups = [
        dist.new_group(members.tolist(), backend=other_backend(like), use_local_synchronization=True)
        for members in (ranks[:, column], ranks[row])
    ]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=("block", "rank_in_block"))
