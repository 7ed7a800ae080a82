"""A gradient reduction from its start to the shards: the interface, a single rank, several ranks, and replicas.

`reduce.py` has the strategies for the first stage, the sum over the shard ranks. The later steps are here: partial sums
of earlier backwards, the all-reduce over the replicas, a user's hook, the division, and the cast to the gradient dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..layout import FACTS_NUMEL, ReduceLayout, contiguous_stride
from ..layout.flat import SendRegion
from ..policy import Scale
from .comparison import CARRIERS, Comparison, HostCopy, brought
from .data_group import drain
from .group import MEAN, SUM, ShardGroup, Work
from .pool import BufferPool, Slot

# ---- interface, and one rank -----------------------------------------------------------------------------------------


class Dtypes(NamedTuple):
    """The dtypes of one reduction (see policy/policies.py)."""

    wire: torch.dtype
    reduce: torch.dtype
    sum: torch.dtype
    gradient: torch.dtype


class FirstStage(ABC):
    """The sum over the shard ranks, in flight."""

    # Whether it sends nothing: the chunk is the send buffer, in which the replicas sum.
    in_send_buffer = False
    # Whether the sum is in a buffer that will be reused, so that the caller must get a copy.
    reuses = False

    @property
    @abstractmethod
    def held_nbytes(self) -> int:
        """Bytes of the send and receive buffers of messages in flight."""

    @abstractmethod
    def total(self) -> Tensor:
        """Wait; return this rank's chunk (chunk_numel,): the sum, scaled by `Scale.before`; writable. Call it once."""

    def release(self) -> None:  # noqa: B027  (nor those that own their chunk)
        """The chunk is no longer needed."""

    @abstractmethod
    def abandon(self) -> None:
        """Instead of `total`: wait and discard the result."""


class Reduction(Protocol):
    """A reduction in flight."""

    @property
    def keeps(self) -> bool:
        """Whether its result is a partial sum."""
        ...

    @property
    def is_replicating(self) -> bool:
        """Whether the message in flight is the all-reduce over the replicas."""
        ...

    @property
    def has_next(self) -> bool:
        """Whether an all-reduce over the replicas follows."""
        ...

    @property
    def keeps_send_buffer(self) -> bool:
        """Whether the send buffer stays in use to the end, because the last message sums in it."""
        ...

    @property
    def held_nbytes(self) -> int:
        """Bytes of the send and receive buffers of the first messages; 0 once they were received."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer that the replicas all-reduce, unless it is the send buffer; 0 during the first stage."""
        ...

    @property
    def present(self) -> HostCopy | None:
        """After `collect`: flags of the gradients that some rank produced, one per parameter, if that is not known yet.
        The others are zero and must be dropped."""
        ...

    def advance(self) -> None:
        """Wait for the message in flight and send the next one. Does nothing after the last."""
        ...

    def collect(self) -> list[Tensor | None]:
        """Wait for the result: one tensor per parameter, None if no rank produced a gradient. Call it once.

        The mean gradient shard, unpadded local shape, gradient dtype; or, if issued with `keep`, the partial sum:
        (padded_local_numel,), reduce dtype. The tensors are new and belong to the caller.
        """
        ...

    def abandon(self) -> None:
        """Wait and discard the result."""
        ...


class ReduceChannel(Protocol):
    """Reduces the gradients of one param group."""

    @property
    def carries(self) -> bool:
        """Whether a reduction can carry a comparison to all ranks of the mesh."""
        ...

    def issue(
        self,
        gradients: Sequence[Tensor | None],
        *,
        accumulated: bool,
        partials: Sequence[Tensor | None] = (),
        keep: bool = False,
        carried: Comparison | None = None,
    ) -> Reduction:
        """Send `gradients`, one full gradient (unpadded shape) per parameter of the flat layout or None.

        `accumulated`: they are sums over several backwards in the reduce dtype. The gradients may be freed on return.
        `partials`: results of earlier reductions with `keep`, per parameter; they are added, and stay the caller's.
        `keep`: stop before the all-reduce over the replicas.
        `carried`: sent with the message, if the channel `carries`.
        """
        ...


