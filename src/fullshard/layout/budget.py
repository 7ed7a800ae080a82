"""Chooses what fits into a budget of bytes: gathers that run ahead, and units that stay full after forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


def leading_within(costs: Iterable[int], nbytes: int) -> int:
    """How many of the first `costs` fit into `nbytes` together. Everything after the first misfit has to wait.

    >>> leading_within([4, 4, 1], 8), leading_within([9, 1], 8), leading_within([0, 0, 1], 0)
    (2, 0, 2)
    """
    count = used = 0
    for cost in costs:
        used += cost
        if used > nbytes:
            break
        count += 1
    return count


class Candidate(NamedTuple):
    """A unit that could stay full: the bytes of its full parameters, and whether none of them is trained."""

    name: str
    nbytes: int
    frozen: bool


def choose_resident(candidates: Sequence[Candidate], nbytes: int) -> tuple[int, ...]:
    """Positions of the candidates that stay full within `nbytes`, ascending. Candidates are in definition order.

    Frozen units come first: nothing writes them, so they stay from step to step, and the same bytes save the gathers of
    both forward and backward. Among equals the last comes first, because its time between forward and backward is
    short. A unit that does not fit is skipped; smaller ones after it may still fit. A unit without its own memory is
    never chosen.

    >>> units = [Candidate("a", 4, False), Candidate("b", 4, True), Candidate("c", 6, False), Candidate("d", 3, False)]
    >>> [units[i].name for i in choose_resident(units, 8)], [units[i].name for i in choose_resident(units, 3)]
    (['b', 'd'], ['d'])
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
        raise ValueError(f"nbytes: expected an int >= 0, found {nbytes!r}; 0 keeps no unit")
    chosen, left = [], nbytes
    for i in sorted(range(len(candidates)), key=lambda i: (not candidates[i].frozen, -i)):
        if 0 < candidates[i].nbytes <= left:
            chosen.append(i)
            left -= candidates[i].nbytes
    return tuple(sorted(chosen))
