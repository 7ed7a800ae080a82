"""`dp_mesh_dims`: which axes of a full mesh are those of data parallelism."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from .._torch_compat import concatenated_mesh, flattened_axes
from ..param import FullMesh


class Whole(NamedTuple):
    """A mesh of one axis over which nothing is cut: how `replicate` says so to `fully_shard`."""

    mesh: DeviceMesh


def data_parallel_axes(mesh: DeviceMesh | None, dims: Any) -> tuple[DeviceMesh, FullMesh]:
    """The data-parallel mesh within `mesh`, and how it lies there: 1-D (shard, or replicate when nothing shards) or 2-D
    (replicate, shard).

    Without an axis that shards: 1-D (replicate), and `FullMesh.shard_axis` is None.

    dims: a `DataParallelMeshDims`, ours or torch's: `shard` and `replicate` are a name, several names or None. Several
    names become one axis, in the order of the mesh. Raises torch's types: `ValueError` (no names, an unknown name),
    `KeyError` (names in another order than in the mesh), `RuntimeError` (an axis twice, or axes to shard over that are
    not neighbours).
    """
    names = None if mesh is None else mesh.mesh_dim_names
    if mesh is None or names is None:
        raise ValueError(
            f"mesh: expected the full mesh of the parameters with named axes, because dp_mesh_dims is given, found "
            f"{mesh}; use init_device_mesh(..., mesh_dim_names=(...))"
        )
    shard = _axes(dims.shard, "shard", names)
    replicate = _axes(dims.replicate, "replicate", names)
    if not shard and not replicate:
        raise ValueError("dp_mesh_dims: expected at least one of shard and replicate, found neither; name the axes")
    both = sorted(names[axis] for axis in set(shard) & set(replicate))
    if both:
        raise RuntimeError(f"dp_mesh_dims: expected each axis once, found {both} in shard and replicate; name it once")
    if shard and shard != tuple(range(shard[0], shard[0] + len(shard))):
        raise RuntimeError(
            f"dp_mesh_dims: expected axes to shard over that are neighbours, found {dims.shard!r} of {names}; order "
            f"the axes of the mesh so that they are"
        )
    # Made by slicing the mesh by names, so that every part knows its root.
    parts = [flattened_axes(mesh[tuple(names[axis] for axis in axes)]) for axes in (replicate, shard) if axes]
    data_parallel = concatenated_mesh(parts)
    others = [axis for axis in range(mesh.ndim) if axis not in shard[1:]]
    whole = mesh
    if len(shard) > 1:
        whole = concatenated_mesh([parts[-1] if axis == shard[0] else mesh[names[axis]] for axis in others])
    shard_axis = others.index(shard[0]) if shard else None
    return data_parallel, FullMesh(mesh, whole, tuple(others), shard_axis, (*shard, *replicate))


def _axes(given: str | Iterable[str] | None, field: str, names: tuple[str, ...]) -> tuple[int, ...]:
    wanted = () if given is None else (given,) if isinstance(given, str) else tuple(given)
    for name in wanted:
        if name not in names:
            raise ValueError(
                f"dp_mesh_dims.{field}: expected names of axes of the mesh, {names}, found {name!r}; check its spelling"
            )
    axes = tuple(names.index(name) for name in wanted)
    if list(axes) != sorted(set(axes)):
        raise KeyError(
            f"dp_mesh_dims.{field}: expected each name once and in the order of {names}, found {wanted}; "
            f"name them in that order"
        )
    return axes
