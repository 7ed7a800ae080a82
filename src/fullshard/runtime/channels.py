"""Which channels carry a unit's parameter groups: decided here, from what the user set and where the shards live."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import (
    Block,
    BufferPool,
    CastGather,
    CustomBuffers,
    CustomGroup,
    Dtypes,
    ExtensionGather,
    GatherChannel,
    HostLink,
    Links,
    OffloadedGather,
    OffloadedReduce,
    PlannedGather,
    ReduceChannel,
    ShardGroup,
    SharedGather,
    reduce_channel,
)
from ..layout import GatherPlan, Pack, direct_gradients, sends_directly
from ..param import ExtensionGroup, NarrowedGroup, OwnedMemory, ParamGroup
from ..policy import Controls


class Channels(NamedTuple):
    """Makes channels whose buffers come from `pool`, for a unit that computes on `device`. `communication` is the
    strategy's name; `host_link` is None unless the shards live on the host."""

    pool: BufferPool
    communication: str
    controls: Controls
    device: torch.device
    host_link: HostLink | None

    def gather(self, group: ParamGroup, links: Links) -> GatherChannel:
        """From the shards of `group` to its full parameters."""
        if isinstance(group, ExtensionGroup):
            return ExtensionGather(links.shard, group)
        if group.shares_memory:
            return SharedGather()
        if self.host_link is None:
            return self._from(group.flat, group, group.pack, links.shard)
        shard = OwnedMemory(group.flat.numel(), group.flat.dtype, self.device)
        inner = self._from(shard.flat, group, group.pack, links.shard)
        shard.release()
        return OffloadedGather(inner, group.flat, shard, self.host_link)

    def widen(self, group: ParamGroup, part: NarrowedGroup, block: Block) -> GatherChannel:
        """From what the ranks of `block` keep of `group` to its full parameters."""
        part.memory.allocate()
        channel = self._from(part.memory.flat, group, part.pack, block.group)
        part.memory.release()
        return channel

    def _from(self, flat: Tensor, group: ParamGroup, pack: Pack, shard: ShardGroup) -> PlannedGather | CastGather:
        if shard.world == 1:
            return CastGather(flat, group.memory)
        plan, pool, custom = group.plan, self.pool, self.controls.gather
        one_message = custom is not None or self.controls.strategy(self.communication) == "torch"
        if custom is not None:
            shard, pool = CustomGroup(shard, custom), CustomBuffers(custom)
        if one_message and (custom is not None or len(plan.direct) + bool(plan.packed) > 1):
            plan = GatherPlan(direct=(), packed=pack.order)
        return PlannedGather(shard, pack, plan, flat, group.memory, pool)

    def reduce(self, group: ParamGroup, links: Links) -> ReduceChannel:
        """From gradients of the parameters of `group` that are trainable now to those of the shards."""
        segments = [group.pack.segments[i] for i in group.trainable]
        layouts, names = [s.layout for s in segments], [s.name for s in segments]
        precision, backend = group.precision, links.reducing.backend
        if sends_directly(backend):
            # Those that are gathered straight into place leave straight from where their gradients are.
            direct = tuple(place for place, i in enumerate(group.trainable) if i in group.plan.direct)
        else:
            direct = direct_gradients(layouts, precision.wire.itemsize, backend=backend)
        pack = Pack.build(layouts, group.pack.align_numel, names=names, first=direct)
        channel = reduce_channel(
            links,
            pack,
            direct,
            Dtypes(precision.wire, precision.reduce, precision.sum, precision.storage),
            self.pool,
            communication=self.communication,
            controls=self.controls,
        )
        return channel if self.host_link is None else OffloadedReduce(channel, self.host_link)
