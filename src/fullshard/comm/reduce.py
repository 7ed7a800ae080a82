"""Reduces every rank's full gradients to this rank's gradient shards: the mean over ranks.

    strategy           messages                     sum                                      when
    LocalReduce        none                         none                                     one rank in all
    ExchangeReduce     all-to-all of what was       here, in rank order, in the sum dtype:   ranks of one node, on gloo
                       computed (wire dtype)        bitwise the same whatever arrives first  or by "all-to-all"
    PairReduce         large gradients from where   here, in rank order: bitwise what        the same, on gloo, from
                       they are, rank to rank       `ExchangeReduce` makes                   a size on
    NativeReduce       one reduce-scatter in the    by the backend                           several nodes, NCCL, or
                       reduce dtype, and of large                                            `communication="torch"`
                       gradients from where they
                       are, on NCCL
    NativeReduce       none                         none                                     one rank shares, others
                                                                                             replicate

Their result is a chunk: the sum over the shard ranks. The later steps, such as the all-reduce over the replicas, are in
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
from ..policy import Controls, resolve_scale
from .data_group import GRADIENTS_TAG
from .gather import CustomBuffers, CustomGroup
from .group import MEAN, SUM, Links, ShardGroup
from .pool import BufferPool
from .reduction import (
    Dtypes,
    LocalReduce,
    MessageReduce,
    Parts,
    ReduceChannel,
    StagedReduction,
    Summation,
    sum_in_order,
)

# ---- strategies ------------------------------------------------------------------------------------------------------


class ExchangeReduce(MessageReduce):
    """All-to-all in the wire dtype, then a sum in rank order in the sum dtype."""

    def send(self, flight: StagedReduction, dtype: torch.dtype, gradients: Parts) -> None:
        (send,) = flight.buffers
        key, numel = self._keys["receive", dtype], self.layout.numel
        receive = self.pool.take(key, numel, dtype, self.group.device, self._chunks)
        flight.buffers = send, receive
        flight.works = (self.group.exchange(receive.tensor, send.tensor),)

    def total(self, flight: StagedReduction) -> Tensor:
        receive = flight.buffers[1]
        if flight.carried is not None:
            flight.carried.met(self.facts_rows(receive.tensor, self.group.world))
        return sum_in_order(receive.views, self.sums.dtypes.sum)

    def _chunks(self, receive: Tensor) -> list[Tensor]:
        return list(receive.view(self.group.world, self.layout.chunk_numel).unbind())


class PairReduce(MessageReduce):
    """Sends every rank its part of each large gradient, directly from autograd's memory, and one message with the rest
    and the grad-present flags; then sums in rank order in the sum dtype. Bitwise equal to `ExchangeReduce`."""

    def __init__(self, group: ShardGroup, layout: ReduceLayout, pool: BufferPool, sums: Summation) -> None:
        super().__init__(group, layout, pool, sums)
        segments = [layout.pack.segments[index] for index in layout.direct]
        # (first element, elements) of each rank's part of each direct gradient
        self._runs = [
            [(rank * s.padded_numel, s.layout.local_numel(rank)) for s in segments] for rank in range(group.world)
        ]
        # (first element, elements) in a chunk of this rank's parts and of the message; then the chunk's padding
        self._ranges = [(s.offset, n) for s, (_, n) in zip(segments, self._runs[group.rank], strict=True)]
        self._ranges.append((layout.message_start, layout.message_numel))
        self._padding = layout.unwritten(group.rank)

    def send(self, flight: StagedReduction, dtype: torch.dtype, gradients: Parts) -> None:
        (send,) = flight.buffers
        world, segments = self.group.world, self.layout.pack.segments
        flight.kept = [
            torch.zeros(segments[index].layout.numel, dtype=dtype, device=self.group.device)
            if (gradient := gradients[index]) is None
            else gradient.to(dtype).contiguous().view(-1)
            for index in self.layout.direct
        ]
        key, numel = self._keys["receive", dtype], (world - 1) * self.layout.chunk_numel
        flight.buffers = send, self.pool.take(key, numel, dtype, self.group.device, self._chunks)
        arriving = self._arriving(flight)
        leaving = {peer: self._parts_of(flight, peer) for peer in arriving}
        flight.works = (self.group.exchange_each(arriving, leaving, GRADIENTS_TAG),)

    def total(self, flight: StagedReduction) -> Tensor:
        group, dtype = self.group, self.sums.dtypes.sum
        if flight.carried is not None:
            flight.carried.met(self.facts_rows(flight.buffers[1].tensor, group.world - 1))
        total = torch.empty(self.layout.chunk_numel, dtype=dtype, device=group.device)
        for start, stop in self._padding:
            total[start:stop].zero_()
        parts = self._arriving(flight) | {group.rank: self._parts_of(flight, group.rank)}
        in_order = zip(*(parts[rank] for rank in range(group.world)), strict=True)
        for (start, numel), chunks in zip(self._ranges, in_order, strict=True):
            sum_in_order(chunks, dtype, total[start : start + numel])
        return total

    def _chunks(self, receive: Tensor) -> list[Tensor]:
        chunks = receive.view(-1, self.layout.chunk_numel).unbind()
        return [chunk[start : start + numel] for chunk in chunks for start, numel in self._ranges]

    def _arriving(self, flight: StagedReduction) -> dict[int, list[Tensor]]:
        """By rank: where its parts arrive."""
        views, width = flight.buffers[1].views, len(self._ranges)
        peers = [rank for rank in range(self.group.world) if rank != self.group.rank]
        return {peer: views[i * width : (i + 1) * width] for i, peer in enumerate(peers)}

    def _parts_of(self, flight: StagedReduction, rank: int) -> list[Tensor]:
        """This rank's parts for `rank`: of each large gradient, and of the message."""
        parts = zip(flight.kept, self._runs[rank], strict=True)
        message = self.layout.message_numel
        sent = flight.buffers[0].tensor[rank * message : (rank + 1) * message]
        return [*(gradient[start : start + numel] for gradient, (start, numel) in parts), sent]


