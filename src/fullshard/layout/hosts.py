"""The bytes that the interface of a host sends: the part of each message that leaves it, by where ranks are and how
their messages go (`levels`). For a plan before the launch, and for a report of what runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from .gather import sends_in_pairs
from .levels import TWO_LEVELS, Levels, Rates, Share, Ways, crossing, fastest, levels_of, staying


class HostGroups(NamedTuple):
    """The groups of a mesh on hosts. rows: the hosts of each group that shares parameters, in the order of its ranks;
    shard: the part of its messages that leaves the busiest host; stays: that the ranks of one send to each other;
    replicate: as `shard`, of the groups of replicas. exchanges: gradients go from rank to rank and are summed in the
    order of ranks; levels: of each row, if messages go in `ways` and gradients are summed in the order of hosts."""

    backend: str = ""
    rows: tuple[tuple[Hashable, ...], ...] = ()
    shard: Share = Share()
    stays: Share = Share()
    replicate: Share = Share()
    exchanges: bool = False
    levels: Levels | None = None
    ways: Ways = TWO_LEVELS

    @property
    def ranks_of_busiest(self) -> int:
        """The ranks of the host that has most of them."""
        return max(Counter(host for row in self.rows for host in row).values())

    def gathered(self, direct: float, packed: float, block: int = 0) -> float:
        """Bytes that a host sends for an all-gather of whole messages. direct: sent from rank to rank where the backend
        does; block: over so many neighbours, which have no levels; 0: over all that share."""
        share, way = self.shard, "pairs" if self.levels is None else self.ways.gather
        if block:
            share, way = self._of_blocks(block), "pairs"
        if way == "levels":
            return (direct + packed) * share.levels
        in_pairs = way == "pairs" and sends_in_pairs(self.backend, on_host=True)
        return direct * (share.pairs if in_pairs else share.ring) + packed * share.ring

    def reduced(self, nbytes: float) -> float:
        """The same for a reduction over the shards. A reduce-scatter of gloo is an all-reduce."""
        if self.levels is not None:
            return nbytes * (self.shard.levels if self.ways.reduce == "levels" else self.shard.pairs)
        if self.exchanges:
            return nbytes * self.shard.pairs
        return nbytes * self.shard.ring * (2 if self.backend == "gloo" else 1)

    def replicated(self, nbytes: float) -> float:
        """The same for an all-reduce over replicas, twice around a ring."""
        return 2 * nbytes * self.replicate.ring

    def fastest(self, rates: Rates) -> Ways:
        """The ways that are chosen at these rates."""
        return fastest(self.shard, self.stays, rates)

    def _of_blocks(self, size: int) -> Share:
        if not self.rows:
            return Share()
        return crossing([row[first : first + size] for row in self.rows for first in range(0, len(row), size)])


def on_hosts(rows: Sequence[Sequence[Hashable]], backend: str) -> HostGroups:
    """The groups of a mesh whose ranks are on these hosts; `rows` as in `HostGroups`.

    >>> on_hosts(["aabb"], "gloo").shard
    Share(ring=0.75, pairs=1.0, levels=0.5)
    >>> on_hosts(["aa", "bb"], "gloo").replicate, on_hosts(["aa", "bb"], "gloo").shard.ring
    (Share(ring=1.0, pairs=1.0, levels=1.0), 0.0)
    """
    groups = tuple(map(tuple, rows))
    in_pairs = sends_in_pairs(backend, on_host=True)
    several = any(len(set(row)) > 1 for row in groups)
    apart = all(len(set(row)) == len(row) for row in groups)
    # All groups are on hosts in one pattern, or none has levels: replicas sum in one dtype.
    alike = len({tuple(map(row.index, row)) for row in groups}) == 1
    return HostGroups(
        backend,
        groups,
        crossing(groups),
        staying(groups),
        crossing(list(zip(*groups, strict=True))),
        exchanges=in_pairs and (not several or apart),
        levels=levels_of(groups[0]) if in_pairs and alike else None,
    )
