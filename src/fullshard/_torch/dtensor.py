"""DTensors, placements, and meshes of several axes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

# What DTensor's operators say of a plain tensor beside a DTensor.
MIXED = "got mixed torch.Tensor and DTensor"


def sharded_parameter(
    local: Tensor,
    *,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> nn.Parameter:
    """A DTensor parameter whose local tensor *is* `local` (not a copy or a detached alias)."""
    # Not by from_local: that moves a local tensor on the host to the device of the mesh.
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, local.dtype))
    parameter = nn.Parameter(DTensor.__new__(DTensor, local, spec, requires_grad=False), requires_grad=requires_grad)
    set_local(parameter, local)
    return parameter


def local_of(parameter: Tensor) -> Tensor:
    """The local tensor of a DTensor as it is held, without a view or autograd in between."""
    return parameter._local_tensor  # type: ignore[attr-defined,no-any-return]  # no cast: called often


def same_spec(a: Tensor, b: Tensor) -> bool:
    """Whether two DTensors share the object that says how they are placed, as those of `dtensor_like` do."""
    return a._spec is b._spec  # type: ignore[attr-defined]


def all_hold(parameters: Sequence[Tensor], locals_: Sequence[Tensor]) -> bool:
    """Whether each DTensor still holds the local tensor of the same position, the same object; no Python per item."""
    return all(map(operator.is_, map(_get_local, parameters), locals_))


_get_local = operator.attrgetter("_local_tensor")


def set_local(parameter: Tensor, local: Tensor) -> None:
    """Let a DTensor hold `local`, which must have the same shape and dtype."""
    cast(Any, parameter)._local_tensor = local


def take_spec(parameter: Tensor, other: Tensor) -> None:
    """Let the DTensor `parameter` say of itself what `other` does."""
    cast(Any, parameter)._spec = cast(Any, other)._spec


def dtensor_like(parameter: Tensor, local: Tensor) -> DTensor:
    """A DTensor with the spec of `parameter` and another local tensor: no checks, no communication, no copy."""
    # Not through the class: its initialiser does nothing, at the price of a compiler wrapper on every call.
    return DTensor.__new__(DTensor, local, cast(Any, parameter)._spec, requires_grad=False)


def settled(tensor: Tensor) -> Tensor:
    """`tensor`, or what it stands for when it is the result of an asynchronous functional collective; waits for it."""
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else cast(Tensor, wait())


def dtensor_without_data(cls: type[DTensor], like: Tensor) -> DTensor:
    """An instance of the DTensor subclass `cls` with the spec of `like` and a local tensor nobody is to read."""
    local = torch.zeros((), dtype=like.dtype, device=like.device).expand(local_of(like).shape)
    made: DTensor = torch.Tensor._dtensor__new__(cls, local, cast(Any, like)._spec, requires_grad=False)
    return made


def concatenated_mesh(parts: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of `parts` behind each other; they must be different axes of one root mesh."""
    return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(list(parts))


def flattened_axes(mesh: DeviceMesh) -> DeviceMesh:
    """One axis that has all ranks of `mesh` in order. Its process group is made once for each root mesh."""
    return mesh if mesh.ndim == 1 else mesh._flatten()


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` was sliced from, or itself."""
    return mesh._get_root_mesh()


def strided_shard(dim: int, pieces: int) -> Placement:
    """A shard of `dim` by an axis that cuts each of the `pieces` which axes to its right made of that dim."""
    return _StridedShard(dim, split_factor=pieces)


def cut_dim(placement: Placement) -> int | None:
    """The dim that `placement` shards, however; None when it does not."""
    return int(placement.dim) if isinstance(placement, (Shard, _StridedShard)) else None


def is_view_of_its_input(operation: Any) -> bool:
    """Whether what the ATen `operation` returns is its first argument's memory, as a tensor of its own (`t`, `view`,
    `detach`), and is not written."""
    returned = operation._schema.returns
    info = returned[0].alias_info if len(returned) == 1 else None
    return info is not None and not info.is_write