class NativeReduce(MessageReduce):
    """Reduce-scatters of the backend, in the reduce dtype: one per direct gradient, without a copy unless it needs a
    cast, and one for the message. The backend chooses the order of summation.

    In a world of one nothing is sharded: the replicas sum in the send buffer, divided before, as in DDP."""

    compares = False

    def __init__(
        self, group: ShardGroup, layout: ReduceLayout, pool: BufferPool, sums: Summation, *, adds_messages: bool
    ) -> None:
        super().__init__(group, layout, pool, sums)
        self.in_send_buffer = group.world == 1
        # "torch" allows one message only.
        self.carries = adds_messages and (self.carries or not self.in_send_buffer)
        # As FSDP2 does: a sum of many float16 gradients overflows.
        self._divides_first = sums.scale.overflows and not self.in_send_buffer
        if self._divides_first:
            self.divisor = 1.0
        segments = [layout.pack.segments[index] for index in layout.direct]
        # [start, stop) in a chunk of each message's output.
        self._brings = [(s.offset, s.offset + s.layout.local_numel(group.rank)) for s in segments]
        self._brings.append((layout.message_start, layout.chunk_numel))
        self._padding = layout.unwritten(group.rank)

    def send(self, flight: StagedReduction, dtype: torch.dtype, gradients: Parts) -> None:
        if self.in_send_buffer:
            return
        (send,), device = flight.buffers, self.group.device
        given = [gradients[index] for index in self.layout.direct]
        cast = [gradient for gradient in given if gradient is not None and gradient.dtype is not dtype]
        casts = iter(copied_into_one(cast, dtype) if cast else ())
        large = [
            torch.zeros(self.layout.pack.segments[index].layout.numel, dtype=dtype, device=device)
            if gradient is None
            else (gradient.contiguous() if gradient.dtype is dtype else next(casts)).view(-1)
            for gradient, index in zip(given, self.layout.direct, strict=True)
        ]
        if self._divides_first and self.sums.scale.before != 1:
            send.tensor.div_(self.sums.scale.before)
            large = [gradient / self.sums.scale.before for gradient in large]
        out = self.group.empty(self.layout.chunk_numel, dtype)
        for start, stop in self._padding:
            out[start:stop].zero_()
        outs = [out[start:stop] for start, stop in self._brings]
        flight.kept = *large, out
        op = MEAN if self.sums.averages else SUM
        flight.works = self.group.reduce_scatter_each(outs, [*large, send.tensor], op)
        if flight.carried is not None:
            flight.carried.ask_sharers(self.group)

    def total(self, flight: StagedReduction) -> Tensor:
        if flight.carried is not None:
            flight.carried.answered()
        return flight.buffers[0].tensor if self.in_send_buffer else flight.kept[-1]


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
    sums = Summation(replicate, scale, dtypes, controls.hook, controls.hook_stream, native=native)
    if controls.reduce_scatter is not None:
        group = CustomGroup(group, controls.reduce_scatter) if group.world > 1 else group
        pool = CustomBuffers(controls.reduce_scatter)
    if native or group.world == 1:
        layout = ReduceLayout(pack, direct if group.world > 1 else (), facts_numel=0)
        return NativeReduce(group, layout, pool, sums, adds_messages=not as_torch)
    if direct and group.sends_in_pairs:
        return PairReduce(group, ReduceLayout(pack, direct), pool, sums)
    return ExchangeReduce(group, ReduceLayout(pack), pool, sums)
