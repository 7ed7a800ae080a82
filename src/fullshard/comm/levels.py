"""Reduces gradients of ranks on several nodes over messages from rank to rank, in two levels (`layout.levels`):

    1  within a node        each rank gets, of its neighbours, the chunks of its own counterparts and of itself,
                            and adds them in the order of the neighbours' ranks
    2  between nodes        each rank sends each counterpart the sum of its node, and adds the sums of all nodes in
                            the order of the nodes

or in one: each rank gets, of all others, its own chunk, and makes the same sums in the same order with the same
roundings. So the way that is faster gives the same bits as the other one, whatever arrives first, and two runs may take
different ways. What is sent is in the reduce dtype, as with a backend's reduce-scatter; sums are taken in the sum
dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import Levels, ReduceLayout
from .group import GRADIENTS_TAG, ONE_LEVEL_TAG, ShardGroup
from .pool import BufferPool
from .reduce import MessageReduce, Parts, StagedReduction, Summation, sum_in_order
from .relay import Relayed, relay


class LevelReduce(MessageReduce):
    """Sends over a `group` that has levels, and sums here. Results have the same bits in both ways."""

    compares = False

    def __init__(self, group: ShardGroup, layout: ReduceLayout, pool: BufferPool, sums: Summation) -> None:
        super().__init__(group, layout, pool, sums)
        assert group.levels is not None
        self.carries = True
        self._levels: Levels = group.levels
        self._in_one = group.ways.reduce != "levels"
        # Divides before, as a backend's reduction: a sum of many float16 gradients overflows.
        self._divides_first = sums.scale.overflows
        if self._divides_first:
            self.divisor = 1.0
        self._key = pool.key("levels", layout, sums.dtypes.reduce)

    def send(self, flight: StagedReduction, dtype: torch.dtype, gradients: Parts) -> None:
        (send,) = flight.buffers
        if self._divides_first and self.sums.scale.before != 1:
            send.tensor.div_(self.sums.scale.before)
        group, chunk = self.group, self.layout.chunk_numel
        receive = self.pool.take(self._key, group.world * chunk, dtype, group.device, self._chunks)
        flight.buffers = send, receive
        leaving = list(send.tensor.view(group.world, chunk).unbind())
        if self._in_one:
            arriving = {peer: [view] for peer, view in self._arriving(receive.views).items()}
            work = group.exchange_each(arriving, {peer: [leaving[peer]] for peer in arriving}, ONE_LEVEL_TAG)
        else:
            work = group.send(
                reduce_in_levels, group.process_group, self._levels, leaving, receive.views, self.sums.dtypes.sum
            )
        flight.works = (work,)
        if flight.carried is not None:
            flight.carried.ask_sharers(group)

    def total(self, flight: StagedReduction) -> Tensor:
        if flight.carried is not None:
            flight.carried.answered()
        send, receive = flight.buffers
        if not self._in_one:
            return sum_in_order(receive.views[: len(self._levels.nodes)], self.sums.dtypes.sum)
        rank, dtype = self.group.rank, self.sums.dtypes.sum
        arrived = self._arriving(receive.views)
        own = send.tensor.view(self.group.world, -1)[rank]
        sums = []
        for ranks in self._levels.nodes:
            chunks = [own if peer == rank else arrived[peer] for peer in ranks]
            sums.append(out := chunks[1] if ranks[0] == rank else chunks[0])
            _sum_into(out, chunks, dtype)
        return sum_in_order(sums, dtype)

    def _chunks(self, receive: Tensor) -> list[Tensor]:
        return list(receive.view(-1, self.layout.chunk_numel).unbind())

    def _arriving(self, views: Sequence[Tensor]) -> dict[int, Tensor]:
        """Where the chunk of each other rank arrives in one level."""
        return {peer: views[peer] for peer in range(self.group.world) if peer != self.group.rank}


def reduce_in_levels(
    group: dist.ProcessGroup, levels: Levels, leaving: Sequence[Tensor], receive: Sequence[Tensor], dtype: torch.dtype
) -> Relayed:
    """Reduce the chunks `leaving[r]` (n,) of all ranks to rank r. When the work has completed, the first of `receive`
    hold the sums of the nodes, in their order; the others are overwritten. `dtype`: of sums within a node."""
    rank, count = group.rank(), len(levels.nodes)
    node, index = levels.place(rank)
    ranks, neighbours, others = levels.nodes[node], levels.neighbours(rank), levels.others(rank)
    sums = receive[:count]
    # By neighbour and node.
    arrived = {(peer, n): receive[count * (1 + i) + n] for i, peer in enumerate(neighbours) for n in range(count)}
    order = (*others, node)
    # All receives first, see `exchange_each`.
    first = {(peer, n): group.recv([arrived[peer, n]], peer, GRADIENTS_TAG) for n in order for peer in neighbours}
    works: list[Any] = [group.recv([sums[n]], levels.nodes[n][index], GRADIENTS_TAG) for n in others]
    works += [
        group.send([leaving[levels.nodes[n][levels.place(peer)[1]]]], peer, GRADIENTS_TAG)
        for n in order
        for peer in neighbours
    ]

    def pass_on() -> Iterator[Any]:
        try:
            for n in order:
                for peer in neighbours:
                    first.pop((peer, n)).wait()
                own = leaving[levels.nodes[n][index]]
                chunks = [own if peer == rank else arrived[peer, n] for peer in ranks]
                if n == node:
                    _sum_into(sums[n], chunks, dtype)
                    continue
                # `sums[n]` is where the sum of that node arrives: this one leaves from a neighbour's place.
                out = arrived[neighbours[0], n]
                _sum_into(out, chunks, dtype)
                yield group.send([out], levels.nodes[n][index], GRADIENTS_TAG)
        finally:
            for work in first.values():
                _end(work)

    return relay(group, GRADIENTS_TAG, Relayed(works, pass_on))


def _sum_into(out: Tensor, chunks: Sequence[Tensor], dtype: torch.dtype) -> None:
    """The sum of `chunks` in their order, in `dtype`, rounded once; `out` may be one of the first two."""
    if dtype is out.dtype:
        sum_in_order(chunks, dtype, out)
    else:
        out.copy_(sum_in_order(chunks, dtype))


def _end(work: Any) -> None:
    """Wait for a receive whose message failed, so that its memory is free."""
    with suppress(RuntimeError):
        work.wait()
