"""A sharded parameter: where it is across the ranks, its owner and its tensors. Its gradients are in gradients.py."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .._torch import can_be_one_mesh, concatenated_mesh, cut_dim, local_of, strided_shard
from ..layout import ShardLayout, contiguous_stride
from ..policy import Offload, Precision
from .gradients import ParamGradients
from .pending import PendingGrad
from .swap import Found, Slot

# ---- placement -------------------------------------------------------------------------------------------------------
# Where parameters are across the ranks: the one place that decides DTensor meshes and placements.
#
# parameter                     mesh axes                placements, sharded on dim d
# plain                         shard                    (Shard(d),)
# plain                         replicate, shard         (Replicate(), Shard(d))
# plain                         replicate                (Replicate(),), not sharded
# DTensor on a tensor-parallel  the above, then tp       (..., Shard(d), *tp), or where tp shards dim d as well
# mesh                                                   (..., _StridedShard(d), *tp)
# DTensor on a full mesh        that mesh                its own, with the above on the sharding axis
# (`dp_mesh_dims`)
#
# The data-parallel ranks shard a DTensor's local tensor: its own mesh splits a dim first, then the sharding axis splits
# each of these pieces. DTensor reads placements from left to right. So where both split the same dim, the left one is a
# `_StridedShard(d, split_factor)`: it was split after `split_factor` pieces were made.
#
# In compute a parameter is what it was before sharding: plain, or a DTensor on its own mesh.

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
    def note(cls, parameter: Tensor, own: DeviceMesh, unit: DeviceMesh) -> None:
        """Remember `unit` on the sharded `parameter`, which is on the mesh `own`."""
        if set(own.mesh.flatten().tolist()) < set(unit.mesh.flatten().tolist()):
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


# ---- owner -----------------------------------------------------------------------------------------------------------
# Whose a sharded parameter is.
#
# Sharded parameters are plain DTensors (ADR 0016), so no class of theirs says which unit they belong to. Their storage
# does: a DTensor has one of its own, without memory, which its views and `p.detach()` share, and so do the values of a
# state dict. Copies and pickles have another one, and no owner.


class Owner:
    """The unit of one parameter. `ranks`: those of its mesh, as ranks in the default group. `name`: the parameter's, as
    the user's model spells it, once the root formed."""

    # The attribute of the storage.
    ATTRIBUTE = "_fullshard_owner"

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name, self.ranks = name, ranks

    @staticmethod
    def of(tensor: Tensor) -> Owner | None:
        """The owner of the sharded parameter that `tensor` is, or is a view of."""
        found = getattr(tensor.untyped_storage(), Owner.ATTRIBUTE, None) if isinstance(tensor, DTensor) else None
        return found if isinstance(found, Owner) else None


def claim(parameter: Tensor, owner: Owner | None) -> None:
    """`owner`, if there is one, owns the DTensor `parameter` from now on."""
    if owner is not None:
        setattr(parameter.untyped_storage(), Owner.ATTRIBUTE, owner)


# ---- sharded ---------------------------------------------------------------------------------------------------------
# The tensors of one parameter.
#
#     sharded   the DTensor parameter that users and optimizers hold; registered on the module outside of compute
#     local     its local tensor: this rank's rows, a view of the group's flat buffer
#     full      the parameter on the module in forward and backward: what it was before it was sharded, plain or a
#               DTensor on its own mesh; memory of `param.memory`


class Initial(NamedTuple):
    """Digests of a parameter's initial value (initial.py): 0-dim tensors on the parameter's device, so that
    `fully_shard` synchronises with no device."""

    # The digests of the full parameter (of a DTensor, this rank's part), and of the shard taken from it.
    full: Tensor
    shard: Tensor
    # The shard's tensor, and its version counts.
    local: weakref.ref[Tensor]
    versions: tuple[int, int]
    # How often the original parameter was written before it was sharded; -1 for a value that was loaded afterwards.
    writes: int


# Of a tensor that says itself how it is gathered (extension.py).
GATHER_METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def has_extension(tensor: Tensor, name: str) -> bool:
    """Whether `tensor`, or a DTensor's local tensor, has both methods. `AssertionError` if it has only one."""
    inner = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    have = [method for method in GATHER_METHODS if callable(getattr(inner, method, None))]
    if len(have) == 1:
        raise AssertionError(
            f"{name}: expected both of {' and '.join(GATHER_METHODS)} on {type(inner).__name__}, found only {have[0]}; "
            f"define the other one too"
        )
    return bool(have)


def check_extension(tensor: Tensor, name: str) -> None:
    """Raise for a parameter that is not sharded yet: `AssertionError` for one method without the other, `ValueError`
    for methods of this tensor object, which its shards will not have."""
    own = {**tensor.__dict__, **(local_of(tensor).__dict__ if isinstance(tensor, DTensor) else {})}
    for method in GATHER_METHODS:
        if method in own:
            raise ValueError(
                f"{name}: expected {method} of the class of its tensor, found it set on this one tensor, and its "
                f"shards are others; set both methods on {name}._local_tensor after fully_shard, before the first "
                f"forward, or make the parameter of a subclass of torch.Tensor that has them"
            )
    has_extension(tensor, name)


