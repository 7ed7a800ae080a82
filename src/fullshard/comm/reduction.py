"""A gradient reduction from its start to the shards: the interface, a single rank, several ranks, and replicas.

`reduce.py` has the strategies for the sum over the shard ranks. The rest is here: the send buffer, partial sums of
earlier backwards, the all-reduce over the replicas, a user's hook, the division, and the cast to the gradient dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layout import FACTS_NUMEL, ReduceLayout, contiguous_stride
from ..layout.flat import SendRegion
from ..policy import Scale
from .comparison import CARRIERS, Comparison, HostCopy, brought
from .data_group import Work, drain
from .group import MEAN, SUM, ShardGroup
from .pool import Buffer, BufferPool, Flight

# ---- interface, and one rank -----------------------------------------------------------------------------------------

# One tensor per parameter, None if there is no gradient.
Parts = Sequence[Tensor | None]


class Dtypes(NamedTuple):
    """The dtypes of one reduction (see policy/policies.py)."""

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


class ReduceChannel(ABC):
    """Reduces the gradients of one param group."""

    # Whether a reduction can carry a comparison to all ranks of the mesh.
    carries = False
    # Takes results that are no partial sums to where the shards are, if not on the device.
    land: Callable[[Parts], Parts] | None = None

    @abstractmethod
    def issue(
        self,
        gradients: Parts,
        *,
        accumulated: bool,
        partials: Parts = (),
        keep: bool = False,
        carried: Comparison | None = None,
    ) -> Reduction:
        """Send `gradients`, one full gradient (unpadded shape) per parameter of the flat layout or None.

        `accumulated`: they are sums over several backwards in the reduce dtype. The gradients may be freed on return.
        `partials`: results of earlier reductions with `keep`, per parameter; they are added, and stay the caller's.
        `keep`: stop before the all-reduce over the replicas.
        `carried`: sent with the message, if the channel `carries`.
        """


class LocalReduce(ReduceChannel):
    """One rank: its gradients are the result."""

    def __init__(self, gradient: torch.dtype, divide_factor: float | None) -> None:
        self._dtype = gradient
        self._factor = divide_factor

    def issue(self, gradients: Parts, **_: Any) -> Reduction:
        found = [gradient for gradient in gradients if gradient is not None]
        dtypes = {gradient.dtype for gradient in found}
        if not found or (self._factor is None and dtypes == {self._dtype}):
            # `contiguous`: an expanded zero for a missing gradient cannot be written.
            return Reduction(self, [None if gradient is None else gradient.contiguous() for gradient in gradients])
        factor = self._factor
        if factor is not None and len(dtypes) > 1:
            found, factor = [gradient / factor for gradient in found], None
        # One buffer, so that an operation is one kernel and not one for each gradient. Divided before the cast.
        dtype = self._dtype if factor is None else found[0].dtype
        flat = torch.empty(sum(map(Tensor.numel, found)), dtype=dtype, device=found[0].device)
        torch._foreach_copy_(_pieces(flat, found), found)
        if factor is not None:
            flat = flat.div_(factor).to(self._dtype)
        parts = iter(_pieces(flat, found))
        return Reduction(self, [None if gradient is None else next(parts) for gradient in gradients])


def _pieces(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """`flat`, cut into contiguous tensors of the shapes of `like`."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


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
    # The backend reduces the chunk, in the reduce dtype.
    native: bool

    @property
    def averages(self) -> bool:
        """Whether the backend takes the mean, so that nothing is divided here."""
        return self.native and self.scale.averages


class StagedReduction(Reduction):
    """One reduction with all of its messages."""

    _channel: MessageReduce

    def __init__(
        self,
        channel: MessageReduce,
        send: Buffer,
        complete: bool,
        partials: Parts,
        *,
        keep: bool,
        carried: Comparison | None,
    ) -> None:
        self.pool, self.buffers = channel.pool, (send,)
        self.carried = carried
        self._channel, self._complete, self._partials = channel, complete, partials
        replicate = channel.sums.replicate
        # Without replicas the sum is complete, so there is no partial sum to keep.
        self.keeps = keep and replicate is not None
        self.has_next = replicate is not None and not keep
        self.keeps_send_buffer = channel.in_send_buffer
        # Whether the sum is in a buffer that will be reused, so that the caller must get a copy.
        self._reuses = channel.in_send_buffer and channel.pool.reuses
        self._total: Tensor | None = None
        self._work: Work | None = None

    @property
    def nbytes(self) -> int:
        """See `Reduction`."""
        return 0 if self._total is None or self._work is None or self.keeps_send_buffer else self._total.nbytes

    @property
    def held_nbytes(self) -> int:
        """Of the first messages; 0 once they were received."""
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
        """See `Flight`."""
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

    @classmethod
    def of(cls, layout: ReduceLayout, index: int) -> _Target:
        regions = layout.regions(index)
        ranks, outer, block = regions[0].sizes if len(regions) == 1 else (0, 0, 0)
        return cls(index, regions, (ranks, block) if outer == 1 else None)


# An operation for each range of padding, or, of more than so many, one for the whole buffer.
_PADDINGS = 3


class _Keys(dict[tuple[str, torch.dtype], int]):
    """The keys of one layout's buffers in its pool, by use and dtype."""

    def __init__(self, pool: BufferPool, layout: ReduceLayout) -> None:
        self._pool, self._layout = pool, layout

    def __missing__(self, part: tuple[str, torch.dtype]) -> int:
        self[part] = found = self._pool.key(part[0], self._layout, part[1])
        return found


class MessageReduce(ReduceChannel):
    """Base of the strategies that send messages: the send buffer and the shapes of the result. A strategy is `send` and
    `total`."""

    # Whether chunks arrive unreduced, so that digests in them can be compared.
    compares = True
    # Whether nothing is sent before the replicas sum, in the send buffer.
    in_send_buffer = False

    def __init__(self, group: ShardGroup, layout: ReduceLayout, pool: BufferPool, sums: Summation) -> None:
        self.group, self.layout, self.pool, self.sums = group, layout, pool, sums
        # Of the sum over the shard ranks, unless the backend divided.
        self.divisor = 1.0 if sums.averages else sums.scale.before
        self.carries = {sums.dtypes.wire, sums.dtypes.reduce, sums.dtypes.sum} <= CARRIERS
        pack = layout.pack
        self._targets = [_Target.of(layout, i) for i in layout.packed]
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
        self._keys = _Keys(pool, layout)

    def issue(
        self,
        gradients: Parts,
        *,
        accumulated: bool,
        partials: Parts = (),
        keep: bool = False,
        carried: Comparison | None = None,
    ) -> Reduction:
        dtypes = self.sums.dtypes
        # A backend reduces in the requested dtype.
        dtype = dtypes.reduce if accumulated or not self.compares else dtypes.wire
        send, complete = self.fill(gradients, dtype)
        if carried is not None and self.compares:
            carried.write(self.facts_rows(send.tensor, self.group.world, self.layout.message_start))
        flight = StagedReduction(self, send, complete, partials, keep=keep, carried=carried)
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