class LocalReduce:
    """One rank: its gradients are the result."""

    carries = False

    def __init__(self, gradient: torch.dtype, divide_factor: float | None) -> None:
        self._dtype = gradient
        self._factor = divide_factor

    def issue(
        self,
        gradients: Sequence[Tensor | None],
        *,
        accumulated: bool,
        partials: Sequence[Tensor | None] = (),
        keep: bool = False,
        carried: Comparison | None = None,
    ) -> Reduction:
        found = [gradient for gradient in gradients if gradient is not None]
        dtypes = {gradient.dtype for gradient in found}
        if not found or (self._factor is None and dtypes == {self._dtype}):
            # `contiguous`: an expanded zero for a missing gradient cannot be written.
            return _Local([None if gradient is None else gradient.contiguous() for gradient in gradients])
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
        return _Local([None if gradient is None else next(parts) for gradient in gradients])


def _pieces(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """`flat`, cut into contiguous tensors of the shapes of `like`."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


class _Local:
    keeps = has_next = keeps_send_buffer = is_replicating = False
    nbytes = held_nbytes = 0
    present = None

    def __init__(self, gradients: list[Tensor | None]) -> None:
        self._gradients = gradients

    def advance(self) -> None:
        pass

    def collect(self) -> list[Tensor | None]:
        return self._gradients

    def abandon(self) -> None:
        self._gradients = []


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


class Chunks(Protocol):
    """The shapes of a chunk: `MessageReduce`."""

    layout: ReduceLayout

    def split(self, mean: Tensor, complete: bool) -> tuple[list[Tensor | None], HostCopy | None]: ...

    def without_absent(
        self, parts: list[Tensor | None], chunk: Tensor
    ) -> tuple[list[Tensor | None], HostCopy | None]: ...


class AfterSum(NamedTuple):
    """Steps 2 to 4 for one group."""

    replicate: ShardGroup | None
    scale: Scale
    dtypes: Dtypes
    hook: Callable[[Tensor], object] | None
    hook_stream: Any
    # The backend reduced the chunk, in the reduce dtype.
    native: bool

    @property
    def averages(self) -> bool:
        """Whether the backend takes the mean, so that nothing is divided here."""
        return self.native and self.scale.averages


class StagedReduction:
    """One reduction with all of its messages. See `comm.reduction.Reduction`."""

    def __init__(
        self,
        chunks: Chunks,
        after: AfterSum,
        first: FirstStage,
        complete: bool,
        partials: Sequence[Tensor | None],
        *,
        keep: bool,
        carried: Comparison | None = None,
    ) -> None:
        self._chunks = chunks
        self._after = after
        self._first = first
        self._complete = complete
        self._partials = partials
        # Without replicas the sum is complete, so there is no partial sum to keep.
        self.keeps = keep and after.replicate is not None
        self._carried = carried
        # See `Reduction.present`.
        self.present: HostCopy | None = None
        self._total: Tensor | None = None
        self._work: Work | None = None
        if first.in_send_buffer:
            self.advance()

    @property
    def is_replicating(self) -> bool:
        return self._work is not None

    @property
    def has_next(self) -> bool:
        return self._total is None and self._after.replicate is not None and not self.keeps

    @property
    def keeps_send_buffer(self) -> bool:
        return self._first.in_send_buffer

    @property
    def held_nbytes(self) -> int:
        return self._first.held_nbytes if self._total is None else 0

    @property
    def nbytes(self) -> int:
        return 0 if self._total is None or self._work is None or self._first.in_send_buffer else self._total.nbytes

    def advance(self) -> None:
        self._advanced()

    def _advanced(self) -> Tensor:
        if self._total is not None:
            return self._total
        total = self._first.total()
        if self._partials:
            self._add_partials(total)
        self._total = total
        replicate = self._after.replicate
        if replicate is not None and not self.keeps:
            if self._carried is not None:
                self._carried.ask_replicas(replicate)
            self._work = replicate.all_reduce(total, MEAN if self._after.averages else SUM)
        return total

    def collect(self) -> list[Tensor | None]:
        total = self._advanced()
        try:
            if self._work is not None:
                self._work.wait()
            if self._carried is not None:
                self._carried.arrive()
            found = self._kept(total) if self.keeps else self._chunks.split(self._finished(total), self._complete)
            parts, self.present = found
            return parts
        finally:  # a hook may raise
            self._total = self._work = None
            self._first.release()

    def abandon(self) -> None:
        if self._carried is not None:
            self._carried.abandon()
        if self._total is None:
            self._first.abandon()
            return
        if self._work is not None:
            drain(self._work)
        self._first.release()

    # ---- steps ---------------------------------------------------------------------------------------------

    def _add_partials(self, total: Tensor) -> None:
        layout = self._chunks.layout
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

    def _kept(self, total: Tensor) -> tuple[list[Tensor | None], HostCopy | None]:
        kept = total.to(self._after.dtypes.reduce, copy=self._first.reuses)
        segments = self._chunks.layout.pack.segments
        parts: list[Tensor | None] = [kept.narrow(0, s.offset, s.padded_numel) for s in segments]
        return (parts, None) if self._complete else self._chunks.without_absent(parts, kept)

    def _finished(self, total: Tensor) -> Tensor:
        after = self._after
        result = total
        if after.hook is not None:
            result = result.to(after.dtypes.reduce)
            # Without the grad-present flags, which follow the gradients and which the hook must not change.
            _call(after.hook, result[: self._chunks.layout.grad_present_offset], after.hook_stream)
        if after.scale.after != 1:
            result = result / after.scale.after if self._first.reuses else result.div_(after.scale.after)
        return result.to(after.dtypes.gradient, copy=self._first.reuses and result is total)


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


class MessageReduce:
    """Base of the strategies over several ranks: the send buffer and the shapes of the result."""

    # Whether chunks arrive unreduced, so that digests in them can be compared.
    compares = True

    def __init__(
        self, group: ShardGroup, layout: ReduceLayout, dtypes: Dtypes, pool: BufferPool, scale: Scale, after: AfterSum
    ) -> None:
        self.group = group
        self.layout = layout
        # Elements of the send buffer.
        self.numel = layout.numel
        self.dtypes = dtypes
        self.pool = pool
        self.scale = scale
        self.after = after
        self.device = group.device
        world = group.world
        pack = layout.pack
        self._targets = [_Target.of(layout, i) for i in layout.packed]
        # (local shape, contiguous stride, offset) of this rank's part of each parameter in one chunk
        self.parts = [
            (shape := segment.layout.local_shape(group.rank), contiguous_stride(shape), segment.offset)
            for segment in pack.segments
        ]
        self._zeroed = layout.padding if len(layout.padding) <= _PADDINGS else ((0, layout.message_numel),)
        self._world = world
        self._all_present = len(pack.segments)
        # [start, stop) of flags and the padding after them, which nobody reads: one operation writes both.
        flags = layout.grad_present_offset - layout.message_start
        tail = flags + self._all_present, layout.message_numel
        self._flags = (flags, tail[1]) if layout.facts_numel == 0 and tail in self._zeroed else None
        self._keys: dict[tuple[str, torch.dtype], int] = {}

    def issue(
        self,
        gradients: Sequence[Tensor | None],
        *,
        accumulated: bool,
        partials: Sequence[Tensor | None] = (),
        keep: bool = False,
        carried: Comparison | None = None,
    ) -> Reduction:
        dtype = self.send_dtype(accumulated)
        send, complete = self.fill(gradients, dtype)
        if carried is not None and self.compares:
            carried.write(self.facts_rows(send.tensor, self._world, self.layout.message_start))
        first = self.send(send, dtype, gradients, carried)
        return StagedReduction(self, self.after, first, complete, partials, keep=keep, carried=carried)

    @property
    def carries(self) -> bool:
        """Whether a reduction can carry a comparison."""
        dtypes = {self.dtypes.wire, self.dtypes.reduce, self.dtypes.sum}
        return (self.compares or not self.after.native) and dtypes <= CARRIERS

    def facts_rows(self, buffer: Tensor, count: int, start: int = 0) -> Tensor:
        """The digests in `count` chunks of `buffer`, which begin at element `start` of each: (count, FACTS_NUMEL)."""
        layout = self.layout
        return buffer.as_strided((count, FACTS_NUMEL), (layout.chunk_numel - start, 1), layout.facts_offset - start)

    def send_dtype(self, accumulated: bool) -> torch.dtype:
        """The dtype of gradients in the send buffer: the wire dtype, or the reduce dtype of accumulated gradients."""
        return self.dtypes.reduce if accumulated else self.dtypes.wire

    @abstractmethod
    def send(
        self, send: Slot, dtype: torch.dtype, gradients: Sequence[Tensor | None], carried: Comparison | None
    ) -> FirstStage:
        """Send the buffer and the direct ones of `gradients`; the stage returns the buffer to the pool. `carried`
        compares the received digests, if any."""

    def key(self, use: str, dtype: torch.dtype) -> int:
        found = self._keys.get((use, dtype))
        if found is None:
            found = self._keys[use, dtype] = self.pool.key(use, self.layout, dtype)
        return found

    def fill(self, gradients: Sequence[Tensor | None], dtype: torch.dtype) -> tuple[Slot, bool]:
        """A send buffer with packed gradients and their flags; and whether all gradients, direct ones too, exist."""
        # Other ranks receive its padding. Of a kept buffer that is zeroed once and never written.
        keeps = self.pool.keeps
        slot = self.pool.take(self.key("send", dtype), self.numel, dtype, self.device, self._send_views, zeroed=keeps)
        grad_present = slot.views[-1]
        sources, destinations = [], []
        complete = True
        for gradient in gradients:
            complete = complete and gradient is not None
        if not keeps:
            chunks = slot.tensor.view(self._world, -1)
            zeroed = self._zeroed
            if complete and self._flags is not None:
                start, stop = self._flags
                grad_present, zeroed = chunks[:, start:stop], tuple(span for span in zeroed if span[1] != stop)
            for start, stop in zeroed:
                chunks[:, start:stop].zero_()
        views = iter(slot.views)
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
            grad_present.copy_(brought([int(g is not None) for g in gradients], dtype, self.device))
        return slot, complete

    def _send_views(self, send: Tensor) -> list[Tensor]:
        layout = self.layout
        views = []
        for _, regions, rows in self._targets:
            for sizes, _, _, start, strides in regions:
                shape = (sizes, strides) if rows is None else (rows, (*strides[:-2], strides[-1]))
                views.append(send.as_strided(*shape, start))
        grad_present = (self._world, self._all_present)
        views.append(
            send.as_strided(grad_present, (layout.message_numel, 1), layout.grad_present_offset - layout.message_start)
        )
        return views

    def split(self, mean: Tensor, complete: bool) -> tuple[list[Tensor | None], HostCopy | None]:
        """The parameters' shards of the reduced chunk, and flags of those that some rank had; see `without_absent`.
        `complete`: this rank had all gradients, so all are present."""
        parts: list[Tensor | None] = [mean.as_strided(shape, stride, offset) for shape, stride, offset in self.parts]
        return (parts, None) if complete else self.without_absent(parts, mean)

    def without_absent(self, parts: list[Tensor | None], chunk: Tensor) -> tuple[list[Tensor | None], HostCopy | None]:
        """`parts` of a reduced chunk, None where no rank had a gradient.

        On a device the host does not wait to know which are: all parts are returned, and the flags that say which of
        them some rank had."""
        start = self.layout.grad_present_offset
        present = chunk[start : start + self._all_present]
        if self.device.type != "cpu":
            return parts, HostCopy(present)
        return [part if there else None for part, there in zip(parts, present.tolist(), strict=True)], None


def sum_in_order(chunks: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of two or more `chunks` (n,), added in their order in `dtype`."""
    if chunks[0].dtype is dtype:
        total = torch.add(chunks[0], chunks[1])
        later = chunks[2:]
    else:
        total = chunks[0].to(dtype)
        later = chunks[1:]
    for chunk in later:
        total.add_(chunk)
    return total


class BothEnds(FirstStage):
    """A message with a send and a receive buffer of the pool."""

    def __init__(self, pool: BufferPool, work: Work, send: Slot, receive: Slot) -> None:
        self._pool = pool
        self._work = work
        self._send = send
        self._receive = receive

    @property
    def held_nbytes(self) -> int:
        return self._send.tensor.nbytes + self._receive.tensor.nbytes

    def abandon(self) -> None:
        drain(self._work)
        self.give_back()

    def give_back(self) -> None:
        """Return both buffers to the pool, once the message completed."""
        self._pool.give(self._send)
        self._pool.give(self._receive)
