"""Messages in memory that the process group allocates: NCCL registers it, and moves it without copies of its own.

The two objects have the shape of a caller's own all-gather and reduce-scatter (custom.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch_compat import allocate_for
from .group import SUM, ShardGroup, Work


class _GroupMemory:
    def __init__(self, group: ShardGroup) -> None:
        self.group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return allocate_for(self.group.process_group, math.prod(size), dtype, device).view(*size)


class GroupMemoryGather(_GroupMemory):
    """One all-gather."""

    def __call__(
        self, *, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> Work:
        return ShardGroup(group, output_tensor.device).gather_into(output_tensor, input_tensor)


class GroupMemoryScatter(_GroupMemory):
    """One reduce-scatter."""

    def __call__(
        self,
        *,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool,
        op: dist.ReduceOp.RedOpType = SUM,
    ) -> Work:
        return ShardGroup(group, output_tensor.device).reduce_scatter(output_tensor, input_tensor, op)
