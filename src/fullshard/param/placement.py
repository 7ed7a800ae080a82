"""Where a parameter lives over the ranks: the one file that decides DTensor meshes and placements.

mesh axes        placements of a parameter sharded on dim d
shard            (Shard(d),)
replicate, shard (Replicate(), Shard(d))
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..layout import contiguous_stride
from .swap import Found


class Placing(NamedTuple):
    """Over which ranks a group's parameters are cut, and where its shards live."""

    # The data-parallel mesh of the DTensors: its last axis shards, one before it replicates.
    mesh: DeviceMesh
    # This rank on the axis that shards, and how many there are.
    rank: int
    world: int
    device: torch.device
    # Name of the backend of that axis.
    backend: str
    # Full parameters of at least so many bytes are gathered straight into place, where the backend can group.
    direct_nbytes: int


class Spec(NamedTuple):
    """What a DTensor says about itself. `shape` and `stride` are those of the whole tensor."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def sharded_spec(found: Found, placing: Placing) -> Spec:
    """The spec of the sharded parameter made of `found`."""
    replicated = (Replicate(),) * (placing.mesh.ndim - 1)
    shape = tuple(found.parameter.shape)
    return Spec(placing.mesh, (*replicated, Shard(found.dim)), shape, contiguous_stride(shape))
