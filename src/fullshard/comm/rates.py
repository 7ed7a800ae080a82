"""Measures what the ranks of a group send to each other within a node, and from node to node (`layout.Rates`).

Each rank sends a message to the next rank of its node, then one to its counterpart on the next node, `_ROUNDS` times:
all links and all memories are in use at once, as in a step. A few bytes go before each, because a rank that begins late
would be counted as a slow link. The slowest rank counts, and all learn the same numbers from one all-reduce. So a rank
sends the same few messages at any number of ranks, and asks the store nothing.
"""

from __future__ import annotations

import logging
import time
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import HostGroups, Rates
from .data_group import Works
from .group import RATES_TAG, Links, ShardGroup

# Of a message of a rank. A token bucket in front of a link lets a first 256 KiB pass.
NBYTES = 1 << 20
_ROUNDS = 3
_log = logging.getLogger("fullshard")

# By the process group of the ranks that share parameters: all roots over it use the same numbers.
_measured: weakref.WeakKeyDictionary[dist.ProcessGroup, Rates] = weakref.WeakKeyDictionary()


def measured(links: Links, hosts: HostGroups) -> Rates:
    """Returns the rates of `hosts`, which have levels: equal on all ranks of the mesh, and measured once for a group.
    Collective over the mesh."""
    group = links.shard
    if group.origin not in _measured:
        levels = hosts.levels
        assert levels is not None
        node, index = levels.place(group.rank)
        within, between = _seconds(group, levels.nodes[node]), _seconds(group, [n[index] for n in levels.nodes])
        slowest = torch.tensor([within, between], dtype=torch.float64)
        group.all_reduce(slowest, dist.ReduceOp.MAX).wait()
        if links.replicate is not None and links.replicate.world > 1:
            # Each shard of one replica: with it, all have the slowest of the mesh.
            links.replicate.all_reduce(slowest, dist.ReduceOp.MAX).wait()
        sent = hosts.ranks_of_busiest * NBYTES
        found = Rates(between=sent / slowest[1].item(), within=sent / slowest[0].item())
        _measured[group.origin] = found
        _log.info("%s, chosen at %s", hosts.fastest(found), found)
    return _measured[group.origin]


def known_rates(group: ShardGroup) -> Rates | None:
    """Returns what was measured of `group`, if anything."""
    return _measured.get(group.origin)


def _seconds(group: ShardGroup, ring: list[int] | tuple[int, ...]) -> float:
    """Returns the shortest time in which a message of every rank of `ring` is at the next one."""
    at = ring.index(group.rank)
    to, source = ring[(at + 1) % len(ring)], ring[at - 1]
    leaving, arriving = torch.zeros(2, NBYTES, dtype=torch.uint8).unbind()
    shortest = float("inf")
    for _ in range(_ROUNDS):
        for nbytes in (1, NBYTES):
            begun = time.perf_counter()
            group.send(_pass, group.process_group, leaving[:nbytes], to, arriving[:nbytes], source).wait()
        shortest = min(shortest, time.perf_counter() - begun)
    return shortest


def _pass(group: dist.ProcessGroup, leaving: Tensor, to: int, arriving: Tensor, source: int) -> Works:
    return Works([group.recv([arriving], source, RATES_TAG), group.send([leaving], to, RATES_TAG)])
