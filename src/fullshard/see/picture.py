"""Drawings of a run as SVG: lanes of a step, bytes over a step, curves over steps. Each is one element, no scripts."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .chrome import rows_of
from .record import KINDS, RankRecord, Step
from .timeline import COMPUTE, HOST, WAIT, Memory, Span, human, milliseconds, on_device, spans

WIDTH, LEFT, RIGHT = 1080, 96, 14
# By kind of bytes.
COLORS = {
    "shards": "#64748b",
    "optimizer": "#94a3b8",
    "sharded gradients": "#a78bfa",
    "full": "#2563eb",
    "secondary": "#60a5fa",
    "gradients": "#d97706",
    "held": "#b45309",
    "messages": "#0d9488",
    "staging": "#99f6e4",
}
_WAIT, _HOST, _OTHER = "#dc2626", "#52525b", "#d4d4d8"
# Units beyond this share a row in pictures by unit: more rows could not be distinguished.
_ROWS = 40


class Axis(NamedTuple):
    """Nanoseconds from 0 to `end` over the width of a picture."""

    end: int

    def x(self, at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * at / max(self.end, 1)

    def ticks(self, height: float) -> str:
        step = _round_up(self.end / 8)
        found = []
        for number in range(int(self.end // step) + 1):
            x = self.x(number * step)
            anchor = "middle" if x < WIDTH - 1.5 * RIGHT else "end"  # inside of the picture
            found.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 16}" stroke="#e5e7eb"/>'
                f'<text x="{x:.1f}" y="{height - 4}" text-anchor="{anchor}">{milliseconds(number * step)}</text>'
            )
        return "".join(found)


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20 ... at or above `value`.

    >>> _round_up(0.13e6), _round_up(7)
    (200000.0, 10.0)
    """
    power = 10.0 ** math.floor(math.log10(max(value, 1)))
    return float(next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value))


def unit_color(unit: int, phase: str) -> str:
    """Neighbouring units differ; backward is darker than forward."""
    if unit < 0:
        return _OTHER
    light = 62 if phase == "forward" else 44
    return f"hsl({(205 + unit * 47) % 360},52%,{light}%)"


def _svg(kind: str, height: float, parts: Iterable[str], label: str) -> str:
    return (
        f'<svg class="{kind}" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'role="img" aria-label="{html.escape(label, quote=True)}" font-family="system-ui, sans-serif" '
        f'font-size="11">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str, title: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return (
        f'<rect{name} x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.6):.2f}" height="{height:.1f}" fill="{fill}">'
        f"<title>{html.escape(title)}</title></rect>"
    )


def picture(rank: RankRecord, step: Step) -> str:
    """Lanes, bytes by kind and bytes by unit of a step, below each other, as one file."""
    drawn = [lanes(rank, step), bytes_by_kind(rank, step), bytes_by_unit(rank, step), _key()]
    heights = [float(re.search(r'viewBox="0 0 \d+ (\d+)"', one)[1]) for one in drawn]  # type: ignore[index]
    parts = [f'<rect width="{WIDTH}" height="{sum(heights):.0f}" fill="#fff"/>']
    for number, (one, height) in enumerate(zip(drawn, heights, strict=True)):
        parts.append(one.replace("<svg ", f'<svg y="{sum(heights[:number]):.0f}" height="{height:.0f}" ', 1))
    return _svg("picture", sum(heights), parts, f"step {step.number} of rank {rank.header.rank}") + "\n"


def _key() -> str:
    """Explains the colours."""
    parts, x = [], float(LEFT)
    for name, color in (*COLORS.items(), ("waits", _WAIT), ("commands", _HOST)):
        parts.append(f'<rect x="{x:.0f}" y="6" width="10" height="10" fill="{color}"/>' + _text(x + 14, 15, name))
        x += 30 + 6.2 * len(name)
    return _svg("key", 22, parts, "colours")


# ---- lanes -----------------------------------------------------------------------------------------------------------

_LANE, _GAP = 24, 8


def lanes(rank: RankRecord, step: Step, end: int = 0) -> str:
    """Compute, waits and commands in one lane, messages below, arrows from issue to message to need. `end`: the end of
    the axis in nanoseconds, if it is not the step's."""
    assert step.detail is not None
    found = spans(step)
    device = on_device(step.detail)
    axis = Axis(end or max([step.nanoseconds] + [span.end for span in found]))
    rows = [] if device else rows_of(step.detail.messages)
    runs_y, messages_y = 8.0, 8.0 + _LANE + 34
    height = messages_y + len(rows) * (_LANE - 8 + 4) + 26
    parts = [axis.ticks(height), _text(4, runs_y + 16, "device" if device else "runs")]
    for span in found:
        parts.append(_span(rank, axis, span, runs_y))
    if rows:
        parts.append(_text(4, messages_y + 12, "messages"))
    for number, row in enumerate(rows):
        y = messages_y + number * (_LANE - 8 + 4)
        for message in row:
            last = message.arrived if message.arrived is not None else message.issue
            name = f"{message.purpose} {rank.name_of(message.unit)}" if message.unit >= 0 else message.purpose
            title = (
                f"{name}: message {message.number}, {human(message.nbytes)}, issued at {milliseconds(message.issue)}"
            )
            if message.need is not None:
                title += f", needed {milliseconds(message.need - message.issue)} later"
                title += f", exposed {milliseconds(message.exposed)}"
            x = axis.x(message.issue)
            if message.arrival is None:
                title += "; the backend does not tell when it arrived: at the end of the wait, at the latest"
            parts.append(
                _box(x, y, axis.x(last) - x, _LANE - 8, unit_color(message.unit, "backward"), title, "message")
            )
            if message.need is not None:
                parts.append(_arrow(x, y, axis.x(message.need), runs_y + _LANE, exposed=message.exposed > 50_000))
    return _svg("lanes", height, parts, f"lanes of rank {rank.header.rank} in step {step.number}")


