"""Which cases of a large family run where: the marker `sample(n, full=m)`.

    make test        n of the cases that are not marked slow; without n all of these
    make test-full   m of all cases, those n among them; without m all
    make test-all    all

The choice is the same on each day and each machine. It covers: first each value of each argument of `parametrize`, then
each pair of values, and of cases that are alike in that those far apart in the order of the family.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import pytest

# What is given to each argument of a case: something that is equal where the values are.
Case = Mapping[str, object]


def choose(cases: Sequence[Case], n: int, first: Iterable[int] = ()) -> list[int]:
    """`n` of `cases` as indices, in their order; `first` are among them, however many they are.

    >>> choose([{"a": a, "b": b} for a in range(3) for b in range(2)], 3)
    [0, 2, 5]
    >>> choose([{"a": a} for a in range(9)], 3), choose([{"a": a} for a in range(9)], 3, first=[1, 2])
    ([0, 4, 8], [1, 2, 8])
    """
    shown = [frozenset(case.items()) for case in cases]
    pairs = [frozenset(combinations(sorted(case, key=lambda item: item[0]), 2)) for case in shown]
    chosen: list[int] = []
    values: set[object] = set()
    together: set[object] = set()
    far = [len(cases)] * len(cases)

    def take(index: int) -> None:
        chosen.append(index)
        values.update(shown[index])
        together.update(pairs[index])
        far[:] = [min(known, abs(index - i)) for i, known in enumerate(far)]

    for index in first:
        take(index)
    while len(chosen) < min(n, len(cases)):
        left = [index for index in range(len(cases)) if far[index]]
        take(max(left, key=lambda i: (len(shown[i] - values), len(pairs[i] - together), far[i], -i)))
    return sorted(chosen)


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark as slow what `make test` leaves out of samples, and as `beyond` what `make test-full` leaves out.

    A case that was selected alone, by its name, is its whole family. Torch's half of a test is a family of its own.
    """
    families: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") is not None:
            families.setdefault((item.nodeid.partition("[")[0], is_torch_s(item)), []).append(item)
    for family in families.values():
        n, full = _numbers(family[0])
        places = [_case(item) for item in family]
        quick = [index for index, item in enumerate(family) if not item.get_closest_marker("slow")]
        if n is not None:
            kept = [quick[i] for i in choose([places[index] for index in quick], n)]
            for index in set(quick) - set(kept):
                family[index].add_marker(pytest.mark.slow)
            quick = kept
        if full is not None:
            for index in set(range(len(family))) - set(choose(places, full, first=quick)):
                family[index].add_marker(pytest.mark.beyond)


def _numbers(item: pytest.Item) -> tuple[int | None, int | None]:
    """`n` and `full` of the marker of `item`."""
    marker = item.get_closest_marker("sample")
    assert marker is not None
    n = marker.args[0] if marker.args else None
    full = marker.kwargs.get("full")
    if len(marker.args) > 1 or set(marker.kwargs) - {"full"} or (n is None and full is None):
        raise pytest.UsageError(f"{item.nodeid}: expected sample(n), sample(n, full=m) or sample(full=m)")
    return n, full


def _case(item: pytest.Item) -> Case:
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else {name: _equal(value) for name, value in callspec.params.items()}


def _equal(value: object) -> object:
    """`value`, apart from equal ones of other types; an object that has no hash is equal to itself."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def is_torch_s(item: pytest.Item) -> bool:
    """Whether it is torch's implementation that the test runs for."""
    callspec = getattr(item, "callspec", None)
    return callspec is not None and getattr(callspec.params.get("impl"), "name", "") == "torch"


def said(left_out: Sequence[str], of: int) -> str:
    """One line: how many of all tests were left out, and of which families how many, by name."""
    if not left_out:
        return f"Nothing was left out of {of:,} tests."
    families: dict[str, int] = {}
    for name in left_out:
        family = name.partition("[")[0].removeprefix("tests/")
        families[family] = families.get(family, 0) + 1
    names = ", ".join(f"{family} ({count})" for family, count in families.items())
    return f"Left out, of {of:,} tests {len(left_out):,}, which `make test-all` runs: {names}."
