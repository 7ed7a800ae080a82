"""How many words a reader has before them, by group: `python -m tools.words`.

Counted as `wc -w` counts. Records are not part of the budget: pages that a command writes from results or tables of the
code, dated results, and the records of decisions (docs/adr), which have a line of their own. Notes that lie beside
tests are for those who change them.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATED = re.compile(r"_\d{4}-\d\d-\d\d")
# Written by a command, each of which a test compares with its source.
GENERATED = (
    "docs/compatibility.md",
    "docs/mutations.md",
    "docs/programs.md",
    "docs/reference/every-key.md",
    "docs/reliability.md",
    "docs/torch-suite.md",
)
# The groups, in this order: the first whose pattern a path matches has it.
GROUPS: dict[str, str] = {
    "README": r"README\.md",
    "tutorials": r"docs/tutorials/.*",
    "how-to": r"docs/how-to/.*",
    "concepts": r"docs/concepts/.*",
    "decisions": r"docs/adr/.*",
    "in detail": r"docs/.*",
    "contributing": r"(CONTRIBUTING|SECURITY|CODE_OF_CONDUCT)\.md",
}
# What a user reads, and all that is no record.
READ = ("README", "tutorials", "how-to", "concepts")
RECORDS = "records"
DECISIONS = "decisions"
# What a user can be asked to read: a page that grows is cut elsewhere.
BUDGET_READ = 18_000
BUDGET_ALL = 60_000


def group(path: str) -> str | None:
    """The group of a document, by its path in the repository; None for notes beside tests and the changelog."""
    if path in GENERATED or DATED.search(path):
        return RECORDS
    return next((name for name, pattern in GROUPS.items() if re.fullmatch(pattern, path)), None)


def count(root: Path = ROOT) -> dict[str, int]:
    """Words by group."""
    words = dict.fromkeys([*GROUPS, RECORDS], 0)
    for path in [*root.glob("*.md"), *(root / "docs").rglob("*.md")]:
        if (name := group(path.relative_to(root).as_posix())) is not None:
            words[name] += len(path.read_text(encoding="utf-8").split())
    return words


def read(words: dict[str, int]) -> int:
    """The words of README, tutorials, how-to pages and concepts."""
    return sum(words[name] for name in READ)


def all_of(words: dict[str, int]) -> int:
    """The words of all groups but records."""
    return sum(number for name, number in words.items() if name not in (RECORDS, DECISIONS))


if __name__ == "__main__":
    found = count()
    for name, number in found.items():
        print(f"{name:13} {number:7,}")
    print(f"{', '.join(READ)}: {read(found):,} of {BUDGET_READ:,}")
    print(f"all but records: {all_of(found):,} of {BUDGET_ALL:,}")
    print(f"with the records of decisions: {all_of(found) + found[DECISIONS]:,}")
