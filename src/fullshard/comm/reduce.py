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

`choice.py` chooses. Their result is a chunk: the sum over the shard ranks. The later steps, such as the all-reduce over
the replicas, are the same for all. The send buffer has the layout of `layout.ReduceLayout`: a chunk per receiving rank
with the offsets of the shards, followed by one grad-present flag per parameter. Missing gradients are sent as zeros, so
the size of a message never depends on which gradients a rank has; a parameter gets no gradient only if no rank produced
one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import copied_into_one
from ..layout import FACTS_NUMEL, ReduceLayout, contiguous_stride
from ..layout.gather import SendRegion
from ..policy import Scale
from .comparison import CARRIERS, Comparison, HostCopy, brought
from .data_group import MEAN, SUM, Work, drain
from .group import GRADIENTS_TAG, ShardGroup
from .pool import Buffer, BufferPool, Flight

# One tensor per parameter, None if there is no gradient.
Parts = Sequence[Tensor | None]


class Dtypes(NamedTuple):
    """The dtypes of one reduction (see policy/options.py)."""

    wire: torch.dtype
    reduce: torch.dtype
    sum: torch.dtype
    gradient: torch.dtype


class Reduction(Flight):
    """A reduction in flight; this one, of a single rank, has arrived."""

    # Whether its result is a partial sum.
    keeps = False
    # Whether the message in flight is the all-reduce over the replicas, and whether that follows.
    is_replicating = has_next = False
    # Whether the send buffer stays in use to the end, because the last message sums in it.
    keeps_send_buffer = False
    # After `collect`: flags of the gradients that some rank produced, one per parameter, if that is not known yet. The
    # others are zero and must be dropped.
    present: HostCopy | None = None

    def __init__(self, channel: ReduceChannel, parts: Parts = ()) -> None:
        self._channel, self._parts = channel, parts

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer that the replicas all-reduce, unless it is the send buffer; 0 during the first stage."""
        return 0

    def advance(self) -> None:
        """Wait for the message in flight and send the next one. Does nothing after the last."""

    def collect(self) -> Parts:
        """Wait for the result: one tensor per parameter, None if no rank produced a gradient. Call it once.

        The mean gradient shard, unpadded local shape, gradient dtype; or, if issued with `keep`, the partial sum:
        (padded_local_numel,), reduce dtype. The tensors are new and belong to the caller.
        """
        land = self._channel.land
        return self._parts if land is None else land(self._parts)


class Outgoing(NamedTuple):
    """Says what is sent with the gradients of a group, and what becomes of them."""

    # Whether they are sums over several backwards, in the reduce dtype.
    accumulated: bool
    # Results of earlier reductions with `keep`, per parameter; they are added, and stay the caller's.
    partials: Parts = ()
    # Whether to stop before the all-reduce over the replicas.
    keep: bool = False
    # A comparison that travels with the message, if the channel `carries`.
    carried: Comparison | None = None


class ReduceChannel(ABC):
    """Reduces the gradients of one param group."""

    # Whether a reduction can carry a comparison to all ranks of the mesh.
    carries = False
    # Takes results that are no partial sums to where the shards are, if not on the device.
    land: Callable[[Parts], Parts] | None = None

    @abstractmethod
    def issue(self, gradients: Parts, message: Outgoing) -> Reduction:
        """Send `gradients`, one full gradient (unpadded shape) per parameter of the flat layout or None. They may be
        freed on return."""


# ---- replicate -------------------------------------------------------------------------------------------------------
# The steps after a chunk of gradients was summed over the shard ranks.
#
#     1  the partial sums of earlier backwards are added          after `set_requires_all_reduce(False)`
#     2  all-reduce over the replicas                             on a mesh with a replicate axis
#     3  the hook, in the reduce dtype                            `set_all_reduce_hook`
#     4  the last division, and the gradient dtype
#
# All messages are asynchronous: `advance` sends the next one, which overlaps with the gradients of the next unit.
# Presence is summed with the gradients, so a gradient that only one replica has still counts.
#
# The all-reduce of a shard sums in the sum dtype: it is small, and rounding the partial sum to a narrow dtype would
# cost more than the bytes save. If nothing is sharded it is as large as the parameters and sums in the reduce dtype; so
# does `communication="torch"`, as in FSDP2. A backend may add in any order, but gives every rank the same bits.


class Summation(NamedTuple):
    """How the gradients of one group are summed: the dtypes, the divisions, and steps 2 to 4."""

    replicate: ShardGroup | None
    scale: Scale
    dtypes: Dtypes
    hook: Callable[[Tensor], object] | None
    hook_stream: Any
    # Whether the backend reduces the chunk, in the reduce dtype, and whether it takes the mean, so that nothing is
    # divided here.
    native: bool
    averages: bool


class StagedReduction(Reduction):
    """One reduction with all of its messages."""

    _channel: MessageReduce

    def __init__(
        self,
        channel: MessageReduce,
        send: Buffer,
        complete: bool,
        message: Outgoing,
    ) -> None:
        self.pool, self.buffers = channel.pool, (send,)
        self.carried, self._partials, keep = message.carried, message.partials, message.keep
        self._channel, self._complete = channel, complete
        replicate = channel.sums.replicate
        # Whether it keeps a partial sum: without replicas the sum is complete.
        self.keeps = keep and replicate is not None
        self.has_next = replicate is not None and not keep
        self.keeps_send_buffer = channel.in_send_buffer
        # Whether the sum is in a buffer that will be reused, so that the caller must get a copy.
        self._reuses = channel.in_send_buffer and channel.pool.reuses
        self._total: Tensor | None = None
        self._work: Work | None = None

    @property
    def nbytes(self) -> int:
        """Bytes as in `Reduction`."""
        return 0 if self._total is None or self._work is None or self.keeps_send_buffer else self._total.nbytes

    @property
    def held_nbytes(self) -> int:
        """Bytes of the first messages; 0 once they were received."""
        return super().held_nbytes if self._total is None else 0

    def advance(self) -> None:
        self._advanced()

    def _advanced(self) -> Tensor:
        if self._total is not None:
            return self._total
        channel = self._channel
        self.arrive()
        total = channel.total(self)
        if channel.divisor != 1:
            total.div_(channel.divisor)
        if not self.keeps_send_buffer:
            self.pool.give(*self.buffers)
            self.buffers = self.kept = ()
        if self._partials:
            self._add_partials(total)
        self._total = total
        if self.has_next:
            self.has_next, self.is_replicating = False, True
            replicate = channel.sums.replicate
            assert replicate is not None
            if self.carried is not None:
                self.carried.ask_replicas(replicate)
            self._work = replicate.all_reduce(total, MEAN if channel.sums.averages else SUM)
        return total

    def collect(self) -> Parts:
        total = self._advanced()
        try:
            if self._work is not None:
                self._work.wait()
            if self.carried is not None:
                self.carried.arrive()
            if self.keeps:
                parts, self.present = self._kept(total)
                return parts
            parts, self.present = self._channel.split(self._finished(total), self._complete)
        finally:  # a hook may raise
            self._total = self._work = None
            if self.buffers:
                self.release()
        return parts if self._channel.land is None else self._channel.land(parts)

    def abandon(self) -> None:
        """Wait for the messages and discard them, those of the comparison too."""
        if self.carried is not None:
            self.carried.abandon()
        if self._work is not None:
            drain(self._work)
        super().abandon()

    # ---- steps ---------------------------------------------------------------------------------------------

    def _add_partials(self, total: Tensor) -> None:
        layout = self._channel.layout
        partials = [(index, partial) for index, partial in enumerate(self._partials) if partial is not None]
        if not partials:
            return
        starts = [layout.pack.segments[index].offset for index, _ in partials]
        sums = [total.narrow(0, start, one.numel()) for start, (_, one) in zip(starts, partials, strict=True)]
        torch._foreach_add_(sums, [partial for _, partial in partials])
        # All ranks of a parameter have a partial sum, or none has.
        flags = total[layout.grad_present_offset :]
        if len(partials) == len(layout.pack.segments):
            flags[: len(partials)].add_(1)
        else:
            torch._foreach_add_([flags[index] for index, _ in partials], 1)

    def _kept(self, total: Tensor) -> tuple[Parts, HostCopy | None]:
        kept = total.to(self._channel.sums.dtypes.reduce, copy=self._reuses)
        segments = self._channel.layout.pack.segments
        parts: list[Tensor | None] = [kept.narrow(0, s.offset, s.padded_numel) for s in segments]
        return (parts, None) if self._complete else self._channel.without_absent(parts, kept)

    def _finished(self, total: Tensor) -> Tensor:
        after = self._channel.sums
        result = total
        if after.hook is not None:
            result = result.to(after.dtypes.reduce)
            # Without the grad-present flags, which follow the gradients and which the hook must not change.
            _call(after.hook, result[: self._channel.layout.grad_present_offset], after.hook_stream)
        if after.scale.after != 1:
            result = result / after.scale.after if self._reuses else result.div_(after.scale.after)
        return result.to(after.dtypes.gradient, copy=self._reuses and result is total)


def _call(hook: Callable[[Tensor], object], gradients: Tensor, stream: Any) -> None:
    if stream is None:
        hook(gradients)
        return
    device = torch.get_device_module(gradients.device)
    current = device.current_stream(gradients.device)
    stream.wait_stream(current)
    with device.stream(stream):
        hook(gradients)
    current.wait_stream(stream)


# ---- message ---------------------------------------------------------------------------------------------------------
# Base of the reductions that send messages: the send buffer and the shapes of the result.


class _Target(NamedTuple):
    """The place of one packed parameter's full gradient in the send buffer."""

    # Index of the parameter in the pack.
    position: int
    regions: tuple[SendRegion, ...]
    # The shape of the only region, if the contiguous gradient fills it.
    rows: tuple[int, ...] | None


