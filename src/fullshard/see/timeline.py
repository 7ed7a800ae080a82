"""Reconstructs what one rank did in one step, and when: compute, commands, waits for messages; and the bytes that it
held.

On a CPU the thread that computes also issues commands and waits, so these three fill the step without a gap. On a
device the spans are those of the device's clock: compute, and waits of its stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .record import Detail, Level, Step

# Where the time of a step goes.
COMPUTE, WAIT, HOST = "compute", "wait", "host"
# A device that is less than this late after the host is waiting for it: about what a launch takes.
_LAG = 50_000


class Span(NamedTuple):
    """A time from `begin` to `end`, in nanoseconds since the step began. `what`: the phase, the command, or the
    message."""

    kind: str
    begin: int
    end: int
    unit: int
    what: str


class State(NamedTuple):
    """A state: from `at` on, compute belongs to `unit` (-1: none) and `phase`."""

    at: int
    unit: int
    phase: str


def states(detail: Detail, *, device: bool = False) -> list[State]:
    """Returns the unit that computes, from event to event. `device`: on the device's clock."""
    found = [State(0, -1, "before the forward")]
    stack: list[tuple[int, str]] = []
    backward = -1
    in_backward = False
    for event in detail.events:
        kind, unit = event.kind, event.unit
        if kind == "pre_forward":
            stack.append((unit, "recomputation" if in_backward else "forward"))
        elif kind in ("post_forward", "forward_failed"):
            while stack and stack.pop()[0] != unit:
                pass
        elif kind == "pre_backward":
            in_backward, backward = True, unit
        elif kind == "inputs_reached" and backward == unit:
            backward = -1
        elif kind in ("backward_end", "backward_failed"):
            in_backward, backward = False, -1
        if stack:
            now = stack[-1]
        elif in_backward:
            now = backward, "backward"
        else:
            now = -1, "optimizer and the rest" if kind == "backward_end" else found[-1].phase
            if kind == "post_forward":
                now = -1, "loss"
        at = event.device if device and event.device is not None else event.at
        found.append(State(at, *now))
    return found


def on_device(detail: Detail) -> bool:
    """Whether the step has the device's times."""
    return any(event.device is not None for event in detail.events)


def spans(step: Step) -> list[Span]:
    """The step without gaps or overlaps, in order. Empty if it was not recorded in full."""
    detail = step.detail
    if detail is None:
        return []
    device = on_device(detail)
    busy = sorted(_waits(detail, device=device), key=lambda span: span.begin)
    if not device:
        busy = sorted([*busy, *_between(detail, busy)], key=lambda span: span.begin)
    begun = states(detail, device=device)
    end = step.nanoseconds if not device else max([state.at for state in begun] + [span.end for span in busy])
    found: list[Span] = []
    cursor = 0
    for span in [*busy, Span("", end, end, -1, "")]:
        found += _computed(begun, cursor, min(span.begin, end))
        begin = max(span.begin, cursor)
        if span.kind and span.end > begin:
            found.append(span._replace(begin=begin))
        cursor = max(cursor, span.end)
    return found


def _waits(detail: Detail, *, device: bool) -> Iterator[Span]:
    for message in detail.messages:
        need, ready = (message.device_need, message.device_ready) if device else (message.need, message.ready)
        if need is not None and ready is not None and ready > need:
            yield Span(WAIT, need, ready, message.unit, message.purpose)


def _between(detail: Detail, waits: Sequence[Span]) -> Iterator[Span]:
    """The parts of commands in which they do not wait."""
    for command in detail.commands:
        cursor = command.begin
        for wait in waits:
            if wait.end <= cursor or wait.begin >= command.end:
                continue
            if wait.begin > cursor:
                yield Span(HOST, cursor, wait.begin, command.unit, command.kind)
            cursor = max(cursor, wait.end)
        if cursor < command.end:
            yield Span(HOST, cursor, command.end, command.unit, command.kind)


def _computed(begun: Sequence[State], begin: int, end: int) -> Iterator[Span]:
    """Compute from `begin` to `end`, cut where another unit begins."""
    for state, later in zip(begun, [*begun[1:], State(end, -1, "")], strict=True):
        first, last = max(begin, state.at), min(end, later.at) if later.phase else end
        if last > first:
            yield Span(COMPUTE, first, last, state.unit, state.phase)


