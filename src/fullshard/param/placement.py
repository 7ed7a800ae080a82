"""Where parameters live across the ranks: the one file that decides DTensor meshes and placements.

parameter                     mesh axes                placements, sharded on dim d
plain                         shard                    (Shard(d),)
plain                         replicate, shard         (Replicate(), Shard(d))
plain                         replicate                (Replicate(),), not sharded
DTensor on a tensor-parallel  the above, then tp       (..., Shard(d), *tp), or where tp shards dim d as well
mesh                                                   (..., _StridedShard(d), *tp)
DTensor on a full mesh        that mesh                its own, with the above on the sharding axis
(`dp_mesh_dims`)

The data-parallel ranks shard a DTensor's local tensor: its own mesh splits a dim first, then the sharding axis splits
each of these pieces. DTensor reads placements from left to right. So where both split the same dim, the left one is a
`_StridedShard(d, split_factor)`: it was split after `split_factor` pieces were made.

In compute a parameter is what it was before sharding: plain, or a DTensor on its own mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .._torch import can_be_one_mesh, concatenated_mesh, cut_dim, local_of, strided_shard
from ..layout import contiguous_stride
from ..policy import Offload
from .swap import Found

# Tensor and expert parallelism. torch rejects more as well.
MAX_OWN_AXES = 2


class FullMesh(NamedTuple):
    """`dp_mesh_dims`: parameters are DTensors on one mesh with all axes, and stay on it."""

    # The mesh of the parameters before sharding, and in compute.
    given: DeviceMesh
    # The mesh of the sharded parameters; it differs where several axes shard together and became one.
    mesh: DeviceMesh
    # The (first) axis of `given` that each axis of `mesh` comes from.
    origins: tuple[int, ...]
    # The axis of `mesh` that shards; None if parameters are only replicated.
    shard_axis: int | None
    # The data-parallel axes of `given`, over which a parameter has to be replicated.
    replicated: tuple[int, ...]


class Placing(NamedTuple):
    """The ranks over which a group's parameters are sharded, and the device of its shards."""

    # The data-parallel mesh of the DTensors: its last axis shards, one before it replicates.
    mesh: DeviceMesh
    # This rank's position on the sharding axis, and the size of that axis.
    rank: int
    world: int
    device: torch.device
    # Name of the backend of the sharding axis.
    backend: str
    # Full parameters of at least this many bytes are gathered straight into place, if the backend can group gathers.
    direct_nbytes: int | None
    full_mesh: FullMesh | None = None
    # The unit's mesh, if `mesh` is a different one for these parameters alone.
    unit_mesh: DeviceMesh | None = None
    # Whether shards are on the host while full parameters are on `device`.
    offload: Offload = Offload()
    # Whether the last axis of the mesh shards parameters, or replicates them like the others.
    shards: bool = True

    @property
    def shard_device(self) -> torch.device:
        """The device of the shards."""
        return torch.device("cpu") if self.offload.to_host else self.device


class Spec(NamedTuple):
    """A DTensor's metadata. `shape` and `stride` are those of the whole tensor."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def replicated_somewhere(self) -> bool:
        """Whether some axis holds copies, so that gradients may arrive as partial sums."""
        return any(p.is_replicate() and self.mesh.size(axis) > 1 for axis, p in enumerate(self.placements))


class NormMesh:
    """The ranks over which the squares of a parameter's gradient are summed, if not over its own mesh alone.

    A parameter on fewer ranks than its unit (an expert) has different counterparts of the same name on the other ranks.
    Each of them counts in the global norm for clipping; otherwise ranks would scale shared parameters differently."""

    _ATTRIBUTE = "_fullshard_norm_mesh"

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # A saved parameter carries its attributes along; a mesh does not belong in a checkpoint.
        return type(None), ()

    @classmethod
    def note(cls, parameter: Tensor, own: DeviceMesh, unit: DeviceMesh | None) -> None:
        """Remember `unit` on the sharded `parameter`, which is on the mesh `own`."""
        if unit is not None and set(own.mesh.flatten().tolist()) < set(unit.mesh.flatten().tolist()):
            setattr(parameter, cls._ATTRIBUTE, cls(unit))

    @classmethod
    def of(cls, parameter: Tensor) -> DeviceMesh | None:
        """The unit's mesh for such a parameter; None for any other tensor."""
        noted = parameter.__dict__.get(cls._ATTRIBUTE)
        return None if noted is None else cast(NormMesh, noted).mesh


def own_spec(found: Found) -> Spec | None:
    """The spec of a parameter that is a DTensor before sharding; None for a plain one."""
    parameter = found.parameter
    if not isinstance(parameter, DTensor):
        return None
    return Spec(parameter.device_mesh, tuple(parameter.placements), tuple(parameter.shape), parameter.stride())


def cut_shape(found: Found) -> tuple[int, ...]:
    """The shape that the data-parallel ranks shard: of this rank's part of a DTensor, or of the whole plain tensor."""
    parameter = found.parameter
    return tuple(local_of(parameter).shape if isinstance(parameter, DTensor) else parameter.shape)


