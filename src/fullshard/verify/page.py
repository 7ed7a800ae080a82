"""Results as a table for the terminal, as JSON, and as one HTML page with pictures and no other files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from fullshard import __version__
from fullshard import page as html
from fullshard.rounding import RISK

from .comparison import Result

_BESIDE = ("compared", "same_bits")


def table(results: Sequence[Result]) -> str:
    """One line a setting; then the differences, failures and notes in full."""
    rows = [("strategy", "library", "ranks", "result", "compared", "same bits", "worst error / allowed")]
    for result in results:
        setting = result.setting
        worst = max((error / allowed for error, allowed in result.errors.values() if allowed), default=0.0)
        counted = (str(result.compared), f"{100 * result.same_bits / max(result.compared, 1):.0f} %", f"{worst:.2g}")
        rows.append(
            (str(setting.strategy), setting.library, str(setting.world), result.verdict)
            + (("-", "-", "-") if result.failure else counted)
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += _exercised(results)
    for result in results:
        lines += [f"{result.setting.strategy} ({result.setting.library}): {line}" for line in _texts(result)]
    return "\n".join(lines)


def _exercised(results: Sequence[Result]) -> list[str]:
    """Says what was exercised and equal, and what was not exercised and why, each with its settings."""
    found: dict[str, list[str]] = {}
    for result in results:
        lines = [f"not exercised: {name}: {why}" for name, why in result.not_exercised.items()]
        if result.exercised and result.verdict == "equal":
            lines.append(f"exercised beside steps, and equal: {', '.join(result.exercised)}")
        for line in lines:
            found.setdefault(line, []).append(f"{result.setting.strategy} ({result.setting.library})")
    return [line if len(who) == len(results) else f"{', '.join(who)}: {line}" for line, who in found.items()]


def _texts(result: Result) -> list[str]:
    """Returns the sentences about a result."""
    texts = [result.failure, str(result.difference) if result.difference else "", *result.notes]
    if result.beside is not None:
        compared, same = result.beside
        texts.append(
            f"with torch's FSDP2 as the reference, {same} of {compared} losses and gradients of the first step are the "
            f"same bits"
        )
    return [text for text in texts if text]


def as_json(entry: str, results: Sequence[Result]) -> dict[str, Any]:
    """Returns what `fullshard verify --json` prints."""
    found = []
    for result in results:
        setting = result.setting
        found.append(
            {
                "library": setting.library,
                "strategy": str(setting.strategy),
                "world": setting.world,
                "steps": setting.steps,
                "device": setting.device,
                "verdict": result.verdict,
                "difference": _finite(asdict(result.difference)) if result.difference else None,
                "failure": result.failure or None,
                "compared": result.compared,
                "same_bits": result.same_bits,
                "noise": result.noise,
                "beside_torch": None if result.beside is None else dict(zip(_BESIDE, result.beside, strict=True)),
                "notes": result.notes,
                "exercised": list(result.exercised) if result.verdict == "equal" else [],
                "not_exercised": result.not_exercised,
                "losses": result.losses,
                "reference_losses": result.reference_losses,
                "gradient_errors": {name: {"error": e, "allowed": a} for name, (e, a) in result.errors.items()},
            }
        )
    versions = {"fullshard": __version__, "torch": torch.__version__}
    return {"entry": entry, "versions": versions, "risk": RISK, "results": found}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


# ---- HTML ------------------------------------------------------------------------------------------------------------


def page(entry: str, results: Sequence[Result]) -> str:
    """A page that needs no other file."""
    head = ("library", "strategy", "ranks", "result", "compared", "same bits")
    rows = []
    for result in results:
        setting, counted = result.setting, (str(result.compared), str(result.same_bits))
        rows.append((setting.library, str(setting.strategy), str(setting.world), result.verdict, *counted))
    marked = [i for i, result in enumerate(results) if result.verdict != "equal"]
    parts = [
        html.heading(entry),
        html.paragraph(
            f"Sharded training against plain training of the same model, step by step. fullshard {__version__}, torch "
            f"{torch.__version__}. Tolerances are derived from dtypes and lengths of sums before the run; rounding "
            f"alone exceeds one with probability {RISK:g}."
        ),
        html.table(head, rows, right=(2, 4, 5), marked=marked),
    ]
    for result in results:
        kind = "good" if result.verdict == "equal" else "bad"
        name = html.escape(result.setting.name)
        parts.append(f'<h2>{name}: <span class="{kind}">{result.verdict}</span></h2>')
        if result.exercised and result.verdict == "equal":
            parts.append(html.paragraph(f"Exercised beside steps, and equal: {', '.join(result.exercised)}."))
        parts += [html.paragraph(f"Not exercised: {name}: {why}.") for name, why in result.not_exercised.items()]
        parts += [html.paragraph(text) for text in _texts(result)]
        if result.losses:
            parts.append(html.figure(_losses(result), "Mean loss of each step: sharded (dots) over plain (line)."))
        if result.errors:
            text = (
                "Largest error of each parameter's gradients, relative to the largest element, on a logarithmic scale; "
                "a line: what is allowed."
            )
            parts.append(html.figure(_errors(result), text))
    return html.document(f"fullshard verify {entry}", parts, style=_STYLE)


_STYLE = "svg text { font: 11px system-ui, sans-serif; }"


def _losses(result: Result) -> str:
    width, height, left, top = 560, 200, 60, 14
    values = [v for v in (*result.losses, *result.reference_losses) if math.isfinite(v)] or [0.0]
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    steps = max(len(result.losses) - 1, 1)

    def at(step: int, value: float) -> tuple[float, float]:
        return left + step * (width - left - 20) / steps, top + (high - value) / span * (height - top - 34)

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(i, v) for i, v in enumerate(result.reference_losses)))
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#c2410c"/>'
        for x, y in (at(i, v) for i, v in enumerate(result.losses) if math.isfinite(v))
    )
    ticks = "".join(
        f'<text x="{at(i, low)[0]:.1f}" y="{height - 4}" text-anchor="middle">step {i}</text>'
        for i in range(len(result.losses))
    )
    scale = (
        f'<text x="{left - 8}" y="{top + 4}" text-anchor="end">{high:.4g}</text>'
        f'<text x="{left - 8}" y="{height - 30}" text-anchor="end">{low:.4g}</text>'
    )
    curve = f'<polyline points="{line}" fill="none" stroke="#1d4ed8" stroke-width="2"/>'
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img">{scale}{ticks}{curve}{dots}</svg>'


def _errors(result: Result) -> str:
    """Bars on a logarithmic scale, the 40 largest first."""
    rows = sorted(result.errors.items(), key=lambda item: -item[1][0])[:40]
    least = 1e-18
    most = max(max(error, allowed) for _, (error, allowed) in rows)
    low, high = math.log10(least), math.log10(max(most, 1e-3)) + 0.3
    width, left, line = 700, 260, 17

    def x(value: float) -> float:
        value = min(value, 10**high) if math.isfinite(value) else 10**high
        return left + (math.log10(max(value, least)) - low) / (high - low) * (width - left - 90)

    parts = []
    for i, (name, (error, allowed)) in enumerate(rows):
        y = 6 + i * line
        color = "#b3261e" if allowed and error > allowed else "#1d4ed8"
        short = name if len(name) < 40 else "…" + name[-39:]
        parts.append(
            f'<text x="{left - 8}" y="{y + 10}" text-anchor="end">{html.escape(short)}</text>'
            f'<rect x="{left}" y="{y}" width="{max(x(error) - left, 1):.1f}" height="{line - 5}" fill="{color}"/>'
            f'<text x="{width - 8}" y="{y + 10}" text-anchor="end">{f"{error:.1e}" if error else 0}</text>'
            f'<line x1="{x(allowed):.1f}" x2="{x(allowed):.1f}" y1="{y - 2}" y2="{y + line - 3}" stroke="#111"/>'
        )
    height = 6 + len(rows) * line
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img">{"".join(parts)}</svg>'
