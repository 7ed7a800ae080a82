"""Chooses the channels that carry a unit's param groups, by the user's settings and the device of the shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    Landing,
    Links,
    OffloadedGather,
    PlannedGather,
    ReduceChannel,
    ShardGroup,
    direct_of,
    reduce_channel,
)
from ..layout import FlatLayout, GatherPlan
from ..param import ExtensionGroup, OwnedMemory, ParamGroup, SecondaryGroup
from ..policy import Controls

# ---- secondary shards ------------------------------------------------------------------------------------------------
# What groups keep between forward and backward with an integer `reshard_after_forward` (hpZ).
#
# A group without a block (its ranks are the k ranks) is freed completely and gathered from all ranks.


class SecondaryShards:
    """`groups[i]` keeps `parts[i]`, and `gathers[i]` gathers it from there; from all ranks if the part is None.
    `gather_part`: makes the channel of a part."""

    def __init__(
        self,
        groups: Sequence[ParamGroup] = (),
        links: Sequence[Links] = (),
        gathers: Sequence[GatherChannel] = (),
        gather_part: Callable[[ParamGroup, SecondaryGroup, Block], GatherChannel] | None = None,
    ) -> None:
        self._groups = groups
        self.parts: list[SecondaryGroup | None] = []
        self.gathers: list[GatherChannel] = []
        for group, link, gather in zip(groups, links, gathers, strict=True):
            part = None
            if link.block is not None:
                assert gather_part is not None
                part = SecondaryGroup(group, link.block.mesh)
                gather = gather_part(group, part, link.block)
            self.parts.append(part)
            self.gathers.append(gather)
        self.kept = [part for part in self.parts if part is not None]

    @property
    def live_nbytes(self) -> int:
        """Bytes of the parts currently in memory."""
        return sum(part.memory.live_nbytes for part in self.kept)

    def keep(self) -> None:
        """Keep this rank's part of the full parameters and free the rest."""
        for group, part in zip(self._groups, self.parts, strict=True):
            if part is None:
                group.swap.show_shards()
            else:
                part.keep()
                part.show()
            group.memory.release()

    def release(self) -> None:
        """Free the parts: they were gathered, or are not needed."""
        for part in self.kept:
            part.release()

    def show_shards(self) -> None:
        """Replace the kept parts on the modules by the sharded parameters."""
        for part in self.kept:
            part.show_shards()

    def is_whole(self) -> bool:
        """Whether users hold our memory (`ParamGroup.look`), and kept parts or shards are on the modules."""
        pairs = zip(self._groups, self.parts, strict=True)
        return all(group.look()[0] if part is None else part.is_whole() for group, part in pairs)


# ---- channels of a unit ----------------------------------------------------------------------------------------------

# Cached reduce channels per group, one per set of trainable parameters: a program may choose another set in each step.
_REDUCE_CHANNELS = 8