def sharded_spec(found: Found, placing: Placing) -> Spec:
    """The spec of the sharded parameter made of `found`."""
    own = own_spec(found)
    shape = tuple(found.parameter.shape)
    if placing.full_mesh is not None:
        assert own is not None  # checked by `check_own_mesh`
        return Spec(placing.full_mesh.mesh, _on_full_mesh(found, own, placing.full_mesh), shape, own.stride)
    replicated = (Replicate(),) * (placing.mesh.ndim - 1)
    if own is None:
        last = Shard(found.dim) if placing.shards else Replicate()
        return Spec(placing.mesh, (*replicated, last), shape, contiguous_stride(shape))
    mesh = concatenated_mesh([placing.mesh, own.mesh])
    shard = _shard(found.dim, own.placements, [own.mesh.size(axis) for axis in range(own.mesh.ndim)])
    return Spec(mesh, (*replicated, shard, *own.placements), shape, own.stride)


def _on_full_mesh(found: Found, own: Spec, full: FullMesh) -> tuple[Placement, ...]:
    placements = [own.placements[origin] for origin in full.origins]
    axis = full.shard_axis
    if axis is not None:
        sizes = [full.mesh.size(right) for right in range(axis + 1, full.mesh.ndim)]
        placements[axis] = _shard(found.dim, placements[axis + 1 :], sizes)
    return tuple(placements)


def _shard(dim: int, right: Sequence[Placement], sizes: Sequence[int]) -> Placement:
    """A shard of `dim`, split after the axes to its `right`, with these `sizes`, made their pieces."""
    pieces = math.prod(size for placement, size in zip(right, sizes, strict=True) if cut_dim(placement) == dim)
    return Shard(dim) if pieces == 1 else strided_shard(dim, pieces)


def check_own_mesh(found: Found, mesh: DeviceMesh, full: FullMesh | None) -> None:
    """Reject a parameter whose own mesh and placements do not fit the data-parallel `mesh`; torch's exception types."""
    own = own_spec(found)
    if full is not None:
        _check_on_full_mesh(found, own, full)
        return
    if own is None:
        return
    if own.mesh.ndim > MAX_OWN_AXES:
        raise NotImplementedError(
            f"{found.name}: expected a parameter on at most {MAX_OWN_AXES} axes of tensor and expert parallelism, "
            f"found placements {own.placements} on {own.mesh}; flatten axes that cut the same dim"
        )
    _check_placements(found, own)
    for what, axes in (("mesh", mesh), (f"the mesh of {found.name}", own.mesh)):
        if axes.mesh_dim_names is None:
            raise TypeError(
                f"{what}: expected named axes, because {found.name} is a DTensor and both meshes have to be parts of "
                f"one, found {axes} without names; use init_device_mesh(..., mesh_dim_names=('dp', 'tp')) and pass "
                f"mesh['dp'] here"
            )
    shared = set(mesh.mesh_dim_names or ()) & set(own.mesh.mesh_dim_names or ())
    if shared or not can_be_one_mesh(mesh, own.mesh):
        found_instead = f"the axes {sorted(shared)} in both" if shared else "meshes that no one mesh has as its axes"
        raise RuntimeError(
            f"{found.name}: expected the data-parallel mesh {mesh} and the mesh of this DTensor {own.mesh} to be "
            f"different axes of one mesh, found {found_instead}; make one mesh with init_device_mesh and slice it "
            f"by axis names"
        )


def _check_on_full_mesh(found: Found, own: Spec | None, full: FullMesh) -> None:
    if own is None:
        raise ValueError(
            f"{found.name}: expected a DTensor on the full mesh, because dp_mesh_dims is given, found a plain tensor; "
            f"make it a DTensor (distribute_tensor with Replicate() on the data-parallel axes), or pass the "
            f"data-parallel axes as mesh without dp_mesh_dims"
        )
    if own.mesh != full.given:
        raise ValueError(
            f"{found.name}: expected its mesh to be the one passed to fully_shard, {full.given}, because dp_mesh_dims "
            f"is given, found {own.mesh}; pass the mesh of the parameters"
        )
    _check_placements(found, own)
    for axis in full.replicated:
        if not own.placements[axis].is_replicate():
            names = full.given.mesh_dim_names or ()
            raise ValueError(
                f"{found.name}: expected Replicate() on the data-parallel axis {names[axis]!r}, found "
                f"{own.placements[axis]}; fully_shard shards it there itself"
            )


def _check_placements(found: Found, own: Spec) -> None:
    for placement in own.placements:
        if placement.is_partial():
            raise ValueError(
                f"{found.name}: expected a parameter that is sharded or replicated, found partial sums, "
                f"{own.placements}; redistribute it to Replicate() or Shard(dim) first"
            )


def local_part(full: Tensor, like: DTensor) -> Tensor:
    """This rank's part of the plain tensor `full` when sharded like `like`: dtype of `full`, no communication.

    It may be a view of `full`. Every rank must have `full` with equal values.
    """
    mesh = like.device_mesh
    whole = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=like.placements).to_local()
