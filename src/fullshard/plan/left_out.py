"""Notes what a search leaves out, and why: degrees of axes that are not legal for the model or the ranks, or cannot be
planned."""

from __future__ import annotations

import re
from typing import NamedTuple

from .strategy import Strategy

# Names the axes of a search beside data parallelism, in the order of `degrees_of`.
AXES = ("TP", "CP", "EP", "PP")


def degrees_of(strategy: Strategy) -> tuple[int, int, int, int]:
    """Returns the ranks along `AXES`."""
    return strategy.tensor, strategy.context, strategy.experts, strategy.pipeline


class Left(NamedTuple):
    """Has the degrees of an axis that were left out for one reason, which is said of one of them."""

    axis: str
    degrees: tuple[int, ...]
    why: str


class LeftOut:
    """Notes what is left out, and the first reason of each degree. Of strategies of one degree: why one of them was
    `refused`, whether another one could be planned, and of how many that is not known."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], str] = {}
        self.refused, self.is_planned, self.undecided = "", False, 0

    @property
    def why(self) -> str:
        """Returns why none of the strategies could be planned; "" if one could be."""
        return "" if self.is_planned or self.undecided else self.refused

    def leave(self, axis: str, degree: int, why: str) -> None:
        """Leave out a degree of an axis."""
        self._found.setdefault((axis, degree), " ".join(why.split()))

    def note(self, asked: Strategy, strategy: Strategy, why: str) -> None:
        """Leave out `strategy`, which has another degree of one axis than `asked`."""
        pairs = zip(AXES, degrees_of(strategy), degrees_of(asked), strict=True)
        axis, degree = next((axis, degree) for axis, degree, own in pairs if degree != own)
        self.leave(axis, degree, why)

    def rows(self) -> list[Left]:
        """Returns what was left out. Reasons that differ in numbers alone are one.

        >>> found = LeftOut()
        >>> for degree in (2, 4):
        ...     found.leave("TP", degree, f"{degree} does not divide 3 heads")
        >>> found.rows()
        [Left(axis='TP', degrees=(2, 4), why='2 does not divide 3 heads')]
        """
        rows: dict[tuple[str, str], Left] = {}
        for (axis, degree), why in self._found.items():
            key = axis, re.sub(r"\d+", "", why)
            known = rows.get(key, Left(axis, (), why))
            rows[key] = known._replace(degrees=tuple(sorted((*known.degrees, degree))))
        return sorted(rows.values(), key=lambda left: (AXES.index(left.axis), left.degrees))

    def lines(self) -> list[str]:
        """Returns the same as text."""
        return [f"  {axis} {', '.join(map(str, degrees))}: {why}" for axis, degrees, why in self.rows()]
