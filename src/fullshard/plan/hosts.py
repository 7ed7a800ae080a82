"""Ranks on hosts as launchers number them: in their order, equally many on each."""

from __future__ import annotations

from functools import lru_cache

from ..layout import ONE_LEVEL as ONE_LEVEL
from ..layout import TWO_LEVELS as TWO_LEVELS
from ..layout import HostGroups, on_hosts, sends_in_pairs


@lru_cache(maxsize=256)
def numbered(ranks: int, shard: int, hosts: int, backend: str) -> HostGroups:
    """The groups of `ranks` ranks, of which `shard` neighbours share parameters, on `hosts` hosts."""
    if hosts == 1:
        return HostGroups(backend, exchanges=sends_in_pairs(backend, on_host=True))
    each = ranks // hosts
    return on_hosts(
        [[rank // each for rank in range(first, first + shard)] for first in range(0, ranks, shard)], backend
    )
