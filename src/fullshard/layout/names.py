"""Decides what becomes of each tensor under other names: renamed, left out, fused, split, packed or unpacked.

    {"layers.*.attn.q": "model.layers.*.q_proj.weight"}                 renamed; * matches anything, and is carried over
    {"lm_head.weight": None}                                            left out
    {("l.*.q", "l.*.k", "l.*.v"): "l.*.qkv"}                            fused: rows after each other
    {"l.*.qkv": ("l.*.q", "l.*.k", "l.*.v")}                            split, by the rows that the targets have
    {"l.*.qkv": (("l.*.q", 8), ("l.*.k", 2), ("l.*.v", 2))}             split, by these numbers of rows
    {"l.*.experts.#.up": "l.*.experts.up"}                              packed: tensor number # is row # of a new dim 0
    {("l.*.experts.#.gate", "l.*.experts.#.up"): "l.*.experts.gate_up"} packed and fused
    {"l.*.experts.up": "l.*.experts.#.up"}                              unpacked

The first rule that a name matches counts. A name without a rule keeps its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .boxes import Box, overlap

Shape = tuple[int, ...]
Names = Mapping[Any, Any] | Callable[[str], str | None] | None


class Link(NamedTuple):
    """A box of `lengths` that goes from one tensor into another one. `lifted`: which of the two ("source", "target" or
    neither) has one dim less, and is seen with a first dim of length 1: an expert beside the stack of all."""

    source: str
    target: str
    at_source: Shape
    at_target: Shape
    lengths: Shape
    lifted: str = ""

    def of_source(self, box: Box) -> Box:
        """A part of the source in coordinates of the link."""
        return _shifted(_lifted(box) if self.lifted == "source" else box, self.at_source)

    def of_target(self, box: Box) -> Box:
        """A part of the target in coordinates of the link."""
        return _shifted(_lifted(box) if self.lifted == "target" else box, self.at_target)

    def common(self, source: Box, target: Box) -> Box | None:
        """The box that a part of the source has for a part of the target, in coordinates of the link."""
        found = overlap(self.of_source(source), self.of_target(target))
        return None if found is None else overlap(found, Box((0,) * len(self.lengths), self.lengths))


def _lifted(box: Box) -> Box:
    return Box((0, *box.offsets), (1, *box.lengths))


def _shifted(box: Box, by: Shape) -> Box:
    return Box(tuple(o - b for o, b in zip(box.offsets, by, strict=True)), box.lengths)


class Renamed(NamedTuple):
    """`links`: in the order of the sources. `shapes`: of the targets, as the sources make them. `left_out`: sources
    that go nowhere. `problems`: rules that do not fit."""

    links: list[Link]
    shapes: dict[str, Shape]
    left_out: list[str]
    problems: list[str]


def rename(names: Names, sources: Mapping[str, Shape], targets: Mapping[str, Shape] | None = None) -> Renamed:
    """Returns what becomes of the tensors `sources` (by name, with their shapes). `targets`: those that there are, for
    splits.

    >>> found = rename({("q", "k"): "qk"}, {"q": (4, 3), "k": (2, 3)})
    >>> found.shapes, [link.at_target for link in found.links]
    ({'qk': (6, 3)}, [(0, 0), (4, 0)])
    """
    found = Renamed([], {}, [], [])
    if names is None or callable(names):
        for name, shape in sources.items():
            new = name if names is None else names(name)
            if new is None:
                found.left_out.append(name)
            elif not isinstance(new, str):
                found.problems.append(f"{name}: expected a name or None of names(...), found {new!r:.100}")
            else:
                _put(found, name, new, shape)
        return found
    left = dict(sources)
    by_first: dict[str, Renamed] = {}
    for key, value in names.items():
        _Rule(key, value).take(left, by_first, targets or {})
    for name, shape in left.items():
        by_first[name] = made = Renamed([], {}, [], [])
        _put(made, name, name, shape)
    # In the order of the sources, whatever that of the rules is.
    for name in sources:
        for made in [by_first[name]] if name in by_first else []:
            for target in made.shapes.keys() & found.shapes.keys():
                found.problems.append(f"{target}: made of two tensors, of which one is {made.links[0].source}")
            found.links.extend(made.links)
            found.shapes.update(made.shapes)
            found.left_out.extend(made.left_out)
            found.problems.extend(made.problems)
    return found


def _put(found: Renamed, source: str, target: str, shape: Shape) -> None:
    if target in found.shapes:
        found.problems.append(f"{target}: made of two tensors, of which one is {source}")
    found.links.append(Link(source, target, (0,) * len(shape), (0,) * len(shape), shape))
    found.shapes[target] = shape


class _Rule:
    """One entry of a mapping of names."""

    def __init__(self, key: Any, value: Any) -> None:
        self.key, self.value = key, value
        self.sources = _names_of(key, value, is_key=True)
        self.targets = None if value is None else _names_of(value, key, is_key=False)
        # The rows of each part of a split, where the rule has them.
        self.rows = [part[1] if isinstance(part, tuple) else None for part in value] if _is_several(value) else []
        texts = [*self.sources, *(self.targets or ())]
        stars = {text.count("*") for text in texts}
        if self.targets is not None and len(stars) > 1:
            raise ValueError(f"names: expected as many * on both sides, found {key!r}: {value!r}")
        if max(text.count("#") for text in texts) > 1:
            raise ValueError(f"names: expected at most one # in a name, found {key!r}: {value!r}")
        self.packs = any("#" in text for text in self.sources)
        self.unpacks = self.targets is not None and any("#" in text for text in self.targets)
        sides = [self.sources, *([self.targets] if self.targets else [])]
        mixed = any(len({"#" in text for text in side}) > 1 for side in sides)
        if mixed or (len(self.sources) > 1 and self.targets is not None and len(self.targets) > 1):
            raise ValueError(
                f"names: expected one tensor on one side, and # in all names of the other one or in none, found "
                f"{key!r}: {value!r}"
            )
        self.patterns = [_compiled(text) for text in self.sources]

    def take(self, left: dict[str, Shape], by_first: dict[str, Renamed], targets: Mapping[str, Shape]) -> None:
        """Take what matches from `left`, and put what becomes of it under the first of its names."""
        # By what the stars matched: for each part of the rule the names by number.
        groups: dict[tuple[str, ...], list[dict[int, str]]] = {}
        for name in left:
            for part, pattern in enumerate(self.patterns):
                if (match := pattern.fullmatch(name)) is not None:
                    number = int(match.group("number")) if "number" in match.groupdict() else 0
                    stars = tuple(text for key, text in match.groupdict().items() if key != "number")
                    group = groups.setdefault(stars, [{} for _ in self.patterns])
                    group[part].setdefault(number, name)
                    break
        for stars, group in groups.items():
            taken = [name for part in group for name in part.values()]
            first = next(name for name in left if name in taken)
            shapes = {name: left.pop(name) for name in taken}
            by_first[first] = self._made(stars, group, shapes, targets)

    def _made(
        self,
        stars: tuple[str, ...],
        group: list[dict[int, str]],
        shapes: dict[str, Shape],
        targets: Mapping[str, Shape],
    ) -> Renamed:
        made = Renamed([], {}, [], [])
        if self.targets is None:
            made.left_out.extend(shapes)
            return made
        lacking = [text for text, part in zip(self.sources, group, strict=True) if not part]
        numbers = sorted(group[0])
        if lacking:
            made.problems.append(f"{_filled(lacking[0], stars)}: needed beside {next(iter(shapes))}, and not there")
        elif self.packs and (numbers != list(range(len(numbers))) or any(sorted(part) != numbers for part in group)):
            made.problems.append(f"{_filled(self.sources[0], stars)}: expected the numbers 0, 1, ..., found {numbers}")
        elif len(self.targets) == 1 and not self.unpacks:
            self._joined(made, _filled(self.targets[0], stars), group, shapes)
        else:
            self._split(made, stars, group[0][numbers[0]], shapes, targets)
        return made

    def _joined(self, made: Renamed, target: str, group: list[dict[int, str]], shapes: dict[str, Shape]) -> None:
        for number in sorted(group[0]):
            row = 0
            for part in group:
                shape = shapes[part[number]]
                if len(group) > 1 and (not shape or shape[1:] != shapes[group[0][number]][1:]):
                    made.problems.append(f"{part[number]}: {shape} does not fit beside {shapes[group[0][number]]}")
                    return
                inner = (row, *(0,) * (len(shape) - 1)) if shape else ()
                if self.packs:
                    if shape != shapes[part[0]]:
                        made.problems.append(f"{part[number]}: {shape} does not fit beside {shapes[part[0]]}")
                        return
                    zeros = (0,) * (len(shape) + 1)
                    made.links.append(Link(part[number], target, zeros, (number, *inner), (1, *shape), "source"))
                else:
                    made.links.append(Link(part[number], target, (0,) * len(shape), inner, shape))
                row += shape[0] if shape else 0
        shape = shapes[group[0][0]]
        whole_shape = (row, *shape[1:]) if shape else ()
        made.shapes[target] = (len(group[0]), *whole_shape) if self.packs else whole_shape

    def _split(
        self, made: Renamed, stars: tuple[str, ...], source: str, shapes: dict[str, Shape], targets: Mapping[str, Shape]
    ) -> None:
        assert self.targets is not None
        shape, dim = shapes[source], int(self.unpacks)
        if len(shape) <= dim - (len(self.targets) == 1):
            made.problems.append(f"{source}: {shape} has no rows to split")
            return
        for number in range(shape[0]) if self.unpacks else (0,):
            at = 0
            for text, rows in zip(self.targets, self.rows or [None], strict=True):
                target = _filled(text, stars, number)
                if len(self.targets) == 1:
                    rows = shape[dim] if len(shape) > dim else None
                elif rows is None and target in targets:
                    rows = targets[target][0]
                if rows is None and len(self.targets) > 1:
                    made.problems.append(f"{target}: its part of {source} is not known; write ({text!r}, rows)")
                    return
                rest = shape[dim + 1 :]
                part = (rows, *rest) if rows is not None else ()
                at_source = (at, *(0,) * len(rest)) if part else ()
                if self.unpacks:
                    zeros = (0,) * (len(part) + 1)
                    made.links.append(Link(source, target, (number, *at_source), zeros, (1, *part), "target"))
                else:
                    made.links.append(Link(source, target, at_source, (0,) * len(part), part))
                made.shapes[target] = part
                at += rows or 0
            if len(self.targets) > 1 and at != shape[dim]:
                made.problems.append(f"{source}: has {shape[dim]} rows to split, its parts have {at}")
                return


def _is_several(value: Any) -> bool:
    return isinstance(value, (tuple, list))


def _names_of(value: Any, other: Any, *, is_key: bool) -> list[str]:
    parts: Iterable[Any] = value if _is_several(value) else [value]
    found = [part[0] if isinstance(part, tuple) and not is_key and len(part) == 2 else part for part in parts]
    if not found or not all(isinstance(part, str) and part for part in found):
        rule = f"{value!r}: {other!r}" if is_key else f"{other!r}: {value!r}"
        raise ValueError(f"names: expected names, tuples of names, None, or (name, rows) in a split, found {rule:.200}")
    return found


def _compiled(text: str) -> re.Pattern[str]:
    parts, number = [], 0
    for piece in re.split(r"([*#])", text):
        if piece == "*":
            parts.append(f"(?P<star{number}>.+)")
            number += 1
        else:
            parts.append(r"(?P<number>\d+)" if piece == "#" else re.escape(piece))
    return re.compile("".join(parts))


def _filled(text: str, stars: Sequence[str], number: int | None = None) -> str:
    for star in stars:
        text = text.replace("*", star, 1)
    return text if number is None else text.replace("#", str(number))
