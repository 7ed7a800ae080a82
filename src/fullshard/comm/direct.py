"""Gradients that are sent from where autograd put them: nothing is packed, nothing is cast, one sum on arrival.

    direct parameters   one all-to-all each: the parts of the ranks are runs of the gradient, of unequal length where
                        the rows do not divide
    all others          one all-to-all of the message, with presence, as everywhere
    launches            on NCCL several of these are one launch, but not all: the first ones are to be received while
                        the others travel (`layout.launches`)
    sum                 for each message one operation that reads what every rank sent, adds it in the sum dtype, and
                        divides: 1/W of the gradients are written, where adding rank by rank writes all of them

The order in which that operation adds depends on the number of ranks and nothing else, so results are the same from run
to run. Gradients stay in memory until their message was received: they are the send buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import ReduceLayout, launches
from ..policy import Scale
from .comparison import Comparison
from .data_group import drain
from .group import Message, ShardGroup, Work
from .message import MessageReduce, sum_of_rows
from .pool import BufferPool, Slot
from .reduction import Dtypes, FirstStage
from .replicate import AfterSum


class _Run(NamedTuple):
    """One direct parameter. Counts are elements."""

    position: int
    # Of the whole gradient; of each rank's part of it, or () where they are equal; of this rank's.
    numel: int
    numels: tuple[int, ...]
    own_numel: int
    # Which piece of the chunk is this rank's part.
    piece: int


class _Arriving(NamedTuple):
    """A direct gradient under way. Both ends of the message, `nbytes` together, are kept until it was waited for."""

    run: _Run
    sent: Tensor
    receive: Slot
    nbytes: int


class DirectReduce(MessageReduce):
    """See the module. `layout.direct` may be empty."""

    def __init__(
        self, group: ShardGroup, layout: ReduceLayout, dtypes: Dtypes, pool: BufferPool, scale: Scale, after: AfterSum
    ) -> None:
        super().__init__(group, layout, dtypes, pool, scale, after)
        self._runs: list[_Run] = []
        # A chunk is cut into these numbers of elements: parts, padding, and the message at the end.
        self.pieces: list[int] = []
        reached = 0
        for index in layout.direct:
            segment = layout.pack.segments[index]
            numels = tuple(segment.layout.local_numel(rank) for rank in range(group.world))
            own = numels[group.rank]
            if segment.offset > reached:
                self.pieces.append(segment.offset - reached)
            is_even = len(set(numels)) == 1
            self._runs.append(_Run(index, segment.layout.numel, () if is_even else numels, own, len(self.pieces)))
            self.pieces.append(own)
            reached = segment.offset + own
        if layout.message_start > reached:
            self.pieces.append(layout.message_start - reached)
        self.pieces.append(layout.message_numel)
        self.chunk_numel = layout.chunk_numel
        self._launches = launches([*(run.numel for run in self._runs), layout.numel])
        self.padding = layout.unwritten(group.rank)
        self._receive_keys: dict[torch.dtype, list[int]] = {}

    def send(
        self, send: Slot, dtype: torch.dtype, gradients: Sequence[Tensor | None], carried: Comparison | None
    ) -> FirstStage:
        keys = self._receive_keys.get(dtype)
        if keys is None:
            known = [("direct", run.own_numel, self.group.world, dtype) for run in self._runs]
            keys = self._receive_keys[dtype] = [self.pool.key(*parts) for parts in known]
        arriving = [
            self._ends(run, gradients[run.position], dtype, key) for run, key in zip(self._runs, keys, strict=True)
        ]
        receive = self.pool.take(self.key("receive", dtype), self.numel, dtype, self.device)
        messages: list[Message] = [(each.receive.tensor, each.sent, each.run.numels) for each in arriving]
        messages.append((receive.tensor, send.tensor, ()))
        works = [work for start, stop in self._launches for work in self.group.exchange_all(messages[start:stop])]
        return _Direct(self, works, send, receive, arriving, carried)

    def _ends(self, run: _Run, gradient: Tensor | None, dtype: torch.dtype, key: int) -> _Arriving:
        """What is sent of one gradient, and where it arrives."""
        if gradient is None:
            sent = torch.zeros(run.numel, dtype=dtype, device=self.device)
        else:
            # The gradient itself, unless it lies otherwise in memory or was made in another dtype.
            sent = (gradient if gradient.dtype is dtype else gradient.to(dtype)).reshape(-1)
        arriving_numel = self._world * run.own_numel
        receive = self.pool.take(key, arriving_numel, dtype, self.device)
        return _Arriving(run, sent, receive, (run.numel + arriving_numel) * dtype.itemsize)

    def sum_into(self, out: Tensor, received: Tensor) -> None:
        """What every rank sent, (world * n,), summed and scaled into `out` (n,), which has the sum dtype."""
        sum_of_rows(received.view(self._world, -1), self.dtypes.sum, self.scale.before, out)


class _Direct(FirstStage):
    def __init__(
        self,
        channel: DirectReduce,
        works: list[Work],
        send: Slot,
        receive: Slot,
        arriving: list[_Arriving],
        carried: Comparison | None,
    ) -> None:
        """`works`: of `arriving`, and of the message behind them. Some may be the same one."""
        self._channel = channel
        self._works = deque(works)
        self._send = send
        self._receive = receive
        self._carried = carried
        # In the order in which they were sent.
        self._arriving = deque(arriving)
        # Made when the first one is received: the chunk, and its pieces.
        self._total: Tensor | None = None
        self._pieces: Sequence[Tensor] = ()
        self._held_nbytes = 2 * send.tensor.nbytes + sum([each.nbytes for each in arriving])

    @property
    def held_nbytes(self) -> int:
        return self._held_nbytes

    def shrink(self, nbytes: int) -> bool:
        shrunk = bool(self._arriving)
        while nbytes > 0 and self._arriving:
            nbytes -= self._arriving[0].nbytes
            self._receive_one()
        return shrunk

    def total(self) -> Tensor:
        while self._arriving:
            self._receive_one()
        self._works.popleft().wait()
        channel, total = self._channel, self._made()
        if self._carried is not None:
            rows = channel.facts_rows(self._receive.tensor, channel.group.world, channel.layout.message_start)
            self._carried.met(rows)
        channel.sum_into(self._pieces[-1], self._receive.tensor)
        self._give_back()
        return total

    def abandon(self) -> None:
        while self._works:
            drain(self._works.popleft())
        for arriving in self._arriving:
            self._channel.pool.give(arriving.receive)
        self._arriving.clear()
        self._give_back()

    def _made(self) -> Tensor:
        if self._total is None:
            channel = self._channel
            self._total = torch.empty(channel.chunk_numel, dtype=channel.dtypes.sum, device=channel.device)
            self._pieces = self._total.split_with_sizes(channel.pieces)
            if channel.padding:
                torch._foreach_zero_([self._total[start:stop] for start, stop in channel.padding])
        return self._total

    def _receive_one(self) -> None:
        """Add what the oldest message brings, and give both of its ends up."""
        self._made()
        run, _, receive, nbytes = self._arriving.popleft()
        self._works.popleft().wait()
        if run.own_numel:  # not on a rank past the end
            self._channel.sum_into(self._pieces[run.piece], receive.tensor)
        self._channel.pool.give(receive)
        self._held_nbytes -= nbytes

    def _give_back(self) -> None:
        self._channel.pool.give(self._send)
        self._channel.pool.give(self._receive)