class UnitChannels:
    """The channels of one unit. `groups`: the unit's own list."""

    def __init__(
        self, groups: Sequence[ParamGroup], device: torch.device, host_link: HostLink | None, strategy: str
    ) -> None:
        self._groups, self._device, self._host_link = groups, device, host_link
        # The communication strategy, by the options and the unit's controls: resolved here alone (`Unit.resolve`, and
        # once its root formed `Root._locate`).
        self.strategy = strategy
        self._pool: BufferPool | None = None
        self._controls = Controls()
        self._links: Sequence[Links] = ()
        self.gathers: list[GatherChannel] = []
        # The parts that are kept between forward and backward.
        self.secondary = SecondaryShards()
        # Channels of the current or last gather.
        self.arriving: list[GatherChannel] = []
        # The channels of each group, by the positions that are trainable.
        self.reduces: list[dict[tuple[int, ...], ReduceChannel]] = []
        # Version of the channels; anything derived from them is valid while it stays the same.
        self.times_made = 0

    @property
    def are_used(self) -> bool:
        """Whether channels exist, because a root formed."""
        return self._pool is not None

    @property
    def arrive_from_secondary(self) -> bool:
        """Whether the last all-gather was from secondary shards."""
        return self.arriving is self.secondary.gathers

    @property
    def _used_pool(self) -> BufferPool:
        assert self._pool is not None
        return self._pool

    def use(self, pool: BufferPool) -> None:
        """Take buffers from `pool`."""
        self._pool = pool

    def make(self, links: Sequence[Links], controls: Controls) -> None:
        """Make all channels anew. `links`: one per group, under the strategy."""
        self._controls, self._links = controls, links
        with torch.inference_mode(False):
            self.gathers = [self._gather(group, link) for group, link in zip(self._groups, links, strict=True)]
            self.secondary = SecondaryShards(self._groups, links, self.gathers, self._gather_secondary)
        self.times_made += 1
        self.arriving = self.gathers
        self.reduces = [{} for _ in self._groups]

    def reduce(self, position: int) -> ReduceChannel:
        """The channel for the currently trainable parameters of group `position`."""
        group = self._groups[position]
        known = self.reduces[position]
        channel = known.get(group.trainable)
        if channel is None:
            if len(known) >= _REDUCE_CHANNELS:
                del known[next(iter(known))]
            channel = known[group.trainable] = self._reduce(group, self._links[position])
        return channel

    # ---- one group -----------------------------------------------------------------------------------------

    def _gather(self, group: ParamGroup, links: Links) -> GatherChannel:
        """The all-gather from the shards of `group` to its full parameters."""
        if isinstance(group, ExtensionGroup):
            return ExtensionGather(links.shard, group)
        if group.shares_memory:
            return GatherChannel()
        if self._host_link is None:
            return self._from(group.flat, group, group.pack, links.shard)
        shard = OwnedMemory(group.flat.numel(), group.flat.dtype, self._device)
        inner = self._from(shard.flat, group, group.pack, links.shard)
        shard.release()
        return OffloadedGather(inner, group.flat, shard, self._host_link)

    def _gather_secondary(self, group: ParamGroup, part: SecondaryGroup, block: Block) -> GatherChannel:
        """The all-gather from the secondary shards of `group`, over the ranks of `block`, to its full parameters."""
        part.memory.allocate()
        channel = self._from(part.memory.flat, group, part.pack, block.group)
        part.memory.release()
        return channel

    def _from(self, flat: Tensor, group: ParamGroup, pack: FlatLayout, shard: ShardGroup) -> PlannedGather | CastGather:
        if shard.world == 1:
            return CastGather(flat, group.memory)
        plan, pool, custom = group.plan, self._used_pool, self._controls.gather
        one_message = custom is not None or self.strategy == "torch"
        if custom is not None:
            shard, pool = CustomGroup(shard, custom), CustomBuffers(custom)
        if one_message and (custom is not None or len(plan.direct) + bool(plan.packed) > 1):
            plan = GatherPlan(direct=(), packed=pack.order)
        return PlannedGather(shard, pack, plan, flat, group.memory, pool)

    def _reduce(self, group: ParamGroup, links: Links) -> ReduceChannel:
        """The reduction from the gradients of the currently trainable parameters of `group` to their shards."""
        segments = [group.pack.segments[i] for i in group.trainable]
        layouts, names = [s.layout for s in segments], [s.name for s in segments]
        precision = group.precision
        gathered = {place for place, i in enumerate(group.trainable) if i in group.plan.direct}
        direct = direct_of(links, self.strategy, layouts, gathered, precision.wire.itemsize)
        pack = FlatLayout.build(layouts, group.pack.align_numel, names=names, first=direct)
        channel = reduce_channel(
            links,
            pack,
            direct,
            Dtypes(precision.wire, precision.reduce, precision.sum, precision.gradient),
            self._used_pool,
            strategy=self.strategy,
            controls=self._controls,
        )
        if self._host_link is not None:
            channel.land = Landing(self._host_link)
        return channel
