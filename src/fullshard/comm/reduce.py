"""From every rank's full gradients to this rank's gradient shards: the mean over ranks.

    strategy           messages                     sum                                      when
    LocalReduce        none                         none                                     one rank in all
    FlatReduce         none                         none                                     one rank shares, others
                                                                                             replicate
    ExchangeReduce     all-to-all of what was        here, in rank order, in the sum dtype:   otherwise
                       computed (wire dtype)        bitwise the same whatever arrives first
    DirectReduce       the same, large gradients    here, in one operation for each          the same, on backends
    (direct.py)        from where they are           message, in the sum dtype: likewise      that group messages
    PairReduce         large gradients from where   here, in rank order: bitwise what        the same, on gloo, from
                       they are, rank to rank       `ExchangeReduce` makes                   a size on
    HierarchicalReduce all-to-all within a node     here, in rank order within nodes, then    several nodes, or
    (hierarchical.py)  (wire dtype), then of its    in the order of nodes                     `"hierarchical"`
                       sums between nodes
    NativeReduce       one reduce-scatter in the    by the backend                           `communication="torch"`
                       reduce dtype

What they make is a chunk, the sum over the ranks that share the parameters. Everything after that, an all-reduce over
the ranks that replicate them before all else, is in `replicate`.

The send buffer (message.py) is that of `layout.ReduceLayout`: a chunk per receiving rank with the offsets of the
shards, followed by one presence element per parameter. Missing gradients travel as zeros, so the size of a message
never depends on which gradients a rank has; a parameter ends without gradient only when no rank produced one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import Pack, ReduceLayout, sends_directly
from ..policy import Controls, Scale, resolve_scale
from .comparison import Comparison
from .data_group import GRADIENTS_TAG, drain
from .direct import DirectReduce
from .gather import CustomBuffers, CustomGroup
from .group import MEAN, SUM, Links, ShardGroup, Work
from .hierarchical import HierarchicalReduce
from .message import BothEnds, MessageReduce, sum_in_order
from .pool import BufferPool, Slot
from .reduction import Dtypes, FirstStage, LocalReduce, ReduceChannel
from .replicate import AfterSum

# ---- pair reduce -----------------------------------------------------------------------------------------------------
# A reduction whose large gradients are sent from where autograd left them.


class PairReduce(MessageReduce):
    """To every other rank its part of each large gradient, and one message with its part of the others and of presence;
    then a sum in rank order in the sum dtype: bitwise what `ExchangeReduce` makes."""

    def __init__(
        self, group: ShardGroup, layout: ReduceLayout, dtypes: Dtypes, pool: BufferPool, scale: Scale, after: AfterSum
    ) -> None:
        super().__init__(group, layout, dtypes, pool, scale, after)
        segments = [layout.pack.segments[index] for index in layout.direct]
        # (first element, elements) of each rank's part of each direct gradient
        self._runs = [
            [(rank * s.padded_numel, s.layout.local_numel(rank)) for s in segments] for rank in range(group.world)
        ]
        self._padded = [s.padded_numel for s in segments]
        # (first element, elements) of the same parts of this rank in a chunk, and of the message; and the rest of it
        self.ranges = [(s.offset, n) for s, (_, n) in zip(segments, self._runs[group.rank], strict=True)]
        self.ranges.append((layout.message_start, layout.message_numel))
        self.padding = layout.unwritten(group.rank)

    def send(
        self, send: Slot, dtype: torch.dtype, gradients: Sequence[Tensor | None], carried: Comparison | None
    ) -> FirstStage:
        large = [
            torch.zeros(numel * self.group.world, dtype=dtype, device=self.device)
            if (gradient := gradients[index]) is None
            else gradient.to(dtype).contiguous().view(-1)
            for index, numel in zip(self.layout.direct, self._padded, strict=True)
        ]
        others = self.group.world - 1
        chunk, message = self.layout.chunk_numel, self.layout.message_numel
        receive = self.pool.take(self.key("receive", dtype), others * chunk, dtype, self.device, self._chunks)
        mine = [
            [
                *(gradient[start : start + numel] for gradient, (start, numel) in zip(large, parts, strict=True)),
                send.tensor[rank * message : (rank + 1) * message],
            ]
            for rank, parts in enumerate(self._runs)
        ]
        width = len(self.ranges)
        peers = [rank for rank in range(self.group.world) if rank != self.group.rank]
        theirs = {peer: receive.views[i * width : (i + 1) * width] for i, peer in enumerate(peers)}
        leaving = {peer: mine[peer] for peer in peers}
        works = self.group.exchange_each(theirs, leaving, GRADIENTS_TAG)
        return _Pairs(self, works, mine, theirs, (send, receive), carried)

    def _chunks(self, receive: Tensor) -> list[Tensor]:
        chunks = receive.view(-1, self.layout.chunk_numel).unbind()
        return [chunk[start : start + numel] for chunk in chunks for start, numel in self.ranges]


class _Pairs(FirstStage):
    def __init__(
        self,
        channel: PairReduce,
        works: list[Work],
        mine: list[list[Tensor]],
        theirs: dict[int, list[Tensor]],
        slots: tuple[Slot, Slot],
        carried: Comparison | None,
    ) -> None:
        self._channel = channel
        self._works = works
        # Also keeps the gradients, which are being sent, from being freed.
        self._mine = mine
        self._theirs = theirs
        self._slots = slots
        self._carried = carried

    @property
    def held_nbytes(self) -> int:
        # Among mine are the gradients, and views of the send buffer.
        gradients = sum(part.nbytes for parts in self._mine for part in parts[:-1])
        return gradients + sum(slot.tensor.nbytes for slot in self._slots)

    def total(self) -> Tensor:
        self._wait()
        channel = self._channel
        if self._carried is not None:
            self._carried.met(channel.facts_rows(self._slots[1].tensor, channel.group.world - 1))
        group, dtype = channel.group, channel.dtypes.sum
        total = torch.empty(channel.layout.chunk_numel, dtype=dtype, device=channel.device)
        for start, stop in channel.padding:
            total[start:stop].zero_()
        sums = [total[start : start + numel] for start, numel in channel.ranges]
        chunks = [self._mine[rank] if rank == group.rank else self._theirs[rank] for rank in range(group.world)]
        if chunks[0][0].dtype is dtype:
            for out, first, second in zip(sums, chunks[0], chunks[1], strict=True):
                torch.add(first, second, out=out)
            later = chunks[2:]
        else:
            torch._foreach_copy_(sums, chunks[0])
            later = chunks[1:]
        for chunk in later:
            torch._foreach_add_(sums, chunk)
        if channel.scale.before != 1:
            total.div_(channel.scale.before)
        self._give_back()
        return total

    def abandon(self) -> None:
        for work in self._works:
            drain(work)
        self._works = []
        self._give_back()

    def _wait(self) -> None:
        # Given up also where one of them raises: they are of no use to whoever tries again.
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def _give_back(self) -> None:
        self._mine, self._theirs = [], {}
        for slot in self._slots:
            self._channel.pool.give(slot)


# ---- reduce ----------------------------------------------------------------------------------------------------------


class FlatReduce(MessageReduce):
    """The gradients in one buffer, which is all there is to sum on this axis; scaled as DDP does it, before."""

    compares = False

    def send_dtype(self, accumulated: bool) -> torch.dtype:
        # The other axis sums in this buffer, which is as large as the parameters: in the dtype that was asked for.
        return self.dtypes.reduce

    def send(
        self, send: Slot, dtype: torch.dtype, gradients: Sequence[Tensor | None], carried: Comparison | None
    ) -> FirstStage:
        if not self.after.averages and self.scale.before != 1:
            send.tensor.div_(self.scale.before)
        return _Flat(self.pool, send)


class _Flat(FirstStage):
    reuses = True

    def __init__(self, pool: BufferPool, send: Slot) -> None:
        self._pool = pool
        self._send = send

    @property
    def held_nbytes(self) -> int:
        return self._send.tensor.nbytes

    def total(self) -> Tensor:
        return self._send.tensor

    def release(self) -> None:
        self._pool.give(self._send)

    def abandon(self) -> None:
        self.release()


class ExchangeReduce(MessageReduce):
    """All-to-all in the wire dtype, then a sum in rank order in the sum dtype."""

    def send(
        self, send: Slot, dtype: torch.dtype, gradients: Sequence[Tensor | None], carried: Comparison | None
    ) -> FirstStage:
        receive = self.pool.take(self.key("receive", dtype), self.layout.numel, dtype, self.device, self._chunks)
        return _Exchange(self, self.group.exchange(receive.tensor, send.tensor), send, receive, carried)

    def _chunks(self, receive: Tensor) -> list[Tensor]:
        return list(receive.view(self.group.world, self.layout.chunk_numel).unbind())


class _Exchange(BothEnds):
    def __init__(
        self, channel: ExchangeReduce, work: Work, send: Slot, receive: Slot, carried: Comparison | None
    ) -> None:
        super().__init__(channel.pool, work, send, receive)
        self._channel = channel
        self._carried = carried

    def total(self) -> Tensor:
        self._work.wait()
        if self._carried is not None:
            self._carried.met(self._channel.facts_rows(self._receive.tensor, self._channel.group.world))
        total = sum_in_order(self._receive.views, self._channel.dtypes.sum)
        if self._channel.scale.before != 1:
            total.div_(self._channel.scale.before)
        self.give_back()
        return total


class NativeReduce(MessageReduce):
    """One reduce-scatter of the backend, in the reduce dtype. The order of its sum is the backend's."""

    compares = False

    def send_dtype(self, accumulated: bool) -> torch.dtype:
        return self.dtypes.reduce

    def send(
        self, send: Slot, dtype: torch.dtype, gradients: Sequence[Tensor | None], carried: Comparison | None
    ) -> FirstStage:
        if self.scale.overflows and self.scale.before != 1:
            # A sum of many float16 gradients overflows before the division; FSDP2 divides before the sum too.
            send.tensor.div_(self.scale.before)
        out = self.group.empty(self.layout.chunk_numel, dtype)
        work = self.group.reduce_scatter(out, send.tensor, MEAN if self.scale.averages else SUM)
        return _Native(self, work, send, out)