def _span(rank: RankRecord, axis: Axis, span: Span, y: float) -> str:
    unit = rank.name_of(span.unit) if span.unit >= 0 else ""
    fill = {WAIT: _WAIT, HOST: _HOST}.get(span.kind, unit_color(span.unit, span.what))
    word = {WAIT: "waits for ", HOST: "command "}.get(span.kind, "")
    title = (
        f"{word}{span.what} {unit}".strip() + f", {milliseconds(span.end - span.begin)} from {milliseconds(span.begin)}"
    )
    x = axis.x(span.begin)
    width = axis.x(span.end) - x
    drawn = _box(x, y, width, _LANE, fill, title, span.kind)
    label = unit or ("" if span.kind != COMPUTE else span.what)
    if span.kind == COMPUTE and width > 7 * len(label) + 4 and label:
        color = "#fff" if span.unit >= 0 else "#333"
        drawn += (
            f'<text x="{x + 3:.1f}" y="{y + 16:.1f}" fill="{color}" pointer-events="none">{html.escape(label)}</text>'
        )
    return drawn


def _arrow(x1: float, y1: float, x2: float, y2: float, *, exposed: bool) -> str:
    """Draws an arrow from the message's begin up to the moment in which it was needed."""
    color = _WAIT if exposed else "#9ca3af"
    return (
        f'<path class="need" d="M{x1:.1f},{y1:.1f} L{x2:.1f},{y2 + 2:.1f} m-3,5 l3,-5 l3,5" fill="none" '
        f'stroke="{color}" stroke-width="{1.2 if exposed else 0.8}" pointer-events="none"/>'
    )


# ---- bytes -----------------------------------------------------------------------------------------------------------


def bytes_by_kind(rank: RankRecord, step: Step, *, end: int = 0, most: int = 0) -> str:
    """Draws the bytes that the library holds, stacked by kind. `end`, `most`: ends of the axes, if they are not the
    step's own."""
    assert step.detail is not None
    memory = Memory(step.detail)
    axis = Axis(end or step.nanoseconds)
    peak_at, peak, _ = memory.peak()
    height, top, base = 220.0, 12.0, 190.0
    scale = (base - top) / max(most or peak, 1)
    moments = [(at, {kind: sum(n for (_, k), n in now.items() if k == kind) for kind in KINDS}) for at, now in memory]
    moments.append((step.nanoseconds, moments[-1][1] if moments else dict.fromkeys(KINDS, 0)))
    parts = [axis.ticks(height)]
    below = [0.0] * len(moments)
    for kind in KINDS:
        above = [low + sums[kind] for low, (_, sums) in zip(below, moments, strict=True)]
        if above != below:
            upper = _steps(axis, moments, above, base, scale)
            lower = _steps(axis, moments, below, base, scale)
            points = " ".join([*upper, *reversed(lower)])
            parts.append(
                f'<polygon class="bytes" points="{points}" fill="{COLORS[kind]}"><title>{kind}, at most '
                f"{human(max(sums[kind] for _, sums in moments))}</title></polygon>"
            )
        below = above
    x = axis.x(peak_at)
    parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{base}" stroke="#111" stroke-dasharray="3 3"/>')
    parts.append(_text(LEFT - 6, top + 6, human(most or peak), "end") + _text(LEFT - 6, base, "0", "end"))
    left = x > WIDTH * 0.7
    parts.append(_text(x + (-5 if left else 5), top + 8, f"peak {human(peak)}", "end" if left else "start"))
    return _svg("memory", height, parts, f"bytes of rank {rank.header.rank} in step {step.number} by kind")


def _steps(
    axis: Axis, moments: Sequence[tuple[int, object]], values: Sequence[float], base: float, scale: float
) -> list[str]:
    """Corners of a staircase: a value holds until the next moment."""
    found: list[str] = []
    for number, ((at, _), value) in enumerate(zip(moments, values, strict=True)):
        y = base - value * scale
        found.append(f"{axis.x(at):.1f},{y:.1f}")
        if number + 1 < len(moments):
            found.append(f"{axis.x(moments[number + 1][0]):.1f},{y:.1f}")
    return found


