"""A run in a few lines of text."""

from __future__ import annotations

from .causes import exposures, standings, stragglers
from .record import Run
from .timeline import Memory, human, milliseconds, shares


def summary(run: Run, number: int, shown: int = 3) -> str:
    """Step `number` of `run`: where the time went, the longest waits of the first rank, the peak, stragglers."""
    rank = run.ranks[0]
    step = rank.step(number)
    assert step is not None and step.detail is not None
    found = shares(step)
    total = max(found.total, 1)
    _, peak, _ = Memory(step.detail).peak()
    lines = [
        f"{run.name}: step {number} took {milliseconds(step.nanoseconds)} on rank {rank.header.rank} of {run.world}: "
        f"{100 * found.compute / total:.0f} % compute, {100 * found.wait / total:.0f} % exposed messages, host-bound: "
        f"{100 * found.host / total:.0f} %; peak of what the library holds: {human(peak)}"
    ]
    for item in exposures(run, rank, number)[:shown]:
        unit = f"{rank.name_of(item.unit)}: " if item.unit >= 0 else ""
        phase = f", {item.phase}" if item.phase else ""
        lines.append(f"  {unit}{item.what}{phase}, {milliseconds(item.nanoseconds)} exposed: {item.text}")
    late = stragglers(standings(run, number))
    lines += [f"  straggler: rank {each.rank}, last at {100 * each.last:.0f} % of messages" for each in late]
    return "\n".join(lines)
