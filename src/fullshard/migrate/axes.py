"""The axes of a plan as numbers: which ranks an axis joins, who gets which data, who cuts parameters. No torch.

Ranks are numbered row by row, with the last axis fastest: neighbours share a tensor-parallel group, then a sequence,
then shards, then copies, then stages. It is torchtitan's order, and it has torchtitan's names.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

# Outermost first. `dp_shard` and `cp` together cut parameters, as one axis that is called FOLDED.
NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
FOLDED = "dp_shard_cp"

_SHARED = {
    "pp": "different layers, the same data",
    "dp_replicate": "the same shards, different data; gradients are averaged",
    "dp_shard": "different shards of each parameter, different data; gradients are averaged",
    "cp": "different shards of each parameter, different parts of the same sequences; gradients are averaged",
    "tp": "different columns and rows of layers, the same data",
}


@dataclass(frozen=True, slots=True)
class Axes:
    """The sizes of the axes, resolved: their product is the number of ranks.

    ep, etp: ranks over which experts are divided, and over which each of them is cut. They divide the ranks of
    `dp_shard`, `cp` and `tp` anew, and add none.

    >>> Axes(dp_replicate=2, dp_shard=2, tp=2).group(5, "tp")
    (4, 5)
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world(self) -> int:
        return math.prod(self._sizes())

    @property
    def mesh(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes that the mesh has: those of several ranks, and one along which parameters are
        cut in any case."""
        kept = [
            (name, size)
            for name, size in zip(NAMES, self._sizes(), strict=True)
            if size > 1 or (name == "dp_shard" and self.cp == 1)
        ]
        return tuple(kept)

    @property
    def cut(self) -> tuple[str, ...]:
        """The axes of the mesh that cut parameters; two of them are folded into one."""
        return tuple(name for name, _ in self.mesh if name in ("dp_shard", "cp"))

    @property
    def shards(self) -> int:
        """The number of ranks over which a parameter is cut, beside `tp`."""
        return self.dp_shard * self.cp

    @property
    def shares(self) -> int:
        """The number of different shares of a batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def averaged(self) -> int:
        """The number of ranks whose gradients are averaged for a parameter that is cut over all of them: the divisor
        of experts too, however few ranks share them."""
        return self.dp_replicate * self.dp_shard * self.cp

    def at(self, rank: int) -> dict[str, int]:
        """The position of `rank` on each axis.

        >>> Axes(dp_shard=2, tp=2).at(2)["dp_shard"]
        1
        """
        found = {}
        for name, size in zip(reversed(NAMES), reversed(self._sizes()), strict=True):
            rank, found[name] = divmod(rank, size)
        return {name: found[name] for name in NAMES}

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` alone, in order."""
        own = self.at(rank)
        sizes = dict(zip(NAMES, self._sizes(), strict=True))
        ranges = [range(sizes[name]) if name in axes else (own[name],) for name in NAMES]
        return tuple(self._rank(position) for position in itertools.product(*ranges))

    def share(self, rank: int) -> tuple[int, int]:
        """Returns which share of a batch `rank` gets, and how many there are; along `tp`, `cp` and `pp` the same."""
        own = self.at(rank)
        return own["dp_replicate"] * self.dp_shard + own["dp_shard"], self.shares

    def window(self, rank: int) -> tuple[int, int]:
        """Returns which part of each sequence `rank` computes, and how many there are."""
        return self.at(rank)["cp"], self.cp

    def lines(self) -> Iterator[str]:
        """The axes as a table, and who gets which data."""
        sizes = " x ".join(f"{name} {size}" for name, size in self.mesh)
        yield f"mesh: {sizes} = {self.world} {'rank' if self.world == 1 else 'ranks'}"
        for name, size in self.mesh:
            ranks = self.group(0, name)
            shown = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
            yield f"  {name} {size}: ranks {shown} have {_SHARED[name]}"
        if len(self.cut) == 2:
            yield f"  {FOLDED} {self.shards}: both as one axis, along which parameters are cut"
        if self.ep > 1:
            cut = f", each cut over {self.etp}" if self.etp > 1 else ""
            yield f"  experts: divided over {self.ep} ranks{cut}; gradients are divided by {self.averaged}"
        alike = self.world // self.shares
        if alike == 1:
            yield f"data: each rank has a share of its own, of {self.shares}"
        else:
            yield f"data: {self.shares} {'share' if self.shares == 1 else 'shares'}, each for {alike} ranks"
        if self.cp > 1:
            yield f"sequences: each rank computes one of {self.cp} parts"

    def _sizes(self) -> tuple[int, ...]:
        return self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp

    def _rank(self, position: tuple[int, ...]) -> int:
        rank = 0
        for place, size in zip(position, self._sizes(), strict=True):
            rank = rank * size + place
        return rank
