"""Lines and branches that the tests ran, per room of `src/fullshard`: the second half of `make coverage`.

    python -m tools.coverage_report coverage.json

Prints a table in Markdown; the exit status is 1 if less than 90 % of the engine ran. A share is that of coverage.py:
lines and branches that ran, of all lines and branches. Ranks that are killed tell nothing: what only they ran is
missing.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

# What a step needs (CONTRIBUTING.md has the picture); all other rooms stand around it.
ENGINE = ("_torch", "api", "comm", "engine", "layout", "observe", "param", "peers", "policy", "schedule")
LEAST = 0.90
COUNTED = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def rooms(report: dict[str, Any]) -> dict[str, Counter[str]]:
    """By room, the sums of what coverage.py's JSON says of its files. Files beside the rooms are the room `.`."""
    found: dict[str, Counter[str]] = {}
    for name, file in report["files"].items():
        inside = name.rpartition("src/fullshard/")[2]
        room = inside.partition("/")[0] if "/" in inside else "."
        found.setdefault(room, Counter()).update({key: file["summary"][key] for key in COUNTED})
    return found


def share(counts: Counter[str]) -> float:
    """Of all lines and branches, those that ran."""
    whole = counts["num_statements"] + counts["num_branches"]
    return (counts["covered_lines"] + counts["covered_branches"]) / whole if whole else 1.0


def _row(name: str, counts: Counter[str]) -> str:
    def part(done: int, whole: int) -> str:
        return f"{done / whole:.1%}" if whole else "-"

    lines = part(counts["covered_lines"], counts["num_statements"])
    branches = part(counts["covered_branches"], counts["num_branches"])
    cells = (f"{counts['num_statements']:,}", lines, f"{counts['num_branches']:,}", branches, f"{share(counts):.1%}")
    return f"| {name} | {' | '.join(cells)} |"


def table(found: dict[str, Counter[str]]) -> list[str]:
    """The rooms of the engine and their sum, the others, and the whole package."""
    inner = sorted(set(found) & set(ENGINE))
    outer = sorted(set(found) - set(ENGINE))
    lines = ["| room | lines | ran | branches | ran | together |", "|---|---|---|---|---|---|"]
    lines += [_row(f"`{room}`", found[room]) for room in inner]
    lines.append(_row("**the engine**", engine(found)))
    lines += [_row(f"`{room}`", found[room]) for room in outer]
    lines.append(_row("**the package**", sum(found.values(), Counter())))
    return lines


def engine(found: dict[str, Counter[str]]) -> Counter[str]:
    """The sums over the engine's rooms."""
    return sum((found[room] for room in ENGINE if room in found), Counter())


def main(path: str) -> int:
    found = rooms(json.loads(Path(path).read_text()))
    print("\n".join(table(found)))
    reached = share(engine(found))
    if reached < LEAST:
        print(f"\n{reached:.1%} of the engine ran, expected at least {LEAST:.0%}", file=sys.stderr)
    return int(reached < LEAST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
