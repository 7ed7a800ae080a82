"""A plan as a picture: bytes over a step by kind, and the lanes of compute and messages; SVG, and one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..page import document, escape, heading, paragraph
from ..page import table as table_of
from .account import KINDS, Moment
from .result import Plan, assumptions, duration, gigabytes, table

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _LEGEND = 980, 420, 70, 46, 190
# One colour for each kind, in the order of KINDS.
_COLOURS = (
    "#355070",
    "#6d597a",
    "#8d99ae",
    "#adb5bd",
    "#c9ada7",
    "#2a9d8f",
    "#577590",
    "#e76f51",
    "#f4a261",
    "#f6bd60",
    "#43aa8b",
    "#90be6d",
    "#b56576",
    "#d62828",
    "#4d4d4d",
)


def svg(plan: Plan) -> str:
    """Bytes of one rank over a step, stacked by kind; the budget as a line."""
    moments = plan.simulated.moments
    others = sum(nbytes for name, nbytes in plan.terms if name not in KINDS)
    most = max(plan.peak_nbytes, min(plan.budget, 1.4 * plan.peak_nbytes))
    width, height = _WIDTH - _LEFT - _LEGEND, _HEIGHT - _BOTTOM - 30
    end = max(moments[-1].seconds, 1e-12)

    def x(seconds: float) -> float:
        return _LEFT + width * seconds / end

    def y(nbytes: float) -> float:
        return 30 + height * (1 - nbytes / most)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="12">',
        f"<title>{escape(plan.model.name)}: memory of one rank over a step</title>",
        f'<text x="{_LEFT}" y="18">{escape(plan.model.name)}, {plan.strategy.ranks} x {escape(plan.hardware.name)}, '
        f"{escape(str(plan.strategy))}</text>",
    ]
    floor = [others] * len(moments)
    parts.append(_band("reserved, communicators, fragmentation", "#dddddd", moments, [0.0] * len(moments), floor, x, y))
    legend = [("reserved and allowances", "#dddddd")]
    for number, kind in enumerate(KINDS):
        if not any(moment.nbytes[number] for moment in moments):
            continue
        top = [low + moment.nbytes[number] for low, moment in zip(floor, moments, strict=True)]
        parts.append(_band(kind, _COLOURS[number], moments, floor, top, x, y))
        legend.append((kind, _COLOURS[number]))
        floor = top
    if plan.budget <= most:
        parts.append(
            f'<line class="budget" x1="{_LEFT}" x2="{_LEFT + width}" y1="{y(plan.budget):.1f}" '
            f'y2="{y(plan.budget):.1f}" '
            f'stroke="#b00020" stroke-width="2" stroke-dasharray="6 4"/>'
            f'<text x="{_LEFT + width - 4}" y="{y(plan.budget) + 14:.1f}" text-anchor="end" fill="#b00020">'
            f"budget {gigabytes(plan.budget)}</text>"
        )
    for share in range(5):
        nbytes = most * share / 4
        parts.append(f'<text x="{_LEFT - 6}" y="{y(nbytes) + 4:.1f}" text-anchor="end">{gigabytes(nbytes)}</text>')
        parts.append(
            f'<text x="{x(end * share / 4):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">'
            f"{duration(end * share / 4)}</text>"
        )
    peak = plan.simulated.peak
    parts.append(
        f'<text x="{_LEFT}" y="{_HEIGHT - 8}">peak {gigabytes(plan.peak_nbytes)} in {escape(peak.phase)}, '
        f"at {duration(peak.seconds)}</text>"
    )
    for number, (kind, colour) in enumerate(reversed(legend)):
        top_y = 34 + 19 * number
        parts.append(f'<rect x="{_WIDTH - _LEGEND + 14}" y="{top_y}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{_WIDTH - _LEGEND + 32}" y="{top_y + 11}">{escape(kind)}</text>')
    return "\n".join([*parts, "</svg>"])


def _band(
    name: str,
    colour: str,
    moments: Sequence[Moment],
    low: Sequence[float],
    high: Sequence[float],
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> str:
    upper = _steps([(x(m.seconds), y(top)) for m, top in zip(moments, high, strict=True)])
    lower = _steps([(x(m.seconds), y(bottom)) for m, bottom in zip(moments, low, strict=True)])
    points = " ".join([*upper, *reversed(lower)])
    return f'<polygon class="kind" points="{points}" fill="{colour}"><title>{escape(name)}</title></polygon>'


def _steps(points: Sequence[tuple[float, float]]) -> list[str]:
    """The corners of a line that stays where it is until the next point. Points that do not differ in the picture are
    left out, but for the ends."""
    there = points[0]
    corners = [f"{there[0]:.1f},{there[1]:.1f}"]
    for at, height in points[1:]:
        if abs(height - there[1]) >= 0.05:
            corners += [f"{at:.1f},{there[1]:.1f}", f"{at:.1f},{height:.1f}"]
            there = (at, height)
    corners.append(f"{points[-1][0]:.1f},{there[1]:.1f}")
    return list(dict.fromkeys(corners))


def page(plan: Plan) -> str:
    """One HTML page that needs nothing else: the picture, the table, where compute waits, and the assumptions."""
    kind, verdict = ("good", "fits") if plan.fits else ("bad", "does not fit")
    waits = sorted(plan.simulated.exposed, key=lambda wait: -wait.seconds)[:20]
    rows = [(wait.unit, wait.what, duration(wait.seconds)) for wait in waits]
    title = f"{plan.model.name} on {plan.strategy.ranks} x {plan.hardware.name}"
    parts = [
        f'<h1>{escape(title)}: <span class="{kind}">{verdict}</span></h1>',
        svg(plan),
        f"<pre>{escape(table(plan))}</pre>",
        heading("Where compute waits for messages", level=2),
        table_of(("unit", "waits for", "time"), rows, right=(2,)) if rows else paragraph("Nowhere."),
        heading("What is assumed", level=2),
        f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in assumptions(plan))}</ul>",
    ]
    return document(f"Plan of {plan.model.name}", parts)
