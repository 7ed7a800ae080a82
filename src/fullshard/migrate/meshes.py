"""The one mesh of a plan, and whether a mesh that the caller made is that of the plan."""

from __future__ import annotations

from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .._torch import concatenated_mesh, flattened_axes, root_mesh
from ..keys import ConfigError
from .axes import FOLDED, Axes


class Meshes(NamedTuple):
    """whole: all axes, by their names. data: those of `fully_shard`, (replicate, shard) or (shard)."""

    whole: DeviceMesh
    data: DeviceMesh


def build_meshes(axes: Axes, device_type: str) -> Meshes:
    """One mesh of all ranks with the axes of `axes`; `dp_shard` and `cp` are folded into one. Collective."""
    names, sizes = zip(*axes.mesh, strict=True)
    whole = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    return Meshes(whole, data_mesh(whole, axes))


def data_mesh(whole: DeviceMesh, axes: Axes) -> DeviceMesh:
    """The axes of `whole` that `fully_shard` takes."""
    folded = len(axes.cut) == 2
    cut: DeviceMesh = flattened_axes(whole[axes.cut], FOLDED) if folded else whole[axes.cut[0]]
    if axes.dp_replicate == 1:
        return cut
    found: DeviceMesh = with_copies(whole["dp_replicate"], cut) if folded else whole["dp_replicate", axes.cut[0]]
    return found


def with_copies(copies: DeviceMesh, cut: DeviceMesh) -> DeviceMesh:
    """The axis of copies, then the folded one along which parameters are cut, as one mesh."""
    return concatenated_mesh([copies, cut])


def folded(whole: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """The axes `axes` of `whole`, which are neighbours, as one of that name."""
    found: DeviceMesh = flattened_axes(whole[axes], name)
    return found


def check_mesh(mesh: DeviceMesh, axes: Axes) -> Meshes:
    """`mesh`, which the caller passes to `prepare_fully_shard` beside a plan, if it is the data-parallel mesh of the
    plan. Raises `ConfigError` that names the axis which is not."""
    whole, names = root_mesh(mesh), mesh.mesh_dim_names or ()
    sizes = dict(zip(whole.mesh_dim_names or (), whole.mesh.shape, strict=False))
    for name, size in sorted(axes.mesh, key=lambda axis: axis[0] in sizes):  # one that is not there first
        if size > 1 and sizes.get(name) != size:
            there = ", ".join(f"{axis} {found}" for axis, found in sizes.items()) or "no names"
            raise ConfigError(
                f"mesh: expected it to be of a mesh with the axis {name} of {size} ranks, as the parallelism says, "
                f"found {there}; leave one of the two out"
            )
    if len(axes.cut) == 2 and names[-2:] == axes.cut:
        raise ConfigError(
            f"mesh: expected dp_shard and cp folded into one axis, found them as two, of which fully_shard takes "
            f"dp_shard for one with copies (HSDP): {axes.dp_shard} times the memory; pass "
            f'mesh["dp_shard", "cp"]._flatten("{FOLDED}"), or leave mesh out'
        )
    missing = [name for name, size in axes.mesh if name in ("dp_replicate", "dp_shard", "cp") and size > 1]
    ranks = {*mesh.mesh.flatten().tolist()}
    for name in missing:
        if not {*axes.group(mesh.get_rank(), name)} <= ranks:
            raise ConfigError(
                f"mesh: expected the axis {name} in it, over which gradients are averaged, found "
                f"{', '.join(names) or 'no names'}: without it the ranks along {name} train different models; leave "
                f"mesh out"
            )
    copies, shard = mesh.size(0) if mesh.ndim == 2 else 1, mesh.size(mesh.ndim - 1)
    if (copies, shard) != (axes.dp_replicate, axes.shards):
        raise ConfigError(
            f"mesh: expected {axes.dp_replicate} x {axes.shards} (replicate x shard), as the parallelism says, found "
            f"{copies} x {shard}; leave one of the two out"
        )
    return Meshes(whole, mesh)