def _target(layout: ReduceLayout, index: int) -> _Target:
    regions = layout.regions(index)
    ranks, outer, block = regions[0].sizes if len(regions) == 1 else (0, 0, 0)
    return _Target(index, regions, (ranks, block) if outer == 1 else None)


# An operation for each range of padding, or, of more than so many, one for the whole buffer.
_PADDINGS = 3


class MessageReduce(ReduceChannel):
    """Base of the strategies that send messages: the send buffer and the shapes of the result. A strategy is `send` and
    `total`."""

    # Whether chunks arrive unreduced, so that digests in them can be compared.
    compares = True
    # Whether nothing is sent before the replicas sum, in the send buffer.
    in_send_buffer = False

    def __init__(self, group: ShardGroup, layout: ReduceLayout, pool: BufferPool, sums: Summation) -> None:
        self.group, self.layout, self.pool, self.sums = group, layout, pool, sums
        # The divisor of the sum over the shard ranks, unless the backend divided.
        self.divisor = 1.0 if sums.averages else sums.scale.before
        self.carries = {sums.dtypes.wire, sums.dtypes.reduce, sums.dtypes.sum} <= CARRIERS
        pack = layout.pack
        self._targets = [_target(layout, i) for i in layout.packed]
        # (local shape, contiguous stride, offset) of this rank's part of each parameter in one chunk
        self.parts = [
            (shape := segment.layout.local_shape(group.rank), contiguous_stride(shape), segment.offset)
            for segment in pack.segments
        ]
        self._zeroed = layout.padding if len(layout.padding) <= _PADDINGS else ((0, layout.message_numel),)
        # [start, stop) of flags and the padding after them, which nobody reads: one operation writes both.
        flags = layout.grad_present_offset - layout.message_start
        tail = flags + len(pack.segments), layout.message_numel
        self._flags = (flags, tail[1]) if layout.facts_numel == 0 and tail in self._zeroed else None
        # The keys of its buffers in the pool, by use and dtype.
        dtypes, uses = {sums.dtypes.wire, sums.dtypes.reduce}, ("send", "receive")
        self._keys = {(use, dtype): pool.key(use, layout, dtype) for use in uses for dtype in dtypes}

    def issue(self, gradients: Parts, message: Outgoing) -> Reduction:
        dtypes = self.sums.dtypes
        # A backend reduces in the requested dtype.
        dtype = dtypes.reduce if message.accumulated or not self.compares else dtypes.wire
        send, complete = self.fill(gradients, dtype)
        if message.carried is not None and self.compares:
            message.carried.write(self.facts_rows(send.tensor, self.group.world, self.layout.message_start))
        flight = StagedReduction(self, send, complete, message)
        self.send(flight, dtype, gradients)
        if self.in_send_buffer:
            flight.advance()
        return flight

    @abstractmethod
    def send(self, flight: StagedReduction, dtype: torch.dtype, gradients: Parts) -> None:
        """Send the buffer `flight.buffers[0]` and the direct ones of `gradients`. Sets the fields of `Flight`."""

    @abstractmethod
    def total(self, flight: StagedReduction) -> Tensor:
        """This rank's chunk (chunk_numel,) once the messages arrived: the sum, writable. Compares the received digests,
        if any."""

    def facts_rows(self, buffer: Tensor, count: int, start: int = 0) -> Tensor:
        """The digests in `count` chunks of `buffer`, which begin at element `start` of each: (count, FACTS_NUMEL)."""
        layout = self.layout
        return buffer.as_strided((count, FACTS_NUMEL), (layout.chunk_numel - start, 1), layout.facts_offset - start)

    def fill(self, gradients: Parts, dtype: torch.dtype) -> tuple[Buffer, bool]:
        """A send buffer with packed gradients and their flags; and whether all gradients, direct ones too, exist."""
        # Other ranks receive its padding. Of a kept buffer that is zeroed once and never written.
        keeps = self.pool.keeps
        key, numel = self._keys["send", dtype], self.layout.numel
        buffer = self.pool.take(key, numel, dtype, self.group.device, self._send_views, zeroed=keeps)
        grad_present = buffer.views[-1]
        sources, destinations = [], []
        complete = True
        for gradient in gradients:
            complete = complete and gradient is not None
        if not keeps:
            chunks = buffer.tensor.view(self.group.world, -1)
            zeroed = self._zeroed
            if complete and self._flags is not None:
                start, stop = self._flags
                grad_present, zeroed = chunks[:, start:stop], tuple(span for span in zeroed if span[1] != stop)
            for start, stop in zeroed:
                chunks[:, start:stop].zero_()
        views = iter(buffer.views)
        for position, regions, rows in self._targets:
            gradient = gradients[position]
            if gradient is None:
                for _ in regions:
                    next(views).zero_()
            elif rows is not None:
                destinations.append(next(views))
                sources.append(gradient.reshape(*rows))  # passing a tuple takes twice the time
            else:
                whole = gradient.contiguous()
                first = whole.storage_offset()
                for region in regions:
                    destinations.append(next(views))
                    sources.append(whole.as_strided(region.sizes, region.full_strides, first + region.full_start))
        if sources:
            torch._foreach_copy_(destinations, sources)
        if complete:
            grad_present.fill_(1)
        else:
            grad_present.copy_(brought([int(g is not None) for g in gradients], dtype, self.group.device))
        return buffer, complete

    def _send_views(self, send: Tensor) -> list[Tensor]:
        layout = self.layout
        views = []
        for _, regions, rows in self._targets:
            for sizes, _, _, start, strides in regions:
                shape = (sizes, strides) if rows is None else (rows, (*strides[:-2], strides[-1]))
                views.append(send.as_strided(*shape, start))
        grad_present = (self.group.world, len(layout.pack.segments))
        views.append(
            send.as_strided(grad_present, (layout.message_numel, 1), layout.grad_present_offset - layout.message_start)
        )
        return views

    def split(self, mean: Tensor, complete: bool) -> tuple[Parts, HostCopy | None]:
        """The parameters' shards of the reduced chunk, and flags of those that some rank had; see `without_absent`.
        `complete`: this rank had all gradients, so all are present."""
        parts: list[Tensor | None] = list(starmap(mean.as_strided, self.parts))
        return (parts, None) if complete else self.without_absent(parts, mean)

    def without_absent(self, parts: Parts, chunk: Tensor) -> tuple[Parts, HostCopy | None]:
        """`parts` of a reduced chunk, None where no rank had a gradient.

        On a device the host does not wait to know which are: all parts are returned, and the flags that say which of
        them some rank had."""
        start = self.layout.grad_present_offset
        present = chunk[start : start + len(parts)]
        if self.group.device.type != "cpu":
            return parts, HostCopy(present)
        return [part if there else None for part, there in zip(parts, present.tolist(), strict=True)], None


def sum_in_order(chunks: Sequence[Tensor], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The sum of two or more `chunks` (n,), added in their order in `dtype`; into `out` if given."""
    if chunks[0].dtype is dtype:
        total = torch.add(chunks[0], chunks[1], out=out)
        later = chunks[2:]
    else:
        total = chunks[0].to(dtype) if out is None else out.copy_(chunks[0])
        later = chunks[1:]
    for chunk in later:
        total.add_(chunk)
    return total


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
        """The tensors in which the parts of each rank arrive, by rank."""
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
        # Whether gradients are divided before they are added, as in FSDP2: a sum of many float16 gradients overflows.
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
