"""Ranks of one group on several nodes: in which ways their messages can go, what crosses in each, and which is fastest.

    ring      around all ranks in their order, as a backend gathers      (W - 1) / W of a unit leave each node
    pairs     from each rank to each other one                           L times what has to cross
    levels    a rank exchanges with those of the same index on other     (N - 1) / N
              nodes, its *counterparts*, and passes on to its
              *neighbours* on its node

with W ranks, L on each of N nodes. In two levels least leaves a node, and most stays within it: N times what pairs send
there. So the rates of both decide (`fastest`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

# ---- ranks -----------------------------------------------------------------------------------------------------------


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


def levels_of(nodes: Sequence[Hashable]) -> Levels | None:
    """Returns the levels of a group whose ranks are on `nodes`, in the order of the ranks; None where there are none:
    on one node, with one rank on each, or with unequal numbers of ranks.

    >>> levels_of("aabb")
    Levels(nodes=((0, 1), (2, 3)))
    >>> levels_of("abab")
    Levels(nodes=((0, 2), (1, 3)))
    >>> levels_of("ab"), levels_of("aab"), levels_of("aa")
    (None, None, None)
    """
    found: dict[Hashable, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    sizes = {len(ranks) for ranks in found.values()}
    if len(found) < 2 or len(sizes) > 1 or sizes == {1}:
        return None
    return Levels(tuple(map(tuple, found.values())))


# ---- bytes -----------------------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """A part of a message, in each way."""

    ring: float = 0.0
    pairs: float = 0.0
    levels: float = 0.0


def crossing(groups: Sequence[Sequence[Hashable]]) -> Share:
    """The part of a message that the busiest node sends to others, over all `groups`: the nodes of their ranks, in the
    order of the ranks.

    >>> crossing(["aabb"]), crossing(["abab"])
    (Share(ring=0.75, pairs=1.0, levels=0.5), Share(ring=1.5, pairs=1.0, levels=0.5))
    """
    return _busiest(groups, leaves=True)


def staying(groups: Sequence[Sequence[Hashable]]) -> Share:
    """The part that the ranks of the busiest node send to each other.

    >>> staying(["aabb"]), staying(["ab"])
    (Share(ring=0.75, pairs=0.5, levels=1.0), Share(ring=0.0, pairs=0.0, levels=0.0))
    """
    return _busiest(groups, leaves=False)


def _busiest(groups: Sequence[Sequence[Hashable]], *, leaves: bool) -> Share:
    ring, pairs, levels = Counter[Hashable](), Counter[Hashable](), Counter[Hashable]()
    for group in groups:
        world, there = len(group), Counter(group)
        for node, following in zip(group, [*group[1:], group[0]], strict=True):
            ring[node] += ((node != following) == leaves) * (world - 1)
        for node, count in there.items():
            pairs[node] += count * ((world - count) if leaves else (count - 1))
            levels[node] += count * ((len(there) - 1) if leaves else (count - 1) * len(there))
    world = len(groups[0])
    return Share(*(max(found.values(), default=0) / world for found in (ring, pairs, levels)))


# ---- ways ------------------------------------------------------------------------------------------------------------


class Rates(NamedTuple):
    """Bytes per second that the ranks of a node send together: to those of another node, and to each other."""

    between: float
    within: float

    def __str__(self) -> str:
        return f"{self.between / 1e6:,.0f} MB/s between hosts and {self.within / 1e6:,.0f} within"


class Ways(NamedTuple):
    """How gathers go ("ring", "pairs" or "levels"), and gradients ("pairs" or "levels"; both are summed on arrival, in
    one order).

    >>> print(Ways("levels", "levels"), Ways("ring", "levels"), Ways(), sep="; ")
    two levels; two levels, gathers around a ring; one level
    """

    gather: str = "pairs"
    reduce: str = "pairs"

    def __str__(self) -> str:
        levels = "two levels" if self.reduce == "levels" else "one level"
        return f"{levels}, gathers around a ring" if self.gather == "ring" else levels


ONE_LEVEL, TWO_LEVELS = Ways(), Ways("levels", "levels")


def seconds_per_byte(crosses: Share, stays: Share, rates: Rates) -> Share:
    """The time that a byte of a message takes in each way. In one level both parts go beside each other. The stages of
    two levels may do so as well, but are added: a message that is waited for has one after the other."""
    between, within = rates
    return Share(
        max(crosses.ring / between, stays.ring / within),
        max(crosses.pairs / between, stays.pairs / within),
        crosses.levels / between + stays.levels / within,
    )


def fastest(crosses: Share, stays: Share, rates: Rates) -> Ways:
    """The fastest ways at these rates. Among equals, pairs: their messages have one stage.

    Two levels are taken where a node is faster than its link:

    >>> aabb = crossing(["aabb"]), staying(["aabb"])
    >>> fastest(*aabb, Rates(between=125e6, within=1.5e9)), fastest(*aabb, Rates(between=2e9, within=1.5e9))
    (Ways(gather='levels', reduce='levels'), Ways(gather='pairs', reduce='pairs'))
    """
    time = seconds_per_byte(crosses, stays, rates)
    reduce = "levels" if time.levels < time.pairs else "pairs"
    gather = min(("pairs", "ring", "levels"), key=lambda way: getattr(time, way))
    return Ways(gather, reduce)
