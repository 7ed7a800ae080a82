"""Where a parameter lives over the ranks: the one file that decides DTensor meshes and placements.

parameter                     mesh axes                placements, sharded on dim d
plain                         shard                    (Shard(d),)
plain                         replicate, shard         (Replicate(), Shard(d))
plain                         replicate                (Replicate(),), nothing is cut
DTensor on a tensor-parallel  the above, then tp       (..., Shard(d), *tp), or where tp cuts dim d as well
mesh                                                   (..., _StridedShard(d), *tp)
DTensor on a full mesh        that mesh                its own, with the above on the axis that shards
(`dp_mesh_dims`)

A DTensor's local tensor is what is cut over the data-parallel ranks: first its own mesh cuts a dim, then the axis that
shards cuts each of these pieces. DTensor reads placements from left to right, so where both cut one dim, the left one
says by `_StridedShard(d, split_factor)` that it was cut after `split_factor` pieces were made.

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

from .._torch import concatenated_mesh, cut_dim, local_of, root_mesh, strided_shard
from ..layout import contiguous_stride
from ..policy import Offload
from .swap import Found

# Tensor and expert parallelism; torch refuses more, and nobody was found to use it.
MAX_OWN_AXES = 2


class FullMesh(NamedTuple):
    """`dp_mesh_dims`: parameters are DTensors on one mesh with all axes, and stay on it."""

    # The mesh of the parameters before sharding, and in compute.
    given: DeviceMesh
    # That of the sharded parameters; differs where several axes shard together and became one.
    mesh: DeviceMesh
    # For each axis of `mesh`, the (first) axis of `given` that it comes from.
    origins: tuple[int, ...]
    # The axis of `mesh` that shards; None: the parameters are only replicated.
    shard_axis: int | None
    # Axes of `given` over which a parameter has to be replicated: those of data parallelism.
    replicated: tuple[int, ...]


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
    direct_nbytes: int | None
    full_mesh: FullMesh | None = None
    # The mesh of the unit, where `mesh` is another one, of these parameters alone.
    unit_mesh: DeviceMesh | None = None
    # Whether shards lie on the host while full parameters are on `device`.
    offload: Offload = Offload()
    # Whether the last axis of the mesh cuts parameters, or replicates them like the others.
    shards: bool = True

    @property
    def shard_device(self) -> torch.device:
        """Where shards lie."""
        return torch.device("cpu") if self.offload.to_host else self.device


class Spec(NamedTuple):
    """What a DTensor says about itself. `shape` and `stride` are those of the whole tensor."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def replicated_somewhere(self) -> bool:
        """Whether some axis holds copies, so that gradients may arrive as summands that are still to be added."""
        return any(p.is_replicate() and self.mesh.size(axis) > 1 for axis, p in enumerate(self.placements))


class NormMesh:
    """Over which ranks the squares of a parameter's gradient are summed, where not over its own mesh alone.

    A parameter on fewer ranks than its unit has another one of its name on the other ranks: an expert. Each of them
    counts in the norm by which all are clipped, or ranks would scale what they share differently.
    """

    _ATTRIBUTE = "_fullshard_norm_mesh"

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # A saved parameter takes what is on it along; a mesh is no part of a checkpoint.
        return type(None), ()

    @classmethod
    def note(cls, parameter: Tensor, own: DeviceMesh, unit: DeviceMesh | None) -> None:
        """Remember it on the sharded `parameter`, which is on the mesh `own`."""
        if unit is not None and set(own.mesh.flatten().tolist()) < set(unit.mesh.flatten().tolist()):
            setattr(parameter, cls._ATTRIBUTE, cls(unit))

    @classmethod
    def of(cls, parameter: Tensor) -> DeviceMesh | None:
        """The mesh of the unit of such a parameter; None for any other tensor."""
        noted = parameter.__dict__.get(cls._ATTRIBUTE)
        return None if noted is None else cast(NormMesh, noted).mesh


def own_spec(found: Found) -> Spec | None:
    """What the parameter itself says when it is a DTensor before it is sharded; None for a plain one."""
    parameter = found.parameter
    if not isinstance(parameter, DTensor):
        return None
    return Spec(parameter.device_mesh, tuple(parameter.placements), tuple(parameter.shape), parameter.stride())


def cut_shape(found: Found) -> tuple[int, ...]:
    """The shape that the data-parallel ranks cut: of this rank's part of a DTensor, or of the whole plain tensor."""
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
    """A shard of `dim`, cut after the axes to its `right`, of these `sizes`, made their pieces."""
    pieces = math.prod(size for placement, size in zip(right, sizes, strict=True) if cut_dim(placement) == dim)
    return Shard(dim) if pieces == 1 else strided_shard(dim, pieces)


def check_own_mesh(found: Found, mesh: DeviceMesh, full: FullMesh | None) -> None:
    """Refuse a parameter whose own mesh and placements do not fit the data-parallel `mesh`; torch's exception types."""
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
    if root_mesh(mesh) != root_mesh(own.mesh) or shared:
        found_instead = f"the axes {sorted(shared)} in both" if shared else "meshes of different origin"
        raise RuntimeError(
            f"{found.name}: expected the data-parallel mesh {mesh} and the mesh of this DTensor {own.mesh} to be "
            f"different axes of one mesh, found {found_instead}; make one mesh with init_device_mesh and slice it "
            f"by axis names"
        )


def _check_on_full_mesh(found: Found, own: Spec | None, full: FullMesh) -> None:
    if own is None:
        raise ValueError(
            f"{found.name}: expected a DTensor on the full mesh, because dp_mesh_dims is given, found a plain tensor; "
            f"make it one (torch.distributed.tensor.distribute_tensor with Replicate() on the data-parallel axes), or "
            f"pass the data-parallel axes as mesh and no dp_mesh_dims"
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
                f"{own.placements[axis]}; fully_shard cuts it there itself"
            )


def _check_placements(found: Found, own: Spec) -> None:
    for placement in own.placements:
        if placement.is_partial():
            raise ValueError(
                f"{found.name}: expected a parameter that is sharded or replicated, found {own.placements}: summands "
                f"that were not added yet; redistribute it to Replicate() or Shard(dim) first"
            )


def local_part(full: Tensor, like: DTensor) -> Tensor:
    """What this rank holds of the plain tensor `full` when it is sharded as `like`: dtype of `full`, no communication.

    It may be a view of `full`, which every rank is expected to have, with equal values.
    """
    mesh = like.device_mesh
    whole = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=like.placements).to_local()
