"""`shard_placement_fn`: along which dim, and over which mesh, each parameter of a unit is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ..param import Found, FullMesh, check_own_mesh
from . import validate


@dataclass(frozen=True)
class ShardPlacementResult:
    """What a `shard_placement_fn` returns for a parameter that has a mesh of its own, such as an expert's.

    placement: the dim to cut; None means `Shard(0)`.
    mesh: what `fully_shard(mesh=...)` accepts; None means the mesh of the unit. Gradients are averaged over it.

    >>> from torch.distributed.tensor import Shard
    >>> ShardPlacementResult(Shard(1)).mesh is None
    True

    torch's object of this name, with its `mesh_info`, is accepted as well (torch 2.13; it is private there).
    """

    placement: Shard | None
    mesh: DeviceMesh | None = None


class Share(NamedTuple):
    """Parameters of a unit that live on one mesh."""

    mesh: DeviceMesh
    # Of parameters that are DTensors on one mesh with all axes (`dp_mesh_dims`), where `mesh` is that of the unit.
    full_mesh: FullMesh | None
    found: list[Found]


def place(
    found: Sequence[Found],
    mesh: DeviceMesh,
    full_mesh: FullMesh | None,
    fn: Callable[[nn.Parameter], Any] | None,
) -> list[Share]:
    """`found` with the dims that `fn` chooses, by the mesh it chooses; meshes in the order of their first parameter.

    `mesh` and `full_mesh` are those of the unit. `fn` is called once for each parameter, on every rank in the same
    order, and must answer alike on all of them. Raises `ValueError` for another answer than None, `Shard` or a result
    with a mesh that can be used, and when two meshes would share their process groups; `AssertionError` (torch's type)
    for a dim that the parameter has not; and what `check_own_mesh` raises for parameters that are DTensors.
    """
    # By process groups, not by mesh: what travels together is decided by who takes part.
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
            f"{answer!r}; a parameter that is to stay whole goes into ignored_params"
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
    mesh = validate.resolve_mesh(mesh)
    if mesh.device_type != default.device_type:
        raise ValueError(
            f"shard_placement_fn: expected a mesh on {default.device_type}, as that of the unit, found one on "
            f"{mesh.device_type} for {item.name}; shard what lives on another device by a call of its own"
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
