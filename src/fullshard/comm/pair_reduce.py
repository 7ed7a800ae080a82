"""A reduction whose large gradients are sent from where autograd left them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import ReduceLayout
from ..policy import Scale
from .comparison import Comparison
from .data_group import drain
from .group import ShardGroup, Work
from .message import MessageReduce
from .pairs import GRADIENTS_TAG
from .pool import BufferPool, Slot
from .reduction import Dtypes, FirstStage
from .replicate import AfterSum


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
