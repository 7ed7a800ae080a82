"""The structure of a rank's model as a printable list, and the first difference between the lists of several ranks.

    settings                   prefetch 1, ...
    unit      layers.1         mesh cpu (2,) of ranks [0, 1], reshard_after_forward True, ...
    parameter layers.1.weight  unit layers.1, shape (5, 3), dtype float32, requires_grad True, ...

Values of a single rank (its rows, its device index) are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

SETTINGS, UNIT, PARAMETER = "settings", "unit", "parameter"
# How many of the differing values an error shows.
_SHOWN = 4


class Item(NamedTuple):
    """One line: `kind` is SETTINGS, UNIT or PARAMETER, `name` is dotted, `facts` must be equal, in order."""

    kind: str
    name: str
    facts: Mapping[str, str]


class Difference(NamedTuple):
    """The first difference between ranks. `fact`: its name; "" if only some ranks have the item; "order" if ranks have
    it at different places. `values`: (ranks, their value), the majority first; None: no value."""

    item: Item
    fact: str
    values: tuple[tuple[tuple[int, ...], str | None], ...]

    @property
    def text(self) -> str:
        """The error text: expected, found on which ranks, what to do."""
        name, kind = self.item.name, self.item.kind
        found = [f"{value} on {shown_ranks(ranks)}" for ranks, value in self.values[:_SHOWN]]
        if self.fact == "order":
            (first, before), *others = self.values
            said = f"found it {before} on {shown_ranks(first)}"
            said += "".join(f" and {place} on {shown_ranks(ranks)}" for ranks, place in others[: _SHOWN - 1])
            return (
                f"{name}: expected the same order of {kind}s on every rank, {said}; build the same model on all of them"
            )
        if not self.fact:
            have = sorted(rank for ranks, value in self.values if value is not None for rank in ranks)
            miss = sorted(rank for ranks, value in self.values if value is None for rank in ranks)
            what = "a unit (fully_shard) of this name" if kind == UNIT else f"this {kind}"
            return (
                f"{name}: expected {what} on every rank, found it on {shown_ranks(have)} and not on "
                f"{shown_ranks(miss)}; build and shard the same model on all of them"
            )
        subject = f"{name}: " if name else ""
        return f"{subject}expected the same {self.fact} on every rank, found {' and '.join(found)}; {self._advice()}"

    def _advice(self) -> str:
        if self.item.kind == SETTINGS:
            return "set it to the same value on all ranks"
        if self.item.kind == UNIT:
            return "call fully_shard with the same arguments on all ranks"
        if self.fact == "requires_grad":
            return "freeze the same parameters on all ranks"
        if self.fact in ("unit", "placement"):
            return "call fully_shard on the same modules, with the same arguments, on all ranks"
        return "build the same model on all ranks"


def dumps(items: Sequence[Item]) -> str:
    """One line for each item."""
    return "\n".join(json.dumps([item.kind, item.name, dict(item.facts)], separators=(",", ":")) for item in items)


def loads(text: str) -> list[Item]:
    """The reverse of `dumps`.

    >>> loads(dumps([Item(UNIT, "head", {"mesh": "m"})]))
    [Item(kind='unit', name='head', facts={'mesh': 'm'})]
    """
    return [Item(*json.loads(line)) for line in text.splitlines()]


def variants(by_rank: Mapping[int, str]) -> dict[str, list[int]]:
    """The different values with their ranks: the most frequent first, ties by the lowest rank."""
    found: dict[str, list[int]] = {}
    for rank in sorted(by_rank):
        found.setdefault(by_rank[rank], []).append(rank)
    return dict(sorted(found.items(), key=lambda entry: (-len(entry[1]), entry[1][0])))


def first_difference(by_rank: Mapping[int, Sequence[Item]]) -> Difference | None:
    """The first item, in the majority's order, that is not the same on all ranks; None if all lists are equal."""
    texts = {rank: dumps(items) for rank, items in by_rank.items()}
    lists = [by_rank[ranks[0]] for ranks in variants(texts).values()]
    reference, *others = lists
    places = [place for other in others if (place := _differ_at(reference, other)) is not None]
    if not places:
        return None
    item = min(places, key=lambda place: place[0])[1]
    same = {rank: _find(items, item) for rank, items in by_rank.items()}
    if any(one is None for one in same.values()):
        return Difference(item, "", _grouped({rank: None if one is None else "" for rank, one in same.items()}))
    facts = {rank: one.facts for rank, one in same.items() if one is not None}
    names = dict.fromkeys(name for values in facts.values() for name in values)
    for name in names:
        values = {rank: known.get(name) for rank, known in facts.items()}
        if len(set(values.values())) > 1:
            return Difference(item, name, _grouped({r: "none" if v is None else v for r, v in values.items()}))
    return Difference(item, "order", _grouped({rank: _place(items, item) for rank, items in by_rank.items()}))


def _differ_at(reference: Sequence[Item], other: Sequence[Item]) -> tuple[int, Item] | None:
    """The first place where `other` differs, and the item to compare there."""
    for i, item in enumerate(reference):
        if i >= len(other):
            return i, item
        if item == other[i]:
            continue
        if (item.kind, item.name) == (other[i].kind, other[i].name) or _find(other, item) is None:
            return i, item
        # The other item there is either unknown to the majority or at another place.
        return i, other[i] if _find(reference, other[i]) is None else item
    return (len(reference), other[len(reference)]) if len(other) > len(reference) else None


def _find(items: Sequence[Item], like: Item) -> Item | None:
    return next((item for item in items if (item.kind, item.name) == (like.kind, like.name)), None)


def _place(items: Sequence[Item], like: Item) -> str:
    before: Item | None = None
    for item in items:
        if (item.kind, item.name) == (like.kind, like.name):
            break
        before = item if item.kind == like.kind else before
    return f"after {before.name}" if before is not None else "first"


def _grouped(by_rank: Mapping[int, str | None]) -> tuple[tuple[tuple[int, ...], str | None], ...]:
    groups: dict[str | None, list[int]] = {}
    for rank in sorted(by_rank):
        groups.setdefault(by_rank[rank], []).append(rank)
    ordered = sorted(groups.items(), key=lambda entry: (-len(entry[1]), entry[1][0]))
    return tuple((tuple(ranks), value) for value, ranks in ordered)


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
