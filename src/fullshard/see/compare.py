"""Compares two runs: settings, times, bytes, waits and losses."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import NamedTuple

from .causes import exposures
from .record import Header, RankRecord, Run
from .timeline import Memory, human, milliseconds, shares


class Change(NamedTuple):
    """One line of the comparison. `worse`: by more than a twentieth."""

    what: str
    before: str
    after: str
    change: str
    worse: bool = False


def changes(before: Run, after: Run, step: int | None = None) -> list[Change]:
    """Settings that differ, then figures of the first rank: medians over steps, and the last step that each run
    recorded in full (or `step`). Raises `RecordError` where a run has none."""
    found = _settings(before, after)
    one, two = before.ranks[0], after.ranks[0]
    numbers = before.shown_step(step), after.shown_step(step)
    found.append(_times("median step", _median(one), _median(two)))
    first, second = one.step(numbers[0]), two.step(numbers[1])
    assert first is not None and second is not None and first.detail is not None and second.detail is not None
    name = f"step {numbers[0]}" if numbers[0] == numbers[1] else f"step {numbers[0]} and {numbers[1]}"
    pairs = zip(
        ("compute of units", "exposed messages", "host", "data, loss, optimizer"),
        shares(first),
        shares(second),
        strict=True,
    )
    found += [_times(f"{name}: {what}", a, b) for what, a, b in pairs]
    found.append(
        _bytes(
            f"{name}: peak of what the library holds", Memory(first.detail).peak()[1], Memory(second.detail).peak()[1]
        )
    )
    sent = [sum(message.nbytes for message in each.detail.messages) for each in (first, second) if each.detail]
    found.append(_bytes(f"{name}: bytes received", *sent))
    found += _waits(before, after, numbers)
    return found + _losses(one, two)


def _settings(before: Run, after: Run) -> list[Change]:
    one, two = before.ranks[0].header, after.ranks[0].header
    pairs = [
        ("ranks", one.world, two.world),
        ("device", one.device, two.device),
        ("units", len(one.units), len(two.units)),
    ]
    pairs += [
        (f"version of {name}", one.versions.get(name), two.versions.get(name)) for name in one.versions | two.versions
    ]
    pairs += [(name, one.options.get(name), two.options.get(name)) for name in one.options | two.options]
    found = [Change(what, _shown(a), _shown(b), "differs") for what, a, b in pairs if a != b]
    return found + _unit_settings(one, two)


_OF_UNITS = {
    "dtypes": "dtypes (stored, computed, reduced)",
    "reshard_after_forward": "reshard_after_forward",
    "numel": "parameters",
}


def _unit_settings(one: Header, two: Header) -> list[Change]:
    """A line for all units that differ in the same way: models have many that are alike."""
    others = {unit.name: unit for unit in one.units}
    alike: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for unit in two.units:
        for what, words in _OF_UNITS.items() if unit.name in others else ():
            before, after = getattr(others[unit.name], what), getattr(unit, what)
            if before != after:
                alike[words, _shown(before), _shown(after)].append(unit.name)
    return [
        Change(f"{words} of {_listed(names, len(two.units))}", before, after, "differs")
        for (words, before, after), names in alike.items()
    ]


def _listed(names: list[str], whole: int) -> str:
    """
    >>> _listed(["a", "b"], 2), _listed(["a", "b"], 5), _listed(["a", "b", "c", "d"], 5)
    ('all 2 units', 'a, b', 'a .. d (4 units)')
    """
    if len(names) == whole > 1:
        return f"all {whole} units"
    return ", ".join(names) if len(names) < 4 else f"{names[0]} .. {names[-1]} ({len(names)} units)"


def _shown(value: object) -> str:
    return "-" if value is None else str(value)


def _median(rank: RankRecord) -> int:
    took = [step.nanoseconds for step in rank.steps[1:] or rank.steps if not step.failed]
    return round(median(took)) if took else 0


def _change(before: float, after: float) -> str:
    """
    >>> _change(100, 95), _change(2, 90), _change(0, 7), _change(0, 0)
    ('-5.0 %', '45 times', 'new', '')
    """
    if not before:
        return "new" if after else ""
    return f"{after / before:,.0f} times" if after >= 10 * before else f"{100 * (after / before - 1):+.1f} %"


def _times(what: str, before: int, after: int) -> Change:
    worse = after > 1.05 * before
    return Change(what, milliseconds(before), milliseconds(after), _change(before, after), worse)


def _bytes(what: str, before: int, after: int) -> Change:
    return Change(what, human(before), human(after), _change(before, after), after > 1.05 * before)


def _waits(before: Run, after: Run, numbers: tuple[int, int]) -> list[Change]:
    """The five waits that changed most."""
    sums: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for side, (run, number) in enumerate(zip((before, after), numbers, strict=True)):
        rank = run.ranks[0]
        for item in exposures(run, rank, number):
            unit = f" of {rank.name_of(item.unit)}" if item.unit >= 0 else ""
            sums[f"waits for {item.what}{unit}{', ' + item.phase if item.phase else ''}"][side] += item.nanoseconds
    most = sorted(sums.items(), key=lambda item: -abs(item[1][1] - item[1][0]))[:5]
    return [_times(what, a, b) for what, (a, b) in most]


def _losses(one: RankRecord, two: RankRecord) -> list[Change]:
    """Figures of the last step that both have."""
    common = {step.number: step for step in one.steps if step.figures}
    both = [(common[step.number], step) for step in two.steps if step.number in common and step.figures]
    if not both:
        return []
    first, second = both[-1]
    found = []
    for name in first.figures:
        a, b = first.figures[name], second.figures.get(name)
        if a is not None and b is not None:
            found.append(
                Change(
                    f"{name} of step {first.number}", f"{a:.6g}", f"{b:.6g}", f"{b - a:+.3g}" if a != b else "the same"
                )
            )
    return found