def bytes_by_unit(rank: RankRecord, step: Step, end: int = 0) -> str:
    """A row for each unit, as high as its bytes beyond shards and optimizer; all rows have the same scale. `end`: of
    the axis, if it is not the step's own."""
    assert step.detail is not None
    axis = Axis(end or step.nanoseconds)
    moving = [kind for kind in KINDS if kind not in ("shards", "optimizer", "sharded gradients", "staging")]
    rows: list[tuple[str, list[tuple[int, dict[str, int]]]]] = []
    memory = Memory(step.detail)
    for number, unit in enumerate(rank.header.units[:_ROWS]):
        now = dict.fromkeys(moving, 0)
        changes = []
        for level in memory.of_unit(number):
            if level.kind in now:
                now[level.kind] = level.nbytes
                changes.append((level.at, dict(now)))
        if changes:
            rows.append((unit.name, changes))
    most = max((sum(now.values()) for _, changes in rows for _, now in changes), default=1)
    line = 26.0 if len(rows) <= 16 else 15.0
    height = 8 + len(rows) * line + 22
    parts = [axis.ticks(height)]
    for position, (name, changes) in enumerate(rows):
        base = 8 + (position + 1) * line - 3
        short = name if len(name) <= 14 else "…" + name[-13:]
        parts.append(_text(4, base, short))
        for (at, now), (until, _) in zip(changes, [*changes[1:], (step.nanoseconds, {})], strict=True):
            low = base
            x, width = axis.x(at), axis.x(until) - axis.x(at)
            for kind in moving:
                if now[kind] and until > at:
                    tall = now[kind] / max(most, 1) * (line - 4)
                    low -= tall
                    parts.append(_box(x, low, width, tall, COLORS[kind], f"{name}: {kind} {human(now[kind])}", "bytes"))
    left_out = len(rank.header.units) - _ROWS
    if left_out > 0:
        parts.append(_text(4, height - 4, f"{left_out} more units"))
    return _svg("units", height, parts, f"bytes of rank {rank.header.rank} in step {step.number} by unit")


# ---- curves and bars -------------------------------------------------------------------------------------------------


def curve(series: Sequence[tuple[str, str, Sequence[tuple[int, float]]]], label: str) -> str:
    """Lines over steps: (name, color, points). Points that are not finite are left out."""
    height, top, base = 190.0, 14.0, 160.0
    points = [(x, y) for _, _, line in series for x, y in line if math.isfinite(y)]
    if not points:
        return ""
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def at(x: int, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * (x - first) / max(last - first, 1)
        return across, base - (base - top) * (y - low) / ((high - low) or 1.0)

    parts = [
        _text(LEFT - 6, top + 4, _short(high), "end"),
        _text(LEFT - 6, base, _short(low), "end"),
        _text(LEFT, height - 12, f"step {first}"),
        _text(WIDTH - RIGHT, height - 12, f"step {last}", "end"),
    ]
    for number, (name, color, line) in enumerate(series):
        drawn = [at(x, y) for x, y in line if math.isfinite(y)]
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        shape = f'<polyline class="curve" points="{corners}" fill="none" stroke="{color}" stroke-width="1.8"/>'
        if len(drawn) == 1:
            shape = f'<circle class="curve" cx="{drawn[0][0]:.1f}" cy="{drawn[0][1]:.1f}" r="3" fill="{color}"/>'
        parts.append(shape)
        x = WIDTH / 2 + 180 * (number - len(series) / 2)
        parts.append(f'<rect x="{x:.1f}" y="{height - 20}" width="14" height="4" fill="{color}"/>')
        parts.append(_text(x + 18, height - 14, name))
    return _svg("curves", height, parts, label)


def _short(value: float) -> str:
    """
    >>> _short(11490.4), _short(0.0012), _short(5.59374)
    ('11,490', '0.0012', '5.594')
    """
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def bars(rows: Sequence[tuple[str, Sequence[tuple[str, str, int]]]], label: str) -> str:
    """A bar for each row, of parts (name, color, nanoseconds), all on one scale."""
    line = 22.0
    height = 6 + len(rows) * line + 20
    axis = Axis(max((sum(part for _, _, part in parts) for _, parts in rows), default=1))
    drawn = [axis.ticks(height)]
    for number, (name, parts) in enumerate(rows):
        y, cursor = 6 + number * line, 0
        drawn.append(_text(4, y + 13, name))
        for what, color, part in parts:
            x = axis.x(cursor)
            drawn.append(
                _box(x, y, axis.x(cursor + part) - x, line - 6, color, f"{name}: {what} {milliseconds(part)}", "part")
            )
            cursor += part
    return _svg("bars", height, drawn, label)


PART_COLORS = {"compute": "#2563eb", "exposed messages": _WAIT, "host": _HOST, "loss, optimizer, data": _OTHER}
