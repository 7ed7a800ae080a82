"""The ranks of this rank's node, and those of its place on every node: for reductions in two hops.

They are made once for a group and serve every unit.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist

from ..guard import RanksDisagree, ask, scope_of, shown_ranks
from ..layout import NodeGrid, node_grid, reduces_in_hops
from .group import Links, NodeLinks, ShardGroup

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
