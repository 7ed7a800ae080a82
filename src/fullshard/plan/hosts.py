"""The bytes that the interface of a host sends: the part of a message that leaves it, for each way to send.

Ranks are on hosts in their order, equally many on each, as launchers number them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..layout import levels_of, sends_in_pairs


class Share(NamedTuple):
    """The part of a message that the busiest host sends, over all groups of an axis. ring: by a ring in the order of
    the ranks, as backends route; pairs: from each rank to each other one; levels: in two levels, see `layout.levels`.
    """

    ring: float = 0.0
    pairs: float = 0.0
    levels: float = 0.0


class HostGroups(NamedTuple):
    """Groups of all axes on hosts, and how gradients are reduced there, as `comm/choice.py` decides. exchanges: from
    rank to rank; in_levels: they, and gathers, in two levels."""

    shard: Share
    replicate: Share
    exchanges: bool
    in_levels: bool

    def gathered(self, direct: float, packed: float, backend: str, share: Share | None = None) -> float:
        """Bytes that a host sends for an all-gather of whole messages. direct: sent from rank to rank where the backend
        does; share: of a block of ranks, which has no levels; None: over the shards."""
        if share is None and self.in_levels:
            return (direct + packed) * self.shard.levels
        share = share or self.shard
        return direct * (share.pairs if sends_in_pairs(backend, on_host=True) else share.ring) + packed * share.ring

    def reduced(self, nbytes: float, backend: str) -> float:
        """The same for a reduction over the shards. A reduce-scatter of gloo is an all-reduce."""
        if self.in_levels:
            return nbytes * self.shard.levels
        if self.exchanges:
            return nbytes * self.shard.pairs
        return nbytes * self.shard.ring * (2 if backend == "gloo" else 1)


@lru_cache(maxsize=256)
def on_hosts(ranks: int, shard: int, hosts: int, backend: str, *, levels: bool = True) -> HostGroups:
    """The groups of `ranks` ranks, of which `shard` neighbours share parameters, on `hosts` hosts. `levels`: messages
    may go in two levels.

    >>> on_hosts(4, 4, 2, "gloo").shard
    Share(ring=0.75, pairs=1.0, levels=0.5)
    >>> on_hosts(4, 2, 2, "gloo").replicate, on_hosts(4, 2, 2, "gloo").shard.ring
    (Share(ring=1.0, pairs=1.0, levels=1.0), 0.0)
    """
    if hosts == 1:
        return HostGroups(Share(), Share(), sends_in_pairs(backend, on_host=True), False)
    each = ranks // hosts
    sharing = [[rank // each for rank in range(first, first + shard)] for first in range(0, ranks, shard)]
    copies = [[rank // each for rank in range(first, ranks, shard)] for first in range(shard)]
    in_pairs = sends_in_pairs(backend, on_host=True)
    several = any(len(set(group)) > 1 for group in sharing)
    apart = in_pairs and all(len(set(group)) == len(group) for group in sharing)
    found = [levels_of([str(host) for host in group]) for group in sharing]
    return HostGroups(
        share_of(sharing),
        share_of(copies),
        exchanges=in_pairs and (not several or apart),
        in_levels=levels and in_pairs and all(found),
    )


@lru_cache(maxsize=256)
def of_blocks(ranks: int, block: int, hosts: int) -> Share:
    """The share of groups of `block` neighbours."""
    each = ranks // hosts
    return (
        Share()
        if hosts == 1
        else share_of([[rank // each for rank in range(first, first + block)] for first in range(0, ranks, block)])
    )


def share_of(groups: Sequence[Sequence[int]]) -> Share:
    """The share of groups whose ranks are on these hosts, in the order of the ranks.

    >>> share_of([[0, 0, 1, 1]])
    Share(ring=0.75, pairs=1.0, levels=0.5)
    """
    ring, pairs, levels = Counter[int](), Counter[int](), Counter[int]()
    for group in groups:
        world, there = len(group), Counter(group)
        for host, following in zip(group, [*group[1:], group[0]], strict=True):
            ring[host] += (host != following) * (world - 1)
        for host, count in there.items():
            pairs[host] += count * (world - count)
            levels[host] += count * (len(there) - 1)
    world = len(groups[0])
    return Share(*(max(found.values(), default=0) / world for found in (ring, pairs, levels)))