def phases(step: Step) -> dict[str, int]:
    """Returns the nanoseconds of a step by phase, waits and commands included; empty if it was not recorded in full."""
    if step.detail is None:
        return {}
    begun = states(step.detail, device=on_device(step.detail))
    found: Counter[str] = Counter()
    for state, later in zip(begun, [*begun[1:], State(max(step.nanoseconds, begun[-1].at), -1, "")], strict=True):
        found[state.phase] += later.at - state.at
    return dict(found)


# ---- shares ----------------------------------------------------------------------------------------------------------


class Shares(NamedTuple):
    """Nanoseconds of a step by kind. `other`: data, loss and optimizer, before the first and after the last unit."""

    compute: int
    wait: int
    host: int
    other: int

    @property
    def total(self) -> int:
        return sum(self)


def shares(step: Step) -> Shares:
    """Where the time of the step went. `host` on a device: what `host_bound` says."""
    held: Counter[str] = Counter()
    for span in spans(step):
        other = span.kind == COMPUTE and span.unit < 0
        held["other" if other else span.kind] += span.end - span.begin
    if step.detail is not None and on_device(step.detail):
        held[HOST] = min(host_bound(step.detail), held[COMPUTE])
        held[COMPUTE] -= held[HOST]
    return Shares(held[COMPUTE], held[WAIT], held[HOST], held["other"])


def host_bound(detail: Detail) -> int:
    """Nanoseconds in which the device waited for the host: between events that it came to as soon as they were issued.

    The two clocks have no common zero, but a device is never ahead of its host: the smallest lag is taken as none."""
    both = [(event.at, event.device) for event in detail.events if event.device is not None]
    if len(both) < 2:
        return 0
    least = min(device - host for host, device in both)
    lags = [device - host - least for host, device in both]
    pairs = zip(both[:-1], both[1:], lags[:-1], lags[1:], strict=True)
    return sum(later - before for (_, before), (_, later), a, b in pairs if a < _LAG and b < _LAG)


# ---- bytes -----------------------------------------------------------------------------------------------------------


class Memory:
    """The bytes of a rank over a step: `at` any moment, and the peak."""

    def __init__(self, detail: Detail) -> None:
        self._levels = sorted(detail.levels, key=lambda level: level.at)

    def __iter__(self) -> Iterator[tuple[int, dict[tuple[int, str], int]]]:
        """Each moment at which something changed, and the bytes by (unit, kind) from then on: one dict, changed."""
        now: dict[tuple[int, str], int] = {}
        for position, level in enumerate(self._levels):
            now[level.unit, level.kind] = level.nbytes
            if position + 1 == len(self._levels) or self._levels[position + 1].at != level.at:
                yield level.at, now

    def peak(self) -> tuple[int, int, list[tuple[int, str, int]]]:
        """When most is held, how much, and by whom: (unit, kind, bytes), the largest first."""
        best: tuple[int, int, list[tuple[int, str, int]]] = (0, 0, [])
        for at, now in self:
            total = sum(now.values())
            if total > best[1]:
                best = at, total, [(unit, kind, nbytes) for (unit, kind), nbytes in now.items() if nbytes]
        return best[0], best[1], sorted(best[2], key=lambda item: -item[2])

    def of_unit(self, unit: int) -> list[Level]:
        return [level for level in self._levels if level.unit == unit]


# ---- words -----------------------------------------------------------------------------------------------------------


def milliseconds(nanoseconds: float) -> str:
    """
    >>> milliseconds(1_234_567), milliseconds(12_345_678), milliseconds(45_000)
    ('1.23 ms', '12.3 ms', '0.045 ms')
    """
    if not nanoseconds:
        return "0 ms"
    value = nanoseconds / 1e6
    if value >= 10_000:
        return f"{value / 1e3:.1f} s"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:.{digits}f} ms"


def human(nbytes: float) -> str:
    """Bytes in powers of 1024.

    >>> human(812), human(1536)
    ('812 B', '1.5 KiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
