"""What one group keeps between forward and backward where `reshard_after_forward` is an integer k.

    memory   (padded_local_numel,) compute dtype   this rank's part of each full parameter, cut over k ranks
    params   DTensors of them, (Replicate(), Shard(dim)) on the mesh of blocks: on the modules while they are kept

The memory is there from `keep` to `release`. Knows tensors; no phases, no collectives.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from .._torch_compat import sharded_parameter
from ..layout import contiguous_stride, narrow_pack
from .group import ParamGroup
from .memory import OwnedMemory


class NarrowedGroup:
    """The kept parts of `group`, whose tensors it shares; made again when those are. `mesh`: (blocks, k)."""

    def __init__(self, group: ParamGroup, mesh: DeviceMesh) -> None:
        rank = mesh.get_local_rank(1)
        self._group = group
        self.pack = pack = narrow_pack(group.pack, group.plan, mesh.size(1))
        full = group.memory
        # Views can be made only of memory that exists.
        in_use = full.live_nbytes > 0
        full.allocate()
        self.memory = OwnedMemory(pack.padded_local_numel, full.flat.dtype, full.flat.device)
        self._sources, self._parts, self.params = [], [], []
        for param, segment, offset in zip(group.params, pack.segments, pack.full_offsets, strict=True):
            layout = segment.layout
            shape = layout.local_shape(rank)
            stride = contiguous_stride(shape)
            full_stride = contiguous_stride(layout.shape)
            start = offset + layout.start(rank) * full_stride[layout.dim]
            self._sources.append(full.flat.as_strided(shape, full_stride, start))
            part = self.memory.flat.as_strided(shape, stride, segment.offset)
            self._parts.append(part)
            param.kept = sharded_parameter(
                part,
                mesh=mesh,
                placements=(Replicate(), Shard(layout.dim)),
                shape=param.spec.shape,
                stride=param.spec.stride,
                requires_grad=param.sharded.requires_grad,
            )
            self.params.append(param.kept)
        if not in_use:
            full.release()
        self.memory.release()
        self._slot_params = group.swap.spread(self.params)
        self._slot_shards = group.swap.spread([param.sharded for param in group.params])

    def keep(self) -> None:
        """Copy this rank's part out of the full parameters, which must be there."""
        self.memory.allocate()
        torch._foreach_copy_(self._parts, self._sources)

    def release(self) -> None:
        """Give the kept parts up."""
        self.memory.release()

    def show(self) -> None:
        """Put the kept parts on the modules."""
        for kept, param in zip(self.params, self._group.params, strict=True):
            if kept.requires_grad != param.sharded.requires_grad:
                kept.requires_grad_(param.sharded.requires_grad)
        self._group.swap.put(self._slot_params)

    def show_shards(self) -> None:
        """Put the sharded parameters back where the kept parts stand."""
        self._group.swap.replace(self._slot_params, self._slot_shards)

    def is_aliased(self) -> bool:
        """As `ParamGroup.is_aliased`, while kept parts or shards stand on the modules."""
        return self._group.is_aliased(standing=self._slot_params) or self._group.is_aliased()
