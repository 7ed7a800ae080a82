"""Values by rank, and ranks as text. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

_Value = TypeVar("_Value")


def variants(by_rank: Mapping[int, _Value]) -> dict[_Value, list[int]]:
    """The different values with their ranks: the most frequent first, ties by the lowest rank."""
    found: dict[_Value, list[int]] = {}
    for rank in sorted(by_rank):
        found.setdefault(by_rank[rank], []).append(rank)
    return dict(sorted(found.items(), key=lambda entry: (-len(entry[1]), entry[1])))


def shown_ranks(ranks: Sequence[int]) -> str:
    """Ranks as text.

    >>> shown_ranks([3]), shown_ranks([0, 1]), shown_ranks([0, 1, 2, 3, 7])
    ('rank 3', 'ranks 0 and 1', 'ranks 0 to 3 and 7')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else " and ".join(map(str, run)) for run in runs]
    listed = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
