"""One HTML page about a run, or about two of them: no other file, no network. Its script only hides, and enlarges."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..page import document, escape, figure, heading, paragraph, table
from . import picture
from .causes import Exposure, Standing, are_enough, exposures, judged_steps, standings, stragglers
from .compare import Change, changes
from .record import KINDS, RankRecord, Run, Step, ranks_named
from .story import held_at_failure
from .timeline import Memory, host_bound, human, milliseconds, on_device, shares

# Ranks and steps beyond these are summed in tables, and drawn only if they are asked for (--rank, --step).
DRAWN_RANKS, DRAWN_STEPS, RANKED = 8, 6, 15

_STYLE = """
.key span { display: inline-block; margin-right: 1rem; }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem; }
.lanes { cursor: grab; } nav select { font: inherit; margin-right: 1rem; }
"""

# Everything is in the page without it; it hides the steps and ranks that are not chosen, and enlarges lanes.
_SCRIPT = """
document.querySelectorAll('nav.choice').forEach(nav => {
  const run = nav.dataset.run;
  const show = () => {
    const [step, rank] = [...nav.querySelectorAll('select')].map(s => s.value);
    document.querySelectorAll(`section.shown[data-run="${run}"]`).forEach(s => {
      s.hidden = s.dataset.step !== step || s.dataset.rank !== rank;
    });
  };
  nav.hidden = false;
  nav.addEventListener('change', show);
  show();
});
document.querySelectorAll('svg.lanes').forEach(svg => {
  const whole = svg.viewBox.baseVal, full = {x: whole.x, width: whole.width};
  let from = null;
  const put = (x, width) => {
    width = Math.min(full.width, Math.max(full.width / 200, width));
    x = Math.min(full.x + full.width - width, Math.max(full.x, x));
    svg.setAttribute('viewBox', `${x} ${whole.y} ${width} ${whole.height}`);
    svg.setAttribute('preserveAspectRatio', 'none');
  };
  svg.addEventListener('wheel', e => {
    e.preventDefault();
    const box = svg.getBoundingClientRect(), now = svg.viewBox.baseVal;
    const part = (e.clientX - box.left) / box.width, width = now.width * (e.deltaY > 0 ? 1.25 : 0.8);
    put(now.x + part * (now.width - width), width);
  }, {passive: false});
  svg.addEventListener('mousedown', e => { from = e.clientX; e.preventDefault(); });
  window.addEventListener('mouseup', () => { from = null; });
  window.addEventListener('mousemove', e => {
    if (from === null) return;
    const now = svg.viewBox.baseVal;
    put(now.x - (e.clientX - from) / svg.getBoundingClientRect().width * now.width, now.width);
    from = e.clientX;
  });
  svg.addEventListener('dblclick', () => put(full.x, full.width));
});
"""


def page(runs: Sequence[Run], step: int | None = None, rank: int | None = None) -> str:
    """The page. `step`, `rank`: draw these, instead of the last steps and the first ranks. Raises `RecordError`."""
    title = " and ".join(run.name for run in runs)
    parts = [heading(title)]
    if len(runs) == 2:
        parts += _changed(changes(runs[0], runs[1], step), runs) + _both(runs)
    for number, run in enumerate(runs):
        if len(runs) > 1:
            parts.append(heading(f"{'AB'[number]}: {run.name}", name=f"run{number}"))
        parts += _run(run, number, step, rank, runs)
    return document(f"fullshard see {title}", parts, style=_STYLE, script=_SCRIPT)


# ---- one run ---------------------------------------------------------------------------------------------------------


def _run(run: Run, number: int, step: int | None, rank: int | None, runs: Sequence[Run]) -> list[str]:
    chosen = run.shown_step(step)
    first = run.rank(rank) if rank is not None else run.ranks[0]
    header = run.ranks[0].header
    told = ", ".join(f"{name} {version}" for name, version in header.versions.items())
    if ways := header.options.get("between_hosts"):
        told = f"messages between hosts in {ways}; {told}"
    units = len(header.units)
    parts = [
        f'<p class="small">{run.world} ranks on {escape(header.device)}, {units} units, '
        f"{sum(unit.numel for unit in header.units):,} parameters; {escape(told)}; "
        f"{len(run.ranks[0].steps)} steps, {len(run.ranks[0].detailed())} of them recorded in full</p>"
    ]
    parts += [paragraph(text, "warn") for text in run.remarks]
    for each in run.ranks:
        for failed in each.steps:
            if failed.failed:
                text = f"rank {each.header.rank}, step {failed.number}: {failed.failed}"
                held = "".join(f"<br>{escape(line)}" for line in held_at_failure(each, failed))
                parts.append(f'<p class="warn">{escape(text)}{held}</p>')
    parts += _where_time_went(run, chosen, first)
    drawn_ranks = [first] if rank is not None else list(run.ranks[:DRAWN_RANKS])
    drawn_steps = [chosen] if step is not None else (run.common() or run.common(failed=True))[-DRAWN_STEPS:]
    parts.append(f"<h2>Steps, rank by rank</h2>{_choice(number, drawn_steps, drawn_ranks, chosen)}{_KEY}")
    end, most = _scale(runs, step) if len(runs) > 1 else (0, 0)
    for record in drawn_ranks:
        for shown in drawn_steps:
            found = record.step(shown)
            assert found is not None
            same_scale = (end, most) if shown == chosen else (0, 0)
            is_told = shown == chosen and record is first
            parts.append(
                f'<section class="shown" data-run="{number}" data-step="{shown}" data-rank="{record.header.rank}">'
                f"{_step(record, found, *same_scale)}"
                f"{'' if is_told else _ranked(record, exposures(run, record, shown), found)}</section>"
            )
    return parts + _curves(run, runs) + _ranks(run, chosen) + _checkpoints(run.ranks[0])


def _scale(runs: Sequence[Run], step: int | None) -> tuple[int, int]:
    """The same axes for two runs: the longest step, and the largest peak."""
    ends, peaks = [], []
    for run in runs:
        for rank in run.ranks:
            found = rank.step(run.shown_step(step))
            if found is not None and found.detail is not None:
                ends.append(found.nanoseconds)
                peaks.append(Memory(found.detail).peak()[1])
    return max(ends, default=0), max(peaks, default=0)


def _where_time_went(run: Run, number: int, rank: RankRecord) -> list[str]:
    step = rank.step(number)
    assert step is not None and step.detail is not None
    found = shares(step)
    total = max(found.total, 1)
    bound = f"host-bound: {100 * found.host / total:.0f} %"
    if on_device(step.detail):
        bound += f" (the device waited for the host for {milliseconds(host_bound(step.detail))})"
    else:
        bound += " (commands, apart from waits)"
    return [
        f"<h2>Where the time of step {number} went</h2>",
        f"<p>{milliseconds(step.nanoseconds)} on rank {rank.header.rank}: {100 * found.compute / total:.0f} % compute "
        f"of units, <b>{100 * found.wait / total:.0f} % exposed messages</b>, {escape(bound)}, "
        f"{100 * found.other / total:.0f} % data, loss and optimizer.</p>",
        _ranked(rank, exposures(run, rank, number), step),
    ]


def _ranked(rank: RankRecord, found: Sequence[Exposure], step: Step) -> str:
    if not found:
        return f"<p>No message was waited for in step {step.number} on rank {rank.header.rank}.</p>"
    least = step.nanoseconds / 200
    shown = [item for place, item in enumerate(found[:RANKED]) if place < 3 or item.nanoseconds > least]
    rows = [
        (
            rank.name_of(item.unit) if item.unit >= 0 else "",
            f"{item.what}{', ' + item.phase if item.phase else ''}",
            milliseconds(item.nanoseconds),
            f"{100 * item.nanoseconds / max(step.nanoseconds, 1):.1f} %",
            item.text,
        )
        for item in shown
    ]
    more = len(found) - len(shown)
    below = f'<p class="small">{more} more, each shorter</p>' if more > 0 else ""
    return table(("unit", "message", "exposed", "of the step", "cause"), rows, right=(2, 3), name="exposed") + below


_KEY = (
    '<p class="key small">'
    + "".join(
        f'<span><i style="background:{color}"></i>{name}</span>'
        for name, color in (*picture.COLORS.items(), ("waits", "#dc2626"), ("commands", "#52525b"))
    )
    + "</p>"
)


def _choice(run: int, steps: Sequence[int], ranks: Sequence[RankRecord], chosen: int) -> str:
    step_options = "".join(f"<option{' selected' if s == chosen else ''}>{s}</option>" for s in steps)
    rank_options = "".join(f"<option>{rank.header.rank}</option>" for rank in ranks)
    return (
        f'<nav class="choice" data-run="{run}" hidden>step <select aria-label="step">{step_options}</select> rank '
        f'<select aria-label="rank">{rank_options}</select></nav>'
    )


def _step(rank: RankRecord, step: Step, end: int, most: int) -> str:
    assert step.detail is not None
    at, peak, holders = Memory(step.detail).peak()
    held = [
        f"{kind} of {rank.name_of(unit)} {human(nbytes)}" if unit >= 0 else f"{kind} {human(nbytes)}"
        for unit, kind, nbytes in holders[:5]
    ]
    sums = {kind: sum(n for _, k, n in holders if k == kind) for kind in KINDS}
    kinds = ", ".join(f"{kind} {human(nbytes)}" for kind, nbytes in sums.items() if nbytes)
    unknown = sum(message.arrival is None for message in step.detail.messages)
    caption = "Above: compute of units (forward light, backward dark), waits (red), commands (grey). Below: messages, "
    caption += "from issue to arrival; an arrow leads to the moment of need, red if it was waited for. Wheel: enlarge; "
    caption += "drag: move; double click: whole."
    if unknown and not on_device(step.detail):
        caption += f" Of {unknown} messages the backend does not tell the arrival: drawn to the end of their wait."
    return (
        f"<h3>Step {step.number}, rank {rank.header.rank}: {milliseconds(step.nanoseconds)}</h3>"
        + figure(picture.lanes(rank, step, end), caption)
        + figure(
            picture.bytes_by_kind(rank, step, end=end, most=most),
            f"Bytes that the library holds, without activations. Peak {human(peak)} at {milliseconds(at)}: "
            f"{escape(kinds)}. Its five largest: {escape('; '.join(held))}.",
        )
        + figure(
            picture.bytes_by_unit(rank, step, end),
            "The same by unit, without shards and optimizer; all rows have one scale.",
        )
    )


def _curves(run: Run, runs: Sequence[Run]) -> list[str]:
    parts = ["<h2>Loss, norms and times</h2>"]
    for name in _figures([run]):
        points = _points(run, name)
        lost = [str(x) for x, y in points if not math.isfinite(y)]
        caption = escape(name) + (f"; not finite in step {', '.join(lost[:5])}" if lost else "")
        parts.append(figure(picture.curve([(name, _RUN_COLORS[runs.index(run)], points)], name), caption))
    times = [
        (f"rank {rank.header.rank}", picture.unit_color(rank.header.rank, "backward"), _times(rank))
        for rank in run.ranks[:DRAWN_RANKS]
    ]
    parts.append(figure(picture.curve(times, "time of each step"), "Milliseconds of each step but the first."))
    return parts


_RUN_COLORS = ("#1d4ed8", "#c2410c")


def _figures(runs: Sequence[Run]) -> list[str]:
    """The names of figures that steps of all of the runs have."""
    each = [dict.fromkeys(name for step in run.ranks[0].steps for name in step.figures) for run in runs]
    return [name for name in each[0] if all(name in others for others in each)]


def _points(run: Run, name: str) -> list[tuple[int, float]]:
    return [(step.number, _number(step.figures.get(name))) for step in run.ranks[0].steps if name in step.figures]


def _times(rank: RankRecord) -> list[tuple[int, float]]:
    return [(step.number, step.nanoseconds / 1e6) for step in rank.steps[1:] or rank.steps]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _ranks(run: Run, number: int) -> list[str]:
    found = standings(run, number)
    late = stragglers(run)
    rows = [_standing(each) for each in found]
    bars = [
        (f"rank {each.rank}", [(n, c, p) for (n, c), p in zip(picture.PART_COLORS.items(), each.shares, strict=True)])
        for each in found[: 4 * DRAWN_RANKS]
    ]
    parts = [f"<h2>Ranks in step {number}</h2>"]
    for each in late:
        said, style = ("straggler", "warn") if each.is_sure else ("perhaps a straggler", "small")
        parts.append(f'<p class="{style}">{said}: {escape(str(each))}</p>')
    if not late and len(found) > 1:
        judged = len(judged_steps(run))
        text = "No rank keeps the others waiting all the time."
        if not are_enough(judged, len(found)):
            text = f"{judged} steps are too few to say whether a rank keeps the others waiting; record more in full."
        parts.append(f"<p>{text}</p>")
    if run.missing:
        parts.append(f"<p>Not known of {ranks_named(run.missing)}, which have no record here.</p>")
    head = ("rank", "median step", "compute", "exposed", "host", "other", "last at messages", "later by")
    marked = {i for i, e in enumerate(found) for each in late if each.is_sure and e.rank == each.rank}
    parts.append(table(head, rows, right=range(1, 8), marked=marked, name="ranks"))
    parts.append(
        figure(
            picture.bars(bars, "shares by rank"), "compute (blue), exposed messages (red), host (dark), other (light)"
        )
    )
    return parts


def _standing(each: Standing) -> tuple[str, ...]:
    found = each.shares
    parts = (each.steps, found.compute, found.wait, found.host, found.other)
    return (str(each.rank), *map(milliseconds, parts), f"{100 * each.last:.0f} %", milliseconds(each.late))


def _checkpoints(rank: RankRecord) -> list[str]:
    rows = [(str(note.step), note.what, milliseconds(note.nanoseconds), note.text) for note in rank.notes]
    if not rows:
        return []
    return [
        "<h2>Checkpoints</h2>",
        table(("after step", "what", "the run stood still", ""), rows, right=(2,), name="notes"),
    ]


# ---- two runs --------------------------------------------------------------------------------------------------------


def _changed(found: Sequence[Change], runs: Sequence[Run]) -> list[str]:
    rows = [(item.what, item.before, item.after, item.change) for item in found]
    marked = {i for i, item in enumerate(found) if item.worse}
    links = " and ".join(f'<a href="#run{i}">{"AB"[i]}: {escape(run.name)}</a>' for i, run in enumerate(runs))
    head = ("", *(f"{letter}: {run.name}" for letter, run in zip("AB", runs, strict=True)), "change")
    return [
        f"<h2>What changed from A to B</h2><p>Each by itself: {links}.</p>",
        table(head, rows, right=(1, 2, 3), marked=marked, name="changes"),
        '<p class="small">Red: worse by more than a twentieth. Times are of rank 0.</p>',
    ]


def _both(runs: Sequence[Run]) -> list[str]:
    """Draws what both runs have by step, in one picture each."""
    names = [f"{letter}: {run.name}" for letter, run in zip("AB", runs, strict=True)]
    lines = list(zip(names, _RUN_COLORS, runs, strict=True))
    parts = ["<h2>Step by step</h2>"]
    for each in _figures(runs):
        series = [(name, color, _points(run, each)) for name, color, run in lines]
        parts.append(figure(picture.curve(series, f"{each} of both"), escape(each)))
    times = [(name, color, _times(run.ranks[0])) for name, color, run in lines]
    parts.append(figure(picture.curve(times, "times of both"), "Milliseconds of each step but the first, of rank 0."))
    return parts
