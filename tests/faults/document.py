"""Writes what the matrix found: docs/reliability.md, and torch's column as a dated document of its own.

Both keep the rows of cases that a run did not choose, so a class at a time may be written.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from tests.faults.cases import Case, Equal, Outcome, Raises, Recovers
from tests.faults.judge import KINDS
from tests.faults.run import Result
from tests.faults.table import CASES, CLASSES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "reliability.md"
BEGIN, END = "<!-- written by `python -m tests.faults --write`: -->", "<!-- until here -->"
# (verdict, why) by id.
Rows = dict[str, tuple[str, str]]


def torch_document() -> Path | None:
    """The newest dated document of torch's column, if there is one."""
    return max(DOCS.glob("reliability_torch-*.md"), default=None)


def demanded(outcome: Outcome) -> str:
    """What a case demands, in words."""
    if isinstance(outcome, Equal):
        if outcome.to == "plain":
            return f"plain training, within {outcome.bound:g}" if outcome.bound else "plain training, bitwise"
        return f"undisturbed, within {outcome.bound:g}" if outcome.bound else "undisturbed, bitwise"
    words = ", ".join(f"`{word}`" for word in outcome.words)
    if isinstance(outcome, Raises):
        return f"`{outcome.error}` with {words}, {outcome.within:g} s"
    if isinstance(outcome, Recovers):
        told = "undisturbed, bitwise; where a rank raises" if outcome.maybe else "then undisturbed, bitwise"
        if outcome.maybe:
            return f"{told}: `{outcome.error}` with {words}, {outcome.within:g} s"
        return f"`{outcome.error}` with {words}, {outcome.within:g} s; {told}"
    return f"a warning with {words}"


def read_rows(path: Path | None) -> Rows:
    """What a document of `rows_text` says."""
    if path is None or not path.exists():
        return {}
    found = re.findall(r"^\| `([\w/]+)` \| (\w+) \| (.*) \|$", path.read_text(), flags=re.M)
    return {case: (verdict, why) for case, verdict, why in found}


def rows_of(results: Iterable[Result]) -> Rows:
    return {result.case.id: (result.verdict.kind, _told(result.verdict.why)) for result in results}


def _told(why: str) -> str:
    """Without what differs from run to run, and without what a table takes for its own."""
    why = re.sub(r"\[?\d+\.\d+\.\d+\.\d+\]?:\d+", "a peer", why)
    why = re.sub(r"\[/\S+?/(\w+\.cc):\d+\]", r"\1:", why)
    why = re.sub(r"0x[0-9a-f]+", "0x...", why)
    why = "" if why == "equal" else why
    return why.replace("|", "/").replace("`", "'").replace("<", "(").replace(">", ")")[:160].strip()


def count(rows: Rows, cases: Iterable[Case]) -> str:
    """How many of each verdict: "12 CORRECT, 3 CLEAR"."""
    verdicts = [rows[case.id][0] for case in cases if case.id in rows]
    return ", ".join(f"{verdicts.count(kind)} {kind}" for kind in KINDS if kind in verdicts)


def write_torch(results: list[Result]) -> Path:
    """Torch's column: a document of today."""
    version = torch.__version__.split("+")[0]
    path = DOCS / f"reliability_torch-{version}_{datetime.date.today().isoformat()}.md"
    rows = {**read_rows(torch_document()), **rows_of(results)}
    known = [case for case in CASES if case.id in rows]
    good = sum(rows[case.id][0] in ("CORRECT", "CLEAR") for case in known)
    lines = [
        f"# The fault matrix on torch {version}'s FSDP2",
        "",
        "Made by `python -m tests.faults --implementation torch --write`: the programs of",
        "[the matrix](reliability.md) with torch's `fully_shard` in the place of ours. Where a program makes a call",
        "that torch has no counterpart of (a guard, joining an evaluation), it goes without; where it checks gradients",
        "torch's clipping does so with `error_if_nonfinite=True`. An error of any class is accepted that has the",
        "demanded words.",
        "",
        f"{good} of {len(known)} cases correct or clear: {count(rows, known)}.",
        "Processes over gloo, two to four on one machine; what a case demands is said in the matrix.",
        "",
        "| case | verdict | what was found |",
        "|---|---|---|",
        *(f"| `{case.id}` | {rows[case.id][0]} | {rows[case.id][1]} |" for case in known),
        "",
    ]
    path.write_text("\n".join(lines))
    return path


def write_page(results: list[Result]) -> Path:
    """The table of docs/reliability.md; a person writes its prose."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    ours = {**_our_rows(text), **{case: row[0] for case, row in rows_of(results).items()}}
    theirs = read_rows(torch_document())
    PAGE.write_text(f"{before}{BEGIN}\n\n{_tables(ours, theirs)}\n{END}{after}")
    return PAGE


def _our_rows(text: str) -> dict[str, str]:
    found = re.findall(r"^\| `([\w/]+)` \| .* \| (\w+) \| \w* \|$", text, flags=re.M)
    return dict(found)


def _tables(ours: dict[str, str], theirs: Rows) -> str:
    ours_good = sum(ours.get(case.id) in ("CORRECT", "CLEAR") for case in CASES)
    ran = [case for case in CASES if case.id in theirs]
    theirs_good = sum(theirs[case.id][0] in ("CORRECT", "CLEAR") for case in ran)
    mine = {case: (verdict, "") for case, verdict in ours.items()}
    name = torch_document()
    lines = [
        f"**fullshard: {ours_good} of {len(CASES)} cases correct or clear** ({count(mine, CASES)}).",
        f"torch's FSDP2: {theirs_good} of the {len(ran)} that ran on it ({count(theirs, ran)})"
        + (f", [dated]({name.name})." if name else "."),
        "",
    ]
    for group, about in CLASSES.items():
        cases = [case for case in CASES if case.group == group]
        title = about[0].upper() + about[1:]
        lines += [
            f"### {title}",
            "",
            f"{len(cases)} cases: `python -m tests.faults --class {group}`; one of them: `--case` and its name.",
            "",
            "| case | what is done | demanded | fullshard | torch |",
            "|---|---|---|---|---|",
            *(
                f"| `{case.id}` | {case.does} | {_cell(demanded(case.expected))} "
                f"| {ours.get(case.id, 'unknown')} | {theirs.get(case.id, ('unknown',))[0]} |"
                for case in cases
            ),
            "",
        ]
    return "\n".join(lines)


# What a reader sees instead of parts of a regular expression; `|` would end a cell, also within backticks.
_READ = {
    "; [a-z]+": "; what to do",
    r".*\.py": "a file.py",
    ".*": "...",
    r"\d+": "N",
    r"\d": "N",
    r"\b": "",
    "|": " or ",
    "\\": "",
}


def _cell(text: str) -> str:
    for pattern, read in _READ.items():
        text = text.replace(pattern, read)
    return text