def class_of(parameter: Tensor) -> type[nn.Parameter]:
    """The class that a full parameter made of `parameter` has: its own, if that only adds attributes and methods to
    memory (bitsandbytes' `Params4bit`), else `nn.Parameter`."""
    kind = type(parameter)
    if issubclass(kind, nn.Parameter) and kind.__torch_dispatch__ is nn.Parameter.__torch_dispatch__:
        return kind
    return nn.Parameter


def holds_bits(parameter: Tensor) -> bool:
    """Whether the floating dtype of `parameter` only names the size of its elements, as with bitsandbytes'
    `bnb_4bit_quant_storage`: a cast would destroy the packed values."""
    marks = parameter.__dict__
    return "quant_storage" in marks and marks.get("quant_state") is not None


def local_data(tensor: Tensor) -> Tensor:
    """The tensor itself, or this rank's part of a DTensor."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def full_of(param: ShardedParam, view: Tensor, marks: dict[str, Any]) -> nn.Parameter:
    """The full parameter on the memory of `view`, with the attributes `marks`: the dict itself. A tensor extension
    keeps its own."""
    full = nn.Parameter(view, requires_grad=param.sharded.requires_grad)
    if type(view) is Tensor:
        # The constructor of a class of the user's is not called again: it may quantise, or want arguments.
        full.__class__, full.__dict__ = param.kind, marks
    return full


class ShardedParam:
    """Holds the tensors of the table above. `ParamGroup` makes them, and makes them again; `name` is relative to the
    unit."""

    __slots__ = (
        "__weakref__",
        "full",
        "gradients",
        "initial",
        "kept",
        "kind",
        "layout",
        "local",
        "marks",
        "name",
        "own_spec",
        "owner",
        "precision",
        "sharded",
        "slots",
        "spec",
    )

    def __init__(
        self,
        name: str,
        slots: tuple[Slot, ...],
        layout: ShardLayout,
        spec: Spec,
        own_spec: Spec | None = None,
        kind: type[nn.Parameter] = nn.Parameter,
    ) -> None:
        self.name = name
        self.slots = slots
        # How the ranks of the shard axis split it; the shape is that of `full`, or of its local tensor.
        self.layout = layout
        # The DTensor spec of `sharded`.
        self.spec = spec
        # The DTensor spec of `full`, if it is a DTensor.
        self.own_spec = own_spec
        # The class of `full`, unless it is a DTensor.
        self.kind = kind
        # The dtypes of the group.
        self.precision: Precision
        self.sharded: nn.Parameter
        self.local: Tensor
        self.full: nn.Parameter
        # The unit that owns `sharded`; set by the runtime.
        self.owner: Owner | None = None
        # The parameter on the module while a part is kept after forward (SecondaryGroup).
        self.kept: nn.Parameter | None = None
        # Digests of its value before sharding, until ranks have compared them.
        self.initial: Initial | None = None
        self.gradients = ParamGradients(self)
        # Attributes that users set on `sharded`: the dict itself, because torch's conversions take it from the object.
        self.marks: dict[str, Any] = {}


# ---- kept ------------------------------------------------------------------------------------------------------------
# A snapshot of the gradients of a parameter, so that later changes can be undone.


class KeptTensor:
    """A tensor and a copy of its contents; no copy for None and for tensors without data."""

    __slots__ = ("_copy", "_local", "tensor")

    def __init__(self, tensor: Tensor | None) -> None:
        self.tensor = tensor
        self._local: Tensor | None = None
        self._copy: Tensor | None = None
        if tensor is not None and not isinstance(tensor, PendingGrad) and not tensor.is_meta:
            self._local = local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()
            self._copy = self._local.clone()

    def restore(self) -> Tensor | None:
        """The same tensor, with the same values in it."""
        if self._local is not None and self._copy is not None:
            with torch.no_grad():
                self._local.copy_(self._copy)
        return self.tensor


class KeptGradients:
    """`.grad` of one parameter, with the gradients held beside it. Takes memory only for those that exist:
    none after `zero_grad()`."""

    __slots__ = ("_grad", "_held", "_marker", "_param", "_partial")

    def __init__(self, param: ShardedParam) -> None:
        self._param = param
        self._held = KeptTensor(param.gradients.live_held())
        self._partial = KeptTensor(param.gradients.live_partial())
        self._marker = param.gradients.marker
        self._grad = KeptTensor(param.sharded.grad)

    def restore(self) -> None:
        """Call it outside of a backward, with no gradients in flight."""
        gradients = self._param.gradients
        gradients.hold(self._held.restore())
        gradients.partial = self._partial.restore()
        gradients.marker = self._marker
        self._param.sharded.grad = self._grad.restore()
