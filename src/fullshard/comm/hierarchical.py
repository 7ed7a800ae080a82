"""A reduction in two hops: within each node, then between nodes. `layout.nodes` says where chunks lie in the buffer.

    hop        with whom                          what a rank sends                        dtype
    EXCHANGE   the ranks of its node              a run for each: its gradients of one     wire (accumulated: reduce)
                                                  chunk for each node
    NODES      those of its place on each node    the sums of its node, a chunk to each    sum, or narrower by choice

With N nodes of L ranks, C1 and C2 the casts to these dtypes and every sum from left to right in the sum dtype:

    chunk of rank r = ( sum over nodes n = 0 .. N-1 of C2( sum over places l = 0 .. L-1 of C1(g[n * L + l]) ) ) / before

So the bits depend on N and L and on nothing that happens on the way. (Where gradients leave directly, direct.py, a sum
is one operation, whose order depends on N or L alone.) Between nodes a rank sends (N - 1) chunks; the
other strategies of our own send W - L. Each hop has a communicator of its own, and ranks send in equal order on both,
because both sends stand at places of the command sequence: the second where the executor advances the reduction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import ReduceLayout, sends_directly
from ..policy import Scale
from .comparison import Comparison
from .group import NodeLinks, ShardGroup, Work
from .message import BothEnds, MessageReduce, sum_in_order, sum_of_rows
from .pool import BufferPool, Slot
from .reduction import Dtypes, FirstStage, Hop
from .replicate import AfterSum


def partial_dtype(sent: torch.dtype, added: torch.dtype, *, narrow: bool) -> torch.dtype:
    """In which dtype the sums of a node travel, of gradients that travelled as `sent` and were added in `added`."""
    return sent if narrow and sent is torch.bfloat16 else added


class HierarchicalReduce(MessageReduce):
    """See the module. `layout.grid` is that of `nodes`.

    With `nodes.narrow_partials` sums of a node travel as its gradients did, where that is bfloat16 (float16 would
    overflow). Each is rounded once more: an error of at most 2**-8 of the sum over nodes of their absolute values.
    """

    packs_all = True

    def __init__(
        self,
        group: ShardGroup,
        nodes: NodeLinks,
        layout: ReduceLayout,
        dtypes: Dtypes,
        pool: BufferPool,
        scale: Scale,
        after: AfterSum,
    ) -> None:
        super().__init__(group, layout, dtypes, pool, scale, after)
        self.nodes = nodes
        # As direct.py has it, and why: rank by rank would be a kernel, and a pass over the memory, for each rank.
        self._in_one = sends_directly(group.backend)
        # Elements that one rank of a node has of the sums of that node.
        self.run_numel = nodes.grid.nodes * layout.chunk_numel

    def send(
        self, send: Slot, dtype: torch.dtype, gradients: Sequence[Tensor | None], carried: Comparison | None
    ) -> FirstStage:
        receive = self.pool.take(self.key("receive", dtype), self.layout.numel, dtype, self.device, self._runs)
        return _Hops(self, self.nodes.within.exchange(receive.tensor, send.tensor), send, receive, carried)

    def send_partials(self, receive: Slot, carried: Comparison | None) -> tuple[Work, Slot, Slot]:
        """Add what the ranks of this node sent, and send it to those who own it; the message and both of its ends."""
        if carried is not None:
            carried.met(self.facts_rows(receive.tensor, self.layout.pack.world))
        dtype, numel = self.dtypes.sum, self.run_numel
        partial = self.pool.take(self.key("partial", dtype), numel, dtype, self.device)
        self.add(receive, 1.0, partial.tensor)
        travels = partial_dtype(receive.tensor.dtype, dtype, narrow=self.nodes.narrow_partials)
        if travels is not dtype:
            wide, partial = partial, self.pool.take(self.key("partial", travels), numel, travels, self.device)
            partial.tensor.copy_(wide.tensor)
            self.pool.give(wide)
        if carried is not None:
            carried.write(self.facts_rows(partial.tensor, self.nodes.grid.nodes))
        arriving = self.pool.take(self.key("partials", travels), numel, travels, self.device, self._chunks)
        return self.nodes.across.exchange(arriving.tensor, partial.tensor), partial, arriving

    def add(self, received: Slot, divisor: float, out: Tensor) -> None:
        """What all ranks of a hop sent, summed and divided into `out`, which has the sum dtype."""
        if self._in_one:
            sum_of_rows(received.tensor.view(len(received.views), -1), out.dtype, divisor, out)
            return
        sum_in_order(received.views, out.dtype, out)
        if divisor != 1:
            out.div_(divisor)

    def _runs(self, receive: Tensor) -> list[Tensor]:
        return list(receive.view(self.nodes.grid.local, self.run_numel).unbind())

    def _chunks(self, arriving: Tensor) -> list[Tensor]:
        return list(arriving.view(self.nodes.grid.nodes, self.layout.chunk_numel).unbind())


class _Hops(BothEnds):
    """One reduction; both ends of the hop that is under way."""

    has_next = True

    def __init__(
        self, channel: HierarchicalReduce, work: Work, send: Slot, receive: Slot, carried: Comparison | None
    ) -> None:
        super().__init__(channel.pool, work, send, receive)
        self._channel = channel
        self._carried = carried

    def advance(self) -> None:
        self._work.wait()
        work, send, receive = self._channel.send_partials(self._receive, self._carried)
        self.give_back()
        self._work, self._send, self._receive = work, send, receive
        self.hop, self.has_next = Hop.NODES, False

    def total(self) -> Tensor:
        self._work.wait()
        channel = self._channel
        if self._carried is not None:
            self._carried.met(channel.facts_rows(self._receive.tensor, channel.nodes.grid.nodes))
        total = torch.empty(channel.layout.chunk_numel, dtype=channel.dtypes.sum, device=channel.device)
        channel.add(self._receive, channel.scale.before, total)
        self.give_back()
        return total
