"""The table of docs/support.md: dated results of `make versions`, as JSON and as a part of the page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "support.md"
RESULTS = DOCS / "support.json"
BEGIN, END = "<!-- Written by `make versions` from support.json. -->", "<!-- The end of what it writes. -->"
# In the order of the columns; others follow.
COLUMNS = ("pure", "fake", "threads", "device", "procs", "quickstart")


@dataclass(frozen=True)
class Result:
    """What came of a tier. `skipped`: reason -> how many; `failed`: test and first words of its failure."""

    passed: int
    skipped: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """What came of one version. `torch`: with its local part; `whole`: all tests that are not slow, not the selection;
    `problems`: runs that ended with a failure; `loads`: the versions whose checkpoints it loaded, and `loaded_by`:
    those that loaded its own, by names such as "python3.11-torch2.10.0"."""

    python: str
    torch: str
    date: str
    whole: bool
    tiers: dict[str, Result]
    problems: list[str]
    seconds: int
    loads: list[str] = field(default_factory=list)
    loaded_by: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, bool]:
        return self.python, self.torch.split("+")[0], self.whole

    @property
    def is_green(self) -> bool:
        return not self.problems and bool(self.tiers) and not any(one.failed for one in self.tiers.values())


def load() -> list[Run]:
    if not RESULTS.exists():
        return []
    read = json.loads(RESULTS.read_text())["runs"]
    return [Run(**{**one, "tiers": {tier: Result(**found) for tier, found in one["tiers"].items()}}) for one in read]


def _order(run: Run) -> tuple[list[int], list[int], bool]:
    """By Python, then by torch."""
    numbers = lambda text: [int(part) for part in text.split(".")]  # noqa: E731
    return numbers(run.python), numbers(run.torch.split("+")[0]), run.whole


def write(runs: Iterable[Run]) -> None:
    """Replace the runs of the same versions, keep the others, and write both files."""
    known = {run.key: run for run in [*load(), *runs]}
    ordered = sorted(known.values(), key=_order)
    lines = [json.dumps(asdict(run)) for run in ordered]
    RESULTS.write_text('{"runs": [\n' + ",\n".join(lines) + "\n]}\n")
    PAGE.write_text(page(PAGE.read_text(), ordered))


def page(text: str, runs: Iterable[Run]) -> str:
    """`text` with the table of `runs`. Raises ValueError if the page has no place for it."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"{PAGE}: expected the lines {BEGIN!r} and {END!r}")
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    return f"{before}{BEGIN}\n\n{table(runs)}\n{after}"


def table(runs: Iterable[Run]) -> str:
    """One line for each run: passed tests by tier, and what failed."""
    runs = list(runs)
    tiers = [*COLUMNS, *sorted({tier for run in runs for tier in run.tiers} - set(COLUMNS))]
    lines = [
        f"| Python | torch | build | date | ran | {' | '.join(tiers)} | skipped | loads | loaded by | result |",
        "|---" * (len(tiers) + 9) + "|",
    ]
    for run in runs:
        torch, _, build = run.torch.partition("+")
        counts = [str(run.tiers[tier].passed) if tier in run.tiers else "-" for tier in tiers]
        if "quickstart" in run.tiers:
            counts[tiers.index("quickstart")] = "trains" if run.tiers["quickstart"].passed else "fails"
        skipped = sum(sum(found.skipped.values()) for found in run.tiers.values())
        ran = "all that is not slow" if run.whole else "selection"
        exchanged = [_torches(run.loads), _torches(run.loaded_by)]
        cells = [run.python, torch, build or "-", run.date, ran, *counts, str(skipped), *exchanged, _verdict(run)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _torches(names: Iterable[str]) -> str:
    """Of "python3.11-torch2.10.0" and others "2.10, ...": the versions of torch, the oldest first."""
    found = {name.rpartition("-torch")[2] for name in names}
    releases = [[int(part) for part in torch.split(".")[:2]] for torch in found]
    return ", ".join(dict.fromkeys(".".join(map(str, one)) for one in sorted(releases))) or "-"


def _verdict(run: Run) -> str:
    failed = [one for found in run.tiers.values() for one in found.failed]
    if run.is_green:
        return "**passed**"
    names = ", ".join(f"`{re.sub(r'^.*::', '', one.split(': ')[0])}`" for one in failed[:3])
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    return f"{len(failed)} failed: {names}{more}" if failed else "did not end"


def summary(run: Run) -> str:
    """For the terminal: the counts, then each failure in a line, then where to look."""
    counts = ", ".join(f"{tier} {found.passed}" for tier, found in run.tiers.items())
    skipped: dict[str, int] = {}
    for found in run.tiers.values():
        for reason, number in found.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + number
    lines = [f"{'passed' if run.is_green else 'FAILED'} in {run.seconds} s: {counts}"]
    lines += [f"  skipped {number}: {reason}" for reason, number in sorted(skipped.items())]
    lines += [f"  failed: {one}" for found in run.tiers.values() for one in found.failed]
    lines += [f"  {problem}" for problem in run.problems]
    lines += [f"  checkpoints of {name}: loaded" for name in run.loads]
    lines += [f"  checkpoints of this version: loaded by {name}" for name in run.loaded_by]
    return "\n".join(lines)
