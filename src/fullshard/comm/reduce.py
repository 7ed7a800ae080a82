"""Reduces every rank's full gradients to this rank's gradient shards: the mean over ranks.

    strategy           messages                     sum                                      when
    LocalReduce        none                         none                                     one rank in all
    FlatReduce         none                         none                                     one rank shares, others
                                                                                             replicate
    ExchangeReduce     all-to-all of what was       here, in rank order, in the sum dtype:   ranks of one node, on gloo
                       computed (wire dtype)        bitwise the same whatever arrives first  or by "all-to-all"
    PairReduce         large gradients from where   here, in rank order: bitwise what        the same, on gloo, from
                       they are, rank to rank       `ExchangeReduce` makes                   a size on
    NativeReduce       one reduce-scatter in the    by the backend                           several nodes, NCCL, or
                       reduce dtype, and of large                                            `communication="torch"`
                       gradients from where they
                       are, on NCCL

Their result is a chunk: the sum over the shard ranks. Later steps, such as the all-reduce over the replicas, are in
`reduction.py`, and so is the send buffer. It has the layout of `layout.ReduceLayout`: a chunk per receiving rank with
the offsets of the shards, followed by one grad-present flag per parameter. Missing gradients are sent as zeros, so the
size of a message never depends on which gradients a rank has; a parameter gets no gradient only if no rank produced
one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from .._torch import copied_into_one
from ..layout import FlatLayout, ReduceLayout, ShardLayout, direct_gradients
from ..peers import node, same_on_all, scope_of
from ..policy import Controls, Scale, resolve_scale
from .comparison import Comparison
from .data_group import GRADIENTS_TAG, drain
from .gather import CustomBuffers, CustomGroup
from .group import MEAN, SUM, Links, ShardGroup, Work
from .pool import BufferPool, Slot
from .reduction import AfterSum, BothEnds, Dtypes, FirstStage, LocalReduce, MessageReduce, ReduceChannel, sum_in_order

# ---- pair reduce -----------------------------------------------------------------------------------------------------
# A reduction that sends large gradients directly from autograd's memory.


class PairReduce(MessageReduce):
    """Sends every rank its part of each large gradient, and one message with the rest and the grad-present flags; then
    sums in rank order in the sum dtype. Bitwise equal to `ExchangeReduce`."""

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
        # (first element, elements) in a chunk of this rank's parts and of the message; then the chunk's padding
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
        # Also keeps the gradients alive while they are sent.
        self._mine = mine
        self._theirs = theirs
        self._slots = slots
        self._carried = carried

    @property
    def held_nbytes(self) -> int:
        # `_mine` has the gradients, and last a view of the send buffer.
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
        # Drop the works even if one of them raises: a retry must not wait for them again.
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def _give_back(self) -> None:
        self._mine, self._theirs = [], {}
        for slot in self._slots:
            self._channel.pool.give(slot)


# ---- reduce ----------------------------------------------------------------------------------------------------------


class FlatReduce(MessageReduce):
    """Nothing is sharded: the gradients in one buffer, divided before the all-reduce, as in DDP."""

    compares = False

    def send_dtype(self, accumulated: bool) -> torch.dtype:
        # The all-reduce runs in this buffer, which is as large as the parameters: use the requested dtype.
        return self.dtypes.reduce

    def send(
        self, send: Slot, dtype: torch.dtype, gradients: Sequence[Tensor | None], carried: Comparison | None
    ) -> FirstStage:
        if not self.after.averages and self.scale.before != 1:
            send.tensor.div_(self.scale.before)
        return _Flat(self.pool, send)


class _Flat(FirstStage):
    in_send_buffer = True

    def __init__(self, pool: BufferPool, send: Slot) -> None:
        self.reuses = pool.reuses
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
    """Reduce-scatters of the backend, in the reduce dtype: one per direct gradient, without a copy unless it needs a
    cast, and one for the message. The backend chooses the order of summation."""

    compares = False

    def __init__(
        self,
        group: ShardGroup,
        layout: ReduceLayout,
        dtypes: Dtypes,
        pool: BufferPool,
        scale: Scale,
        after: AfterSum,
        *,
        adds_messages: bool,
    ) -> None:
        super().__init__(group, layout, dtypes, pool, scale, after)
        # "torch" allows one message only.
        self._adds_messages = adds_messages
        segments = [layout.pack.segments[index] for index in layout.direct]
        self._numels = [segment.layout.numel for segment in segments]
        # [start, stop) in a chunk of each message's output.
        self._brings = [(s.offset, s.offset + s.layout.local_numel(group.rank)) for s in segments]
        self._brings.append((layout.message_start, layout.chunk_numel))
        self._padding = layout.unwritten(group.rank)

    @property
    def carries(self) -> bool:
        return self._adds_messages

    def send_dtype(self, accumulated: bool) -> torch.dtype:
        return self.dtypes.reduce

    def send(
        self, send: Slot, dtype: torch.dtype, gradients: Sequence[Tensor | None], carried: Comparison | None
    ) -> FirstStage:
        given = [gradients[index] for index in self.layout.direct]
        cast = [gradient for gradient in given if gradient is not None and gradient.dtype is not dtype]
        casts = iter(copied_into_one(cast, dtype) if cast else ())
        large = [
            torch.zeros(numel, dtype=dtype, device=self.device)
            if gradient is None
            else (gradient.contiguous() if gradient.dtype is dtype else next(casts)).view(-1)
            for gradient, numel in zip(given, self._numels, strict=True)
        ]
        if self.scale.overflows and self.scale.before != 1:
            # Divide first, as FSDP2 does: a sum of many float16 gradients overflows.
            send.tensor.div_(self.scale.before)
            large = [gradient / self.scale.before for gradient in large]
        out = self.group.empty(self.layout.chunk_numel, dtype)
        for start, stop in self._padding:
            out[start:stop].zero_()
        outs = [out[start:stop] for start, stop in self._brings]
        op = MEAN if self.scale.averages else SUM
        works = self.group.reduce_scatter_each(outs, [*large, send.tensor], op)
        if carried is not None:
            carried.ask_sharers(self.group)
        return _Native(self, works, large, send, out, carried)


class _Native(FirstStage):
    def __init__(
        self,
        channel: NativeReduce,
        works: list[Work],
        large: list[Tensor],
        send: Slot,
        out: Tensor,
        carried: Comparison | None,
    ) -> None:
        self._channel = channel
        self._works = works
        # Keeps the gradients alive while they are sent.
        self._large = large
        self._send = send
        self._out = out
        self._carried = carried

    @property
    def held_nbytes(self) -> int:
        return self._send.tensor.nbytes + sum([gradient.nbytes for gradient in self._large]) + self._out.nbytes

    def total(self) -> Tensor:
        works, self._works = self._works, []
        for work in works:
            work.wait()
        if self._carried is not None:
            self._carried.answered()
        self._give_back()
        scale = self._channel.scale
        if not scale.averages and not scale.overflows and scale.before != 1:
            self._out.div_(scale.before)
        return self._out

    def abandon(self) -> None:
        for work in self._works:
            drain(work)
        self._give_back()

    def _give_back(self) -> None:
        self._works, self._large = [], []
        self._channel.pool.give(self._send)


# ---- nodes -----------------------------------------------------------------------------------------------------------
# Gradients use an all-to-all within a node. Between nodes it would send more than a reduce-scatter, which the backend
# routes for its network (ADR 0005).


def direct_of(
    links: Links, strategy: str, layouts: Sequence[ShardLayout], gathered: Collection[int], itemsize: int
) -> tuple[int, ...]:
    """Positions of the parameters whose gradients are sent directly from autograd's memory. Arguments as for
    `direct_gradients`; `gathered`: positions of parameters that are all-gathered directly into place."""
    group = links.reducing
    if strategy == "torch" or group.world == 1:
        return ()
    if links.exchanges:
        return direct_gradients(layouts, itemsize, backend=group.backend, on_host=group.device.type == "cpu")
    if not group.one_launch:
        return ()
    # Evenly sharded ones only, so that the gradient itself is the message.
    return tuple(i for i, layout in enumerate(layouts) if i in gathered and layout.padded_full_numel == layout.numel)


class Nodes:
    """Which groups of one root span several nodes. All ranks make the same calls in the same order."""

    def __init__(self) -> None:
        # Keyed by the ranks of the mesh and of the group.
        self._several: dict[tuple[tuple[int, ...], ...], bool] = {}

    def locate(self, links: Links, strategy: str) -> Links:
        """`links` as `strategy` uses them, wherever their ranks are. Once per group: two questions to the store.

        Raises `ValueError` on all ranks for "all-to-all" between nodes.
        """
        links = links.under(strategy)
        if links.shard.world == 1 or not links.exchanges:
            return links
        key = links.everyone, links.shard.ranks
        if key not in self._several:
            self._several[key] = _on_several_nodes(links)
        if self._several[key] and strategy == "all-to-all":
            raise ValueError(
                'set_communication("all-to-all"): expected the ranks that share parameters on one node, found several; '
                'use "auto", which exchanges gradients within a node and lets the backend reduce them between nodes'
            )
        return links._replace(exchanges=not self._several[key])


def _on_several_nodes(links: Links) -> bool:
    """Equal in all groups of the mesh, because replicas must sum in one dtype."""
    shard, everyone = scope_of(links.shard.ranks), scope_of(links.everyone)
    if shard is None or everyone is None:
        return False
    several = not same_on_all(shard, "the node of this rank", node())
    if shard is everyone:
        return several
    same = same_on_all(everyone, "whether ranks that share parameters are on several nodes", str(several))
    return several or not same


def reduce_channel(
    links: Links,
    pack: FlatLayout,
    direct: tuple[int, ...],
    dtypes: Dtypes,
    pool: BufferPool,
    *,
    strategy: str,
    controls: Controls,
) -> ReduceChannel:
    """The strategy for this group: see the table in the module docstring. Measured in benchmarks/ and ADR 0005.

    `direct`: positions of the parameters whose gradients may be sent separately. `links`: under `strategy`.
    """
    group = links.reducing
    as_torch = strategy == "torch"
    native = as_torch or (group.world > 1 and not links.exchanges)
    replicate = links.replicate
    if replicate is not None and replicate.world == 1 and not as_torch:
        replicate = None
    if group.world == 1 and replicate is None and controls.hook is None:
        return LocalReduce(dtypes.gradient, controls.divide_factor)
    scale = resolve_scale(dtypes.reduce, links.ranks, controls.divide_factor, sum_only=controls.sum_only)
    after = AfterSum(replicate, scale, dtypes, controls.hook, controls.hook_stream, native=native)
    if controls.reduce_scatter is not None:
        group = CustomGroup(group, controls.reduce_scatter) if group.world > 1 else group
        pool = CustomBuffers(controls.reduce_scatter)
    if group.world == 1:
        return FlatReduce(group, ReduceLayout(pack, facts_numel=0), dtypes, pool, scale, after)
    if native:
        layout = ReduceLayout(pack, direct, facts_numel=0)
        return NativeReduce(group, layout, dtypes, pool, scale, after, adds_messages=not as_torch)
    if direct and group.sends_in_pairs:
        return PairReduce(group, ReduceLayout(pack, direct), dtypes, pool, scale, after)
    return ExchangeReduce(group, ReduceLayout(pack), dtypes, pool, scale, after)
