"""Chooses the channels that carry a unit's param groups, by the user's settings and the device of the shards.

Counts the unit's gradients, too: arrived and missing in the running backward, and held from earlier ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._torch import current_backward
from .._torch.modules import outside_graphs
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
from ..param import ExtensionGroup, OwnedMemory, ParamGroup, SecondaryGroup, ShardedParam
from ..policy import Controls
from ..schedule import UnitRecord

# ---- secondary shards ------------------------------------------------------------------------------------------------
# What groups keep between forward and backward with an integer `reshard_after_forward` (hpZ).
#
# A group without a block (its ranks are the k ranks) is freed completely and gathered from all ranks.


class SecondaryShards:
    """`groups[i]` keeps `parts[i]`, and `gathers[i]` gathers it from there; from all ranks if the part is None.
    `gather_part`: makes the channel of a part."""

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        links: Sequence[Links],
        gathers: Sequence[GatherChannel],
        gather_part: Callable[[ParamGroup, SecondaryGroup, Block], GatherChannel],
    ) -> None:
        self._groups = groups
        self.parts: list[SecondaryGroup | None] = []
        self.gathers: list[GatherChannel] = []
        for group, link, gather in zip(groups, links, gathers, strict=True):
            part = None
            if link.block is not None:
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
        # The parts that are kept between forward and backward; None if no group keeps any.
        self.secondary: SecondaryShards | None = None
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
        return self.secondary is not None and self.arriving is self.secondary.gathers

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
            self.secondary = None
            if any(link.block is not None for link in links):
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


# ---- gradients -------------------------------------------------------------------------------------------------------


class Stepper(Protocol):
    """An optimizer-in-backward (extras/step_in_backward.py). `backward` identifies one running backward."""

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer holds `parameter`."""
        ...

    def stepped_any(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether any of `parameters` was stepped since the user's last `optimizer.step()`."""
        ...

    def begin(self, backward: object, unit_name: str) -> None:
        """A step of a unit's parameters begins in the running backward."""
        ...

    def step(self, params: Sequence[ShardedParam]) -> None:
        """Step these parameters and free their gradients."""
        ...

    def end(self, backward: object) -> None:
        """The backward succeeded."""
        ...

    def refuse_half_a_step(self) -> None:
        """Raise `RuntimeError` if a backward failed after it stepped some of the parameters."""
        ...


# Of a unit's gradients and a parameter, its name and its bit, and the full parameter. Hooks hold the first two weakly:
# the garbage collector cannot see that a tensor holds its hooks, so a strong reference would be a cycle that leaks the
# model.
AccumulationHook = Callable[["weakref.ref[UnitGradients]", "weakref.ref[ShardedParam]", str, int, Tensor], None]


class UnitGradients:
    """One bit for each trainable parameter of a unit. `groups`: the unit's own list."""

    def __init__(self, groups: Sequence[ParamGroup], record: UnitRecord) -> None:
        self._groups, self._record = groups, record
        # Bits of the running backward: arrived, and all.
        self.arrived = 0
        self.expected = 0
        # (graph task id, bits that it brought): one run of the autograd engine brings each gradient once.
        self.came = (-1, 0)
        # Called with a parameter and its bit whenever its gradient arrives.
        self.on_arrival: Callable[[ShardedParam, int], None] | None = None
        # The hook of a full parameter, which calls `on_arrival` (hooks.py).
        self.on_accumulated: AccumulationHook | None = None
        # The optimizer-in-backward, if any.
        self.stepper: Stepper | None = None
        # A backward left unreduced gradients, on every rank: the next message is in the reduce dtype.
        self.window_open = False
        # A backward left partial sums, which the next all-reduced message carries.
        self.partial_open = False
        # Whether the hooks match the currently trainable parameters.
        self.is_known = False
        self._hooks: list[RemovableHandle] = []
        self._withdrawing: list[RemovableHandle] = []
        # Arrived bits -> bytes of the largest missing gradient.
        self._largest_missing: dict[int, int] = {}

    @property
    def windows(self) -> tuple[bool, bool]:
        """Whether an accumulation window of unreduced gradients, and one of partial sums, is open. Settable."""
        return self.window_open, self.partial_open

    @windows.setter
    def windows(self, windows: tuple[bool, bool]) -> None:
        self.window_open, self.partial_open = windows

    def learn(self) -> None:
        """Hook the trainable full parameters, which are on the modules now."""
        self.forget()
        bit, frozen = 0, False
        for group in self._groups:
            group.trainable = tuple(i for i, p in enumerate(group.params) if p.full.requires_grad)
            frozen = frozen or len(group.trainable) < len(group.params)
            for i in group.trainable:
                param = group.params[i]
                assert self.on_accumulated is not None
                hook = partial(self.on_accumulated, weakref.ref(self), weakref.ref(param), param.name, 1 << bit)
                self._hooks.append(param.full.register_post_accumulate_grad_hook(hook))
                bit += 1
        self.expected = (1 << bit) - 1
        self._largest_missing.clear()
        self._record.plan.frees_late = frozen
        self._record.plan.trainable = bit > 0
        self.is_known = True

    def forget(self) -> None:
        """Remove the hooks: parameters were replaced, so `learn` must be called again."""
        for handle in (*self._hooks, *self._withdrawing):
            handle.remove()
        for group in self._groups if self._withdrawing else ():
            for param in group.params:
                param.gradients.withdraw()
                param.gradients.shows_held = False
        self._hooks.clear()
        self._withdrawing.clear()
        self.is_known = False

    def show_held(self) -> None:
        """Show gradients that this backward held on the full parameters, here and after the following ones."""
        if not self._withdrawing:
            for group in self._groups:
                for param in (group.params[i] for i in group.trainable):
                    self._withdrawing.append(_withdrawing_hook(param))
                    param.gradients.shows_held = True
                    param.gradients.hold(param.gradients.held)

    def all_came(self) -> bool:
        """Whether the running backward brought every gradient of the unit: it reads no trainable weight any more."""
        return self.came == (current_backward(), self.expected)

    def largest_missing_nbytes(self) -> int:
        """Bytes of the largest gradient that the running backward may still bring."""
        known = self._largest_missing.get(self.arrived)
        if known is None:
            trained = [group.params[i].full for group in self._groups for i in group.trainable]
            missing = [full.nbytes for bit, full in enumerate(trained) if not self.arrived >> bit & 1]
            known = self._largest_missing[self.arrived] = max(missing, default=0)
        return known

    def take_assigned(self) -> None:
        """Take gradients that were assigned to full parameters directly, which no hook reports."""
        for group in self._groups if self.is_known else ():
            for param in (group.params[i] for i in group.trainable):
                if param.full.grad is not None:
                    param.gradients.take_fresh()
                    self.arrived |= param.gradients.fresh is not None


def _withdrawing_hook(param: ShardedParam) -> RemovableHandle:
    """Take the held gradient off the full parameter of `param` just before autograd would add to it in place."""
    handle: RemovableHandle = param.full.register_hook(partial(_outside_graphs(_arrives), weakref.ref(param)))
    return handle


def _arrives(itself: weakref.ref[ShardedParam], _gradient: Tensor) -> None:
    reached = itself()
    if reached is not None and reached.gradients.shown is not None:
        reached.gradients.live_held()  # what the user did with it counts
        reached.gradients.withdraw()


# Not at import: it imports torch's compiler. Not for each parameter: it takes tens of microseconds.
_outside_graphs = cache(outside_graphs)
