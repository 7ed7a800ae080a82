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

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..guard import RanksDisagree, ask, scope_of, shown_ranks
from ..layout import NodeGrid, ReduceLayout, node_grid, reduces_in_hops, sends_directly
from ..policy import Scale
from .comparison import Comparison
from .group import Links, NodeLinks, ShardGroup, Work
from .message import BothEnds, MessageReduce, sum_in_order, sum_of_rows
from .pool import BufferPool, Slot
from .reduction import Dtypes, FirstStage, Hop
from .replicate import AfterSum

# ---- hierarchical ----------------------------------------------------------------------------------------------------


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


# ---- nodes -----------------------------------------------------------------------------------------------------------
# The ranks of this rank's node, and those of its place on every node: for reductions in two hops.
#
# They are made once for a group and serve every unit.

# By the process group of the ranks that share, with which they go.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[NodeGrid, tuple[ShardGroup, ShardGroup]]]
_made = weakref.WeakKeyDictionary()


class OnNodes:
    """Which reductions of one root go in two hops. Its ranks make the same calls in the same order."""

    def __init__(self, local_world: int | None, *, narrow_partials: bool) -> None:
        """`local_world`: how many consecutive ranks of the default group are on a node; None: not known."""
        self._local_world = local_world
        self._narrow_partials = narrow_partials
        # What was agreed on, by the ranks that share and whether it has to be known.
        self._grids: dict[tuple[tuple[int, ...], bool], NodeGrid | None] = {}

    def links(self, links: Links, strategy: str) -> Links:
        """`links` with the groups of both hops where gradients are to be reduced in two, without them elsewhere.

        Raises `ValueError` where `strategy` is "hierarchical" and the nodes are not known or do not divide the ranks,
        and `RanksDisagree` where ranks differ in them: on all of them.
        """
        grid = None
        if links.shard.world > 1:
            # Where all ranks are on one node, as everywhere without torchrun, nothing is asked.
            several = self._local_world is not None and self._local_world < dist.get_world_size()
            if strategy == "hierarchical" or (strategy == "auto" and several):
                grid = self._grid(links, required=strategy == "hierarchical")
        if grid is None or not reduces_in_hops(strategy, grid):
            return links._replace(nodes=None)
        return links._replace(nodes=NodeLinks(grid, *_groups(links, grid), self._narrow_partials))

    def _grid(self, links: Links, *, required: bool) -> NodeGrid | None:
        key = links.shard.ranks, required
        if key not in self._grids:
            self._grids[key] = _agreed_grid(links, self._local_world, required=required)
        return self._grids[key]


def _agreed_grid(links: Links, local_world: int | None, *, required: bool) -> NodeGrid | None:
    """How the ranks that share lie on nodes, the same in all groups of the mesh; None, or an error where it is
    `required`, where that cannot be said."""
    grid, problem = None, None
    if local_world is None:
        problem = ValueError(
            "hierarchical: expected to know how many ranks are on a node, found neither FULLSHARD_LOCAL_WORLD_SIZE nor "
            "LOCAL_WORLD_SIZE; start by torchrun, or set the first"
        )
    else:
        try:
            grid = node_grid(links.shard.ranks, local_world)
        except ValueError as error:
            problem = error
    scope = scope_of(links.everyone)
    here = "unknown" if local_world is None else f"{local_world} (uneven)" if grid is None else str(local_world)
    answers = None if scope is None else scope.agree("the ranks of a node", here)
    if answers is not None:
        asked_else = any(": " in answer for answer in answers.values())
        if required or asked_else:
            by_size: dict[str, list[int]] = {}
            for rank, answer in answers.items():
                by_size.setdefault(answer, []).append(rank)
            found = ", ".join(f"{size} on {shown_ranks(ranks)}" for size, ranks in by_size.items())
            raise RanksDisagree(
                f"hierarchical: expected the same number of ranks on every node, found {found}; use as many processes "
                f"on each, set FULLSHARD_LOCAL_WORLD_SIZE alike on all ranks, or FULLSHARD_COMMUNICATION=torch",
                what="ranks of a node",
                by_rank=answers,
            )
        grid = None
    elif required and problem is not None:
        raise problem
    return grid


def _groups(links: Links, grid: NodeGrid) -> tuple[ShardGroup, ShardGroup]:
    """Those of this rank's node, and of its place. Every rank makes two groups at the first time."""
    shard = links.shard
    known = _made.setdefault(shard.origin, {})
    if grid not in known:
        scope = scope_of(links.everyone)
        if scope is not None:
            # Ranks that made no groups would be waited for.
            ask(scope, f"reductions in two hops, {grid.nodes} nodes of {grid.local} ranks", "")
        node, place = divmod(shard.rank, grid.local)
        within = shard.ranks[node * grid.local : (node + 1) * grid.local]
        across = shard.ranks[place :: grid.local]
        known[grid] = shard.some(within, "fullshard_within"), shard.some(across, "fullshard_across")
    return known[grid]
