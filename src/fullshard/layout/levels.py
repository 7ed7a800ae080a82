"""Ranks of one group on several nodes, for messages in two levels: between nodes first, within each node after.

A ring over all W ranks sends (W - 1) / W of a unit over each link between nodes, and messages from rank to rank send L
times what has to cross, with L ranks on each of N nodes. In two levels (N - 1) / N crosses: a rank exchanges with those
of the same index on other nodes, its *counterparts*, and passes on to its *neighbours* on its node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Beyond, two levels save a tenth or less of what a ring sends, and cost a second stage.
MOST_NODES = 8


class Levels(NamedTuple):
    """`nodes[n][i]`: the rank in the group of the i-th rank of node n."""

    nodes: tuple[tuple[int, ...], ...]

    def place(self, rank: int) -> tuple[int, int]:
        """Returns the node of `rank`, and its index there."""
        return next((n, ranks.index(rank)) for n, ranks in enumerate(self.nodes) if rank in ranks)

    def others(self, rank: int) -> tuple[int, ...]:
        """Returns the other nodes, the one after that of `rank` first, so that not all ranks send to the same."""
        node, count = self.place(rank)[0], len(self.nodes)
        return tuple((node + step) % count for step in range(1, count))

    def counterparts(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks of other nodes with the index of `rank`, in the order of `others`."""
        index = self.place(rank)[1]
        return tuple(self.nodes[node][index] for node in self.others(rank))

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Returns the other ranks of the node of `rank`, in their order."""
        return tuple(other for other in self.nodes[self.place(rank)[0]] if other != rank)


def levels_of(nodes: Sequence[str]) -> Levels | None:
    """Returns the levels of a group whose ranks are on `nodes`, in the order of the ranks; None where one level is as
    good: on one node, on more than `MOST_NODES`, with one rank on each, or with unequal numbers of ranks.

    >>> levels_of(["a", "a", "b", "b"])
    Levels(nodes=((0, 1), (2, 3)))
    >>> levels_of(["a", "b", "a", "b"])
    Levels(nodes=((0, 2), (1, 3)))
    >>> levels_of(["a", "b"]), levels_of(["a", "a", "b"]), levels_of(["a", "a"])
    (None, None, None)
    """
    found: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    sizes = {len(ranks) for ranks in found.values()}
    if not 1 < len(found) <= MOST_NODES or len(sizes) > 1 or sizes == {1}:
        return None
    return Levels(tuple(map(tuple, found.values())))
