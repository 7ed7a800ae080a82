"""`shard_placement_fn`: the dim and the mesh over which each parameter of a unit is sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ..param import Found, FullMesh, check_own_mesh
from ..policy.arguments import expect_known_fields
from .validate import resolve_mesh


@dataclass(frozen=True)
class ShardPlacementResult:
    """Result of a `shard_placement_fn` for a parameter with its own mesh, such as an expert's.

    placement: the dim to shard; None means `Shard(0)`.
    mesh: as for `fully_shard(mesh=...)`; None means the mesh of the unit. Gradients are averaged over it.

    >>> from torch.distributed.tensor import Shard
    >>> ShardPlacementResult(Shard(1)).mesh is None
    True

    torch's private class of this name, with its `mesh_info`, is accepted too (torch 2.13).
    """

    placement: Shard | None
    mesh: DeviceMesh | None = None


class Share(NamedTuple):
    """The parameters of a unit on one mesh."""

    mesh: DeviceMesh
    # The mesh with all axes (`dp_mesh_dims`) of parameters that are DTensors on it, if `mesh` is the unit's.
    full_mesh: FullMesh | None
    found: list[Found]


def place(
    found: Sequence[Found],
    mesh: DeviceMesh,
    full_mesh: FullMesh | None,
    fn: Callable[[nn.Parameter], Any] | None,
) -> list[Share]:
    """`found` with the dims that `fn` chooses, grouped by the mesh it chooses, in the order of first parameters.

    `mesh` and `full_mesh` are those of the unit. `fn` is called once per parameter, in the same order on every rank,
    and must return the same on all ranks. Raises `ValueError` for a result other than None, `Shard` or a
    `ShardPlacementResult` with a usable mesh, and if two meshes would share their process groups; `AssertionError`
    (torch's type) for a dim out of range; and the errors of `check_own_mesh` for DTensor parameters.
    """
    # By process groups, not by mesh: parameters with the same process groups share messages.
    shares: dict[tuple[str, ...], Share] = {}
    for item in found:
        dim, own = (item.dim, mesh) if fn is None else _answer(item, mesh, fn(item.parameter))
        full = full_mesh if own == mesh else None
        check_own_mesh(item, own, full)
        share = shares.setdefault(_groups(own), Share(own, full, []))
        if share.mesh != own:
            raise ValueError(
                f"shard_placement_fn: expected parameters that share their process groups to share one mesh, found "
                f"{own} for {item.name} and {share.mesh} for {share.found[0].name}; return the same mesh for both"
            )
        share.found.append(item._replace(dim=dim))
    return list(shares.values())


def _answer(item: Found, default: DeviceMesh, answer: Any) -> tuple[int, DeviceMesh]:
    """(dim, mesh) of one parameter."""
    placement, mesh = answer, default
    if hasattr(answer, "placement"):
        expect_known_fields("shard_placement_fn", answer, ("placement", "mesh", "mesh_info"))
    if isinstance(answer, ShardPlacementResult):
        placement = answer.placement
        mesh = default if answer.mesh is None else _usable(item, answer.mesh, default)
    elif hasattr(answer, "placement") and hasattr(answer, "mesh_info"):
        placement = answer.placement
        mesh = _usable(item, _mesh_of_info(item, answer.mesh_info), default)
    if placement is None:
        return 0, mesh
    if not isinstance(placement, Shard):
        raise ValueError(
            f"shard_placement_fn: expected None, Shard(dim) or fullshard.ShardPlacementResult for {item.name}, found "
            f"{answer!r}; put a parameter that should stay unsharded into ignored_params"
        )
    ndim = item.parameter.ndim
    if not -ndim <= placement.dim < ndim:
        raise AssertionError(
            f"shard_placement_fn: expected a dim of {item.name} in [{-ndim}, {ndim - 1}], found {placement}; its shape "
            f"is {tuple(item.parameter.shape)}"
        )
    return placement.dim % ndim, mesh


def _usable(item: Found, mesh: object, default: DeviceMesh) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"shard_placement_fn: expected a DeviceMesh for {item.name}, found {type(mesh).__name__}; "
            f"use init_device_mesh, or None for the mesh of the unit"
        )
    mesh = resolve_mesh(mesh)
    if mesh.device_type != default.device_type:
        raise ValueError(
            f"shard_placement_fn: expected a mesh on {default.device_type}, as that of the unit, found one on "
            f"{mesh.device_type} for {item.name}; shard parameters on another device by a separate fully_shard call"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"shard_placement_fn: expected a mesh with this rank in it, found {mesh} for {item.name}; give every rank "
            f"that has the parameter a mesh, as the axes of one init_device_mesh do"
        )
    return mesh


def _mesh_of_info(item: Found, info: Any) -> DeviceMesh:
    """The axes that torch's FSDPMeshInfo or HSDPMeshInfo names, as a mesh (replicate, shard) or (shard)."""
    mesh, shard, replicate = info.mesh, info.shard_mesh_dim, getattr(info, "replicate_mesh_dim", None)
    axes = [axis for axis in (replicate, shard) if axis is not None]
    own: DeviceMesh
    if axes == list(range(mesh.ndim)):
        own = mesh
        return own
    names = mesh.mesh_dim_names
    if shard is None or names is None or axes != sorted(axes):
        raise ValueError(
            f"shard_placement_fn: expected a mesh of the axes (shard) or (replicate, shard) for {item.name}, or named "
            f"ones in that order, found shard {shard} and replicate {replicate} of {mesh}; "
            f"slice the mesh by names: mesh['replicate', 'shard']"
        )
    own = mesh[tuple(names[axis] for axis in axes)]
    return own


def _groups(mesh: DeviceMesh) -> tuple[str, ...]:
    return tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim))