class _Native(FirstStage):
    def __init__(self, channel: NativeReduce, work: Work, send: Slot, out: Tensor) -> None:
        self._channel = channel
        self._work = work
        self._send = send
        self._out = out

    @property
    def held_nbytes(self) -> int:
        return self._send.tensor.nbytes + self._out.nbytes

    def total(self) -> Tensor:
        self._work.wait()
        self._channel.pool.give(self._send)
        scale = self._channel.scale
        if not scale.averages and not scale.overflows and scale.before != 1:
            self._out.div_(scale.before)
        return self._out

    def abandon(self) -> None:
        drain(self._work)
        self._channel.pool.give(self._send)


def reduce_channel(
    links: Links,
    pack: Pack,
    direct: tuple[int, ...],
    dtypes: Dtypes,
    pool: BufferPool,
    *,
    communication: str,
    controls: Controls,
) -> ReduceChannel:
    """The strategy for this group: see the table above. Measured in benchmarks/ and ADR 0006.

    `direct`: the first parameters of the pack's order, which may travel by themselves. `communication`: what holds
    where `controls` do not say.
    """
    group = links.reducing
    native = controls.strategy(communication) == "torch"
    replicate = links.replicate
    if replicate is not None and replicate.world == 1 and not native:
        replicate = None
    if group.world == 1 and replicate is None and controls.hook is None:
        return LocalReduce(dtypes.storage, controls.divide_factor)
    scale = resolve_scale(dtypes.reduce, links.ranks, controls.divide_factor, sum_only=controls.sum_only)
    after = AfterSum(replicate, scale, dtypes, controls.hook, controls.hook_stream, native=native)
    if controls.reduce_scatter is not None:
        group = CustomGroup(group, controls.reduce_scatter) if group.world > 1 else group
        pool = CustomBuffers(controls.reduce_scatter)
    if group.world == 1:
        return FlatReduce(group, ReduceLayout(pack, facts_numel=0), dtypes, pool, scale, after)
    if native:
        return NativeReduce(group, ReduceLayout(pack, facts_numel=0), dtypes, pool, scale, after)
    layout = ReduceLayout(pack)
    if links.nodes is not None:
        in_hops = ReduceLayout(pack, grid=links.nodes.grid)
        return HierarchicalReduce(group, links.nodes, in_hops, dtypes, pool, scale, after)
    if sends_directly(group.backend):
        return DirectReduce(group, ReduceLayout(pack, direct), dtypes, pool, scale, after)
    if direct and group.sends_in_pairs:
        return PairReduce(group, ReduceLayout(pack, direct), dtypes, pool, scale, after)
    return ExchangeReduce(group, layout, dtypes, pool, scale, after)
