"""`replicate`: data parallelism without sharding, by the same engine."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..policy import MixedPrecisionPolicy, OffloadPolicy
from ..runtime import unit_of
from . import validate
from .fully_shard import fully_shard
from .mesh_dims import Whole

T = TypeVar("T", bound=nn.Module)


def replicate(
    module: T,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (frozen, and torch's default)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> T:
    """Keep the parameters of `module` whole on every rank of `mesh`, and average their gradients: what DDP does.

    `fully_shard` with nothing cut: units, hooks, precision, accumulation and setters are the same, and the module
    becomes an `FSDPModule`. Parameters are DTensors with placements `(Replicate(),)`. Nothing is gathered; each unit
    sends one flat bucket of gradients when they are ready. `fully_shard` on a mesh (N, 1) is the same, with placements
    `(Replicate(), Shard(0))`.

    mesh: a 1-D `DeviceMesh`; None: all ranks of the default process group. The other arguments are those of
    `fully_shard`; of `dp_mesh_dims` only `replicate`.
    Returns `module` itself. Raises `ValueError` (a mesh of several axes, axes to shard over), `RuntimeError` (a module
    that `fully_shard` cut) and what `fully_shard` raises. Source: torch 2.13
    `torch.distributed._composable.replicate_with_fsdp.replicate` for names and types.
    """
    unit = unit_of(module) if isinstance(module, nn.Module) else None
    if unit is not None and any(group.placing.shards for group in unit.groups):
        raise RuntimeError(
            f"module: expected one that fully_shard was not applied to, found {type(module).__name__}, which is "
            f"sharded; apply one of the two to it"
        )
    if dp_mesh_dims is not None:
        if dp_mesh_dims.shard is not None:
            raise ValueError(
                f"dp_mesh_dims: expected only axes that replicate, found shard={dp_mesh_dims.shard!r}; "
                f"use fully_shard, which shards over them"
            )
        whole: Any = mesh
    else:
        whole = Whole(_one_axis(mesh))
    return fully_shard(
        module,
        mesh=whole,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        dp_mesh_dims=dp_mesh_dims,
    )


def _one_axis(mesh: DeviceMesh | None) -> DeviceMesh:
    if mesh is None:
        device_type = validate.resolve_mesh(None).device_type
        return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("replicate",))
    if isinstance(mesh, DeviceMesh) and mesh.ndim != 1:
        raise ValueError(f"mesh: expected one axis, over which to replicate, found {mesh}; slice it by its name")
    return validate.resolve_mesh(mesh)
