"""Ranks as nodes of equally many neighbours, and what a reduction in two hops makes of that.

Six ranks on two nodes; a digit is a rank, and the chunk of gradients that this rank will own:

    nodes                   [ 0 1 2 ] [ 3 4 5 ]         rank = node * local + place
    send buffer, flat        0 1 2 3 4 5                a chunk for each receiving rank, in rank order
    send buffer, two hops    0 3 | 1 4 | 2 5            by place, then by node: each place gets one run

In the first hop the ranks of a node exchange runs, so that place p has what its node knows of chunks p, p + 3, and adds
it; in the second one the ranks of equal place exchange these sums, one chunk to each node. Between nodes a rank sends
`nodes - 1` chunks, where a flat exchange sends `world - local`: `local` times as many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from .shard import require_int

# What `auto` makes of ranks on several nodes with several ranks each. By counted bytes: no network between nodes has
# been measured (ADR 0034).
ACROSS_NODES = "hierarchical"


class SlotGrid(NamedTuple):
    """Neighbouring ranks whose chunks are a regular grid in a send buffer. Slots and strides count chunks."""

    first_rank: int
    # One or two axes of ranks, the last one the faster.
    sizes: tuple[int, ...]
    # From one index of each axis to the next: ranks, and slots.
    rank_strides: tuple[int, ...]
    slot: int
    slot_strides: tuple[int, ...]


class NodeGrid(NamedTuple):
    """`nodes` nodes of `local` ranks each; rank r is on node r // local, at place r % local.

    >>> NodeGrid(2, 3).slot(4), [grid.sizes for grid in NodeGrid(2, 3).grids(1, 5)]
    (3, [(2,), (1, 3)])
    """

    nodes: int
    local: int

    @property
    def world(self) -> int:
        return self.nodes * self.local

    @property
    def has_two_hops(self) -> bool:
        """Whether both hops send something: otherwise one exchange is all there is."""
        return self.nodes > 1 and self.local > 1

    def slot(self, rank: int) -> int:
        """Where in the send buffer the chunk of `rank` is: by place, then by node."""
        node, place = divmod(rank, self.local)
        return place * self.nodes + node

    def grids(self, first: int, ranks: int) -> Iterator[SlotGrid]:
        """The ranks [first, first + ranks) as grids: the rest of a node, whole nodes, the beginning of another."""
        stop = first + ranks
        while first < stop:
            whole, place = (stop - first) // self.local, first % self.local
            if place == 0 and whole:
                yield SlotGrid(first, (whole, self.local), (self.local, 1), self.slot(first), (1, self.nodes))
                first += whole * self.local
            else:
                taken = min(self.local - place, stop - first)
                yield SlotGrid(first, (taken,), (1,), self.slot(first), (self.nodes,))
                first += taken


def flat_grids(first: int, ranks: int) -> Iterator[SlotGrid]:
    """As `NodeGrid.grids` for a send buffer in rank order."""
    yield SlotGrid(first, (ranks,), (1,), first, (1,))


def node_grid(ranks: Sequence[int], local_world: int) -> NodeGrid:
    """How a group of `ranks` (of the default group, in group order) lies on nodes of `local_world` consecutive ranks.

    Raises `ValueError` where its nodes do not have equally many of them, or they are not in ascending order.

    >>> node_grid((0, 1, 2, 3), 2), node_grid((1, 3, 5, 7), 4), node_grid((4, 5), 8)
    (NodeGrid(nodes=2, local=2), NodeGrid(nodes=2, local=2), NodeGrid(nodes=1, local=2))
    """
    require_int("local_world", local_world, 1, "give the number of ranks on each node, as LOCAL_WORLD_SIZE")
    runs = [(node, len(list(members))) for node, members in groupby(rank // local_world for rank in ranks)]
    if list(ranks) != sorted(ranks) or len({size for _, size in runs}) > 1:
        found = ", ".join(f"{size} of node {node}" for node, size in runs[:8]) + (", ..." if len(runs) > 8 else "")
        raise ValueError(
            f"hierarchical: expected as many ranks of each node, in ascending order, found {found} among ranks "
            f"{', '.join(map(str, ranks[:16]))}{', ...' if len(ranks) > 16 else ''} with {local_world} ranks on a "
            f"node; set FULLSHARD_LOCAL_WORLD_SIZE to the ranks of a node, use a mesh that follows the nodes, or "
            f"FULLSHARD_COMMUNICATION=torch"
        )
    return NodeGrid(len(runs), runs[0][1])


def reduces_in_hops(strategy: str, grid: NodeGrid | None) -> bool:
    """Whether gradients are reduced first within nodes, then between them. None: where the nodes are is not known.

    >>> reduces_in_hops("auto", NodeGrid(2, 8)), reduces_in_hops("auto", NodeGrid(1, 8)), reduces_in_hops("auto", None)
    (True, False, False)
    """
    if grid is None or not grid.has_two_hops:
        return False
    return strategy == "hierarchical" or (strategy == "auto" and ACROSS_NODES == "hierarchical")
