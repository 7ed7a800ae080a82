"""How a tensor is cut into parts, and which rank holds which: a rule that arithmetic follows, or a list.

    Rule(sizes=(4,), cuts=(Cut(0),), ranks=(0, 1, 2, 3))     dim 0 over 4 ranks, padded as `torch.chunk` does
    Rule((), (), (0, 1))                                      whole, on two ranks
    Listed((Held(Box(...), (0,)), ...))                       any boxes

The parts of a rule cover every element once, by construction. Those of a list are proven to (`coverage_problem`). A
reader finds the parts that it needs without looking at the others. Pure arithmetic: no torch, no files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from .plan import Box, Cut, coverage_problem, cutting_order, local_box, overlap, whole


@dataclass(frozen=True)
class Rule:
    """Parts by arithmetic. `sizes`: of the axes that cut; `cuts`: what each of them cuts. `ranks`: those of each
    replica, one after another, for its parts in row-major order of the axes."""

    sizes: tuple[int, ...]
    cuts: tuple[Cut, ...]
    ranks: tuple[int, ...]

    @cached_property
    def num_parts(self) -> int:
        return math.prod(self.sizes)

    @cached_property
    def num_replicas(self) -> int:
        return len(self.ranks) // self.num_parts

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self.ranks)}

    @cached_property
    def _order(self) -> list[int]:
        return cutting_order(self.sizes, self.cuts)

    @cached_property
    def _hash(self) -> int:
        return hash((self.sizes, self.cuts, self.ranks))

    def __hash__(self) -> int:
        return self._hash

    def place_of(self, rank: int) -> tuple[int, int] | None:
        """(replica, part) of `rank`; None if it has none."""
        index = self._places.get(rank)
        return None if index is None else divmod(index, self.num_parts)

    def holders(self, part: int) -> tuple[int, ...]:
        """The ranks that hold `part`, by replica."""
        return self.ranks[part :: self.num_parts]

    def writer(self, part: int, replica: int) -> int:
        """The rank that wrote `part` of a tensor that `replica` wrote."""
        return self.ranks[replica * self.num_parts + part]

    def box(self, shape: Sequence[int], part: int) -> Box:
        """Part number `part` of a tensor of `shape`; it may be empty."""
        coordinate = []
        for size in reversed(self.sizes):
            part, index = divmod(part, size)
            coordinate.append(index)
        return local_box(shape, self.sizes, coordinate[::-1], self.cuts)

    def largest(self, shape: Sequence[int]) -> int:
        """Elements of the largest part."""
        return self.box(shape, 0).numel

    def overlapping(self, shape: Sequence[int], wanted: Box) -> list[tuple[int, Box]]:
        """The parts that have elements in `wanted`, with their boxes; in the order of their numbers. It takes as long
        as there are such parts, however many others there are."""
        if not wanted.numel:
            return []
        found = [(0, [0] * len(shape), list(shape))]
        strides = [math.prod(self.sizes[axis + 1 :]) for axis in range(len(self.sizes))]
        for axis in self._order:
            dim, deeper = self.cuts[axis].dim, []
            for part, offsets, lengths in found:
                size = -(-lengths[dim] // self.sizes[axis])
                begin, end = offsets[dim], offsets[dim] + lengths[dim]
                first = max(wanted.offsets[dim], begin)
                last = min(wanted.offsets[dim] + wanted.lengths[dim], end)
                if first >= last:
                    continue
                for index in range((first - begin) // size, (last - 1 - begin) // size + 1):
                    start = begin + index * size
                    inner, around = list(offsets), list(lengths)
                    inner[dim], around[dim] = start, min(size, end - start)
                    deeper.append((part + index * strides[axis], inner, around))
            found = deeper
        return sorted((part, Box(tuple(offsets), tuple(lengths))) for part, offsets, lengths in found)

    def problem(self, shape: Sequence[int], world: int) -> str | None:
        """Why no save cuts a tensor of `shape` so; None if one does."""
        if any(not 0 <= cut.dim < len(shape) for cut in self.cuts):
            return f"cuts {[cut.dim for cut in self.cuts]} of {len(shape)} dims"
        return None

    def flaw(self, world: int) -> str | None:
        """Why this is no rule of a save of `world` ranks; None if it is."""
        if len(self.sizes) != len(self.cuts) or any(size < 1 for size in self.sizes):
            return f"axes of {self.sizes} with {len(self.cuts)} cuts"
        if not self.ranks or len(self.ranks) % self.num_parts:
            return f"{len(self.ranks)} ranks for {self.num_parts} parts"
        if len(self._places) != len(self.ranks) or not 0 <= min(self.ranks) <= max(self.ranks) < world:
            return f"ranks that are not different ones of {world}"
        try:
            _ = self._order
        except ValueError as error:
            return str(error)
        return None


class Held(NamedTuple):
    """A part, and the ranks that hold it, ascending."""

    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Listed:
    """Parts in any layout, in order of their boxes. The interface is that of `Rule`."""

    parts: tuple[Held, ...]

    @property
    def num_parts(self) -> int:
        return len(self.parts)

    @cached_property
    def num_replicas(self) -> int:
        return max((len(held.ranks) for held in self.parts), default=1)

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (replica, part) for part, held in enumerate(self.parts) for replica, rank in enumerate(held.ranks)
        }

    @cached_property
    def _hash(self) -> int:
        return hash(self.parts)

    def __hash__(self) -> int:
        return self._hash

    def place_of(self, rank: int) -> tuple[int, int] | None:
        return self._places.get(rank)

    def holders(self, part: int) -> tuple[int, ...]:
        return self.parts[part].ranks

    def writer(self, part: int, replica: int) -> int:
        ranks = self.parts[part].ranks
        return ranks[replica % len(ranks)]

    def box(self, shape: Sequence[int], part: int) -> Box:
        return self.parts[part].box

    def largest(self, shape: Sequence[int]) -> int:
        return max((held.box.numel for held in self.parts), default=0)

    def overlapping(self, shape: Sequence[int], wanted: Box) -> list[tuple[int, Box]]:
        return [(part, held.box) for part, held in enumerate(self.parts) if overlap(held.box, wanted) is not None]

    def problem(self, shape: Sequence[int], world: int) -> str | None:
        return coverage_problem(shape, [held.box for held in self.parts])

    def flaw(self, world: int) -> str | None:
        if any(not held.ranks or not 0 <= min(held.ranks) <= max(held.ranks) < world for held in self.parts):
            return f"parts of ranks that are not of {world}"
        return None


Layout = Rule | Listed


def on(ranks: Sequence[int]) -> Rule:
    """Whole, on each of `ranks`."""
    return Rule((), (), tuple(ranks))


def rule_of(sizes: Sequence[int], ranks: Sequence[int], cuts: Sequence[Cut | None]) -> Rule:
    """The rule of a mesh of `sizes`, whose `ranks` are in row-major order, of which each axis cuts or (None)
    replicates.

    >>> rule_of((2, 2), (0, 1, 2, 3), [Cut(0), None])
    Rule(sizes=(2,), cuts=(Cut(dim=0, pieces=1),), ranks=(0, 2, 1, 3))
    """
    cutting = [axis for axis, cut in enumerate(cuts) if cut is not None]
    order = [axis for axis, cut in enumerate(cuts) if cut is None] + cutting
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    indices = [0]
    for axis in order:
        indices = [index + n * strides[axis] for index in indices for n in range(sizes[axis])]
    found = tuple(cut for cut in cuts if cut is not None)
    return Rule(tuple(sizes[axis] for axis in cutting), found, tuple(ranks[index] for index in indices))


def joined(rules: Sequence[Rule]) -> Rule | None:
    """The replicas of several rules as one, or None if they are not of the same parts. Replicas of a same first rank
    are one; the one with the lowest rank is first."""
    first = rules[0]
    if any((rule.sizes, rule.cuts) != (first.sizes, first.cuts) for rule in rules):
        return None
    n = first.num_parts
    rows = sorted({rule.ranks[at : at + n] for rule in rules for at in range(0, len(rule.ranks), n)})
    ranks = tuple(rank for row in rows for rank in row)
    return Rule(first.sizes, first.cuts, ranks) if len(set(ranks)) == len(ranks) else None


def listed(held: Sequence[tuple[int, Box]]) -> Listed:
    """The parts that ranks hold, each box once; empty ones are left out."""
    by_box: dict[Box, set[int]] = {}
    for rank, box in held:
        if box.numel:
            by_box.setdefault(box, set()).add(rank)
    return Listed(tuple(Held(box, tuple(sorted(ranks))) for box, ranks in sorted(by_box.items())))


def boxes_of(rule: Layout, shape: Sequence[int]) -> list[tuple[int, Box]]:
    """Every part that has elements, with its number."""
    return rule.overlapping(shape, whole(shape))


# ---- as JSON ---------------------------------------------------------------------------------------------------------


def compact(ranks: Sequence[int]) -> Any:
    """`ranks` as arithmetic, if they are: {"from": first, "by": [[length, stride], ...]}, outermost axis first.

    >>> compact([0, 1, 2, 8, 9, 10]), compact([3]), compact([0, 1, 3])
    ({'from': 0, 'by': [[2, 8], [3, 1]]}, {'from': 3, 'by': []}, [0, 1, 3])
    """
    axes: list[list[int]] = []
    left = list(ranks)
    while len(left) > 1:
        stride, run = left[1] - left[0], 2
        while run < len(left) and left[run] - left[run - 1] == stride:
            run += 1
        starts = left[::run]
        if stride < 1 or len(left) % run or left != [first + n * stride for first in starts for n in range(run)]:
            return list(ranks)
        axes.insert(0, [run, stride])
        left = starts
    return {"from": left[0], "by": axes} if left else []


def expanded(raw: Any, limit: int) -> tuple[int, ...]:
    """The ranks that `compact` wrote. Raises `ValueError` for anything else, and for more than `limit` ranks."""
    match raw:
        case {"from": first, "by": [*axes], **rest} if not rest and type(first) is int:
            found = [first]
            for axis in reversed(axes):
                match axis:
                    case [length, stride] if _whole_numbers(axis) and 1 < length <= limit // len(found) and stride:
                        found = [start + n * stride for n in range(length) for start in found]
                    case _:
                        raise ValueError(f"axes of at most {limit} ranks, found {str(axes)[:80]}")
            return tuple(found)
        case [*ranks] if len(ranks) <= limit and all(type(rank) is int for rank in ranks):
            return tuple(ranks)
    raise ValueError(f"ranks, found {str(raw)[:80]}")


def to_json(rule: Layout) -> dict[str, Any]:
    """`rule` as JSON."""
    if isinstance(rule, Listed):
        return {"parts": [[held.box.offsets, held.box.lengths, compact(held.ranks)] for held in rule.parts]}
    return {"sizes": rule.sizes, "cuts": rule.cuts, "ranks": compact(rule.ranks)}


def from_json(raw: Any, world: int) -> Layout:
    """The rule that `to_json` wrote, of a save of `world` ranks. Raises `ValueError` for anything else."""
    found: Layout
    match raw:
        case {"sizes": [*sizes], "cuts": [*cuts], "ranks": ranks, **rest} if not rest:
            if not _whole_numbers(sizes) or not all(_whole_numbers(cut) and len(cut) == 2 for cut in cuts):
                raise ValueError(f"a rule of whole numbers, found {str(raw)[:80]}")
            found = Rule(tuple(sizes), tuple(Cut(*cut) for cut in cuts), expanded(ranks, world))
        case {"parts": [*parts], **rest} if not rest:
            made = []
            for part in parts:
                match part:
                    case [[*offsets], [*lengths], ranks] if len(offsets) == len(lengths):
                        if not _whole_numbers(offsets) or not _whole_numbers(lengths):
                            raise ValueError(f"a part of whole numbers, found {str(part)[:80]}")
                        made.append(Held(Box(tuple(offsets), tuple(lengths)), expanded(ranks, world)))
                    case _:
                        raise ValueError(f"a part, found {str(part)[:80]}")
            found = Listed(tuple(made))
        case _:
            raise ValueError(f"a rule, found {str(raw)[:80]}")
    if flaw := found.flaw(world):
        raise ValueError(flaw)
    return found


def _whole_numbers(raw: Any) -> bool:
    return isinstance(raw, list | tuple) and all(type(n) is int and 0 <= n < 1 << 62 for n in raw)
