"""Base of the reductions that send messages: the send buffer and the shapes of the result."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import FACTS_NUMEL, ReduceLayout, contiguous_stride
from ..layout.flat import SendRegion
from ..policy import Scale
from .comparison import CARRIERS, Comparison, HostCopy, brought
from .data_group import drain
from .group import ShardGroup, Work
from .pool import BufferPool, Slot
from .reduction import Dtypes, FirstStage, Reduction
from .replicate import AfterSum, StagedReduction


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
        self._world = world
        self._all_present = len(pack.segments)
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
        # Padding is zeroed once and never written.
        slot = self.pool.take(self.key("send", dtype), self.numel, dtype, self.device, self._send_views, zeroed=True)
        grad_present = slot.views[-1]
        sources, destinations = [], []
        complete = True
        for gradient in gradients:
            complete = complete and gradient is not None
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
