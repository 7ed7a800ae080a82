"""Small messages over all axes of a mesh, by which ranks come to one answer. Finished on return."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .group import all_reduce_over


def sum_over(mesh: DeviceMesh, counts: Tensor) -> Tensor:
    """The sum of `counts` (any shape, integers) over all ranks of `mesh`, on the device of the mesh. No message over an
    axis of one rank."""
    return _reduce_over(mesh, counts, dist.ReduceOp.SUM)


def agreed(value: int, mesh: DeviceMesh) -> bool:
    """Whether `value` (below 2**63) is the same on all ranks of `mesh`."""
    # The least value, and minus the greatest.
    low, high = _reduce_over(mesh, torch.tensor([value, -value]), dist.ReduceOp.MIN).tolist()
    return bool(low == -high)


def _reduce_over(mesh: DeviceMesh, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    values = values.to(mesh.device_type)
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            all_reduce_over(values, mesh.get_group(axis), op)
    return values
