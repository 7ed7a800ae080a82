"""`docs/compatibility.md`: a page that is made of marks (`behaviours.py`) and recorded results, and of nothing else."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.harness.behaviours import AREAS, ROOT, Case, Row, rows_of

DOCS = ROOT / "docs"
PAGE = DOCS / "compatibility.md"


@dataclass(frozen=True)
class Result:
    """What came of one test for one implementation, over all its parameters.

    `outcome`: "pass", or of the first case that did not: "wrong" (an assertion of the test), "error" (an exception),
    "hang", "crash" (the process died) or "skipped". `worlds`: tier and number of ranks, as the test made them.
    """

    area: str
    title: str
    test: str
    implementation: str
    outcome: str
    detail: str = ""
    cases: int = 1
    failed: int = 0
    worlds: list[str] = field(default_factory=list)
    date: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.area, self.title, self.test, self.implementation


# ---- the dated document --------------------------------------------------------------------------------------


def document() -> Path | None:
    """The newest one; None before the first run."""
    found = sorted(DOCS.glob("compatibility_torch-*.json"), key=lambda path: path.stem.rsplit("_", 1)[1])
    return found[-1] if found else None


def load(path: Path | None) -> tuple[dict[str, str], list[Result]]:
    if path is None:
        return {}, []
    read = json.loads(path.read_text())
    return read["about"], [Result(**entry) for entry in read["results"]]


def save(about: dict[str, str], results: Iterable[Result]) -> Path:
    """Write the results under the torch version and the date that `about` says; it takes the place of the last one."""
    last, path = document(), DOCS / f"compatibility_torch-{about['torch']}_{about['date']}.json"
    lines = [json.dumps(asdict(result)) for result in sorted(results, key=lambda result: result.key)]
    path.write_text(f'{{"about": {json.dumps(about)},\n"results": [\n' + ",\n".join(lines) + "\n]}\n")
    if last is not None and last != path:
        last.unlink()
    return path


def merged(old: list[Result], new: list[Result]) -> list[Result]:
    """`new`, and what `old` says of tests that did not run this time."""
    ran = {result.test for result in new}
    return [result for result in old if result.test not in ran] + new


# ---- the page ------------------------------------------------------------------------------------------------

HEAD = """\
# Compatibility with FSDP2

<!-- Written by `python -m tests.harness.behaviours --write`: change the marks on the tests, not this page. -->

What a program that was written for `torch.distributed.fsdp` can rely on, each line shown by a test that ran. A test
of a line marked *same* runs for both implementations, from one source, in every run of the tests.

* **same**: both pass the test. **better**: fullshard passes, and torch's own result says how it does not; the reason
  says what that costs. **different**: both have it and behave otherwise, as the reason says. **ours**: torch has no
  such thing.
* *torch* is what came of the same test with torch's `fully_shard`: pass, a wrong result (an assertion of the test
  failed), an error (it raised), a hang or a crash; - where the test is ours alone. The results of both, test by test:
  [{document}]({document}).
* *ranks*: the worlds in which the line was shown. Ranks are threads (values), fake (layout and order, no values), or
  processes (gloo).
"""

VERDICTS = {"same": "same", "equal": "same", "better": "**better**", "different": "different", "none": "ours"}


def render(cases: list[Case], about: dict[str, str], results: list[Result], name: str) -> str:
    """The page as text; `name` is the file of the results."""
    rows, _ = rows_of(cases)
    by_row: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for result in results:
        by_row[result.area, result.title, result.implementation].append(result)
    parts = [HEAD.format(document=name)]
    counts = ", ".join(
        f"{sum(VERDICTS[row.torch] == word for row in rows)} {word.strip('*')}"
        for word in dict.fromkeys(VERDICTS.values())
    )
    parts.append(f"{len(rows)} behaviours: {counts}. torch {about.get('torch', '?')}, {about.get('machine', '?')}.\n")
    for area in AREAS:
        there = [row for row in rows if row.area == area]
        if not there:
            continue
        parts.append(f"## {area[0].upper()}{area[1:]}\n")
        parts.append("| behaviour | fullshard | torch | | ranks | shown by |\n|---|---|---|---|---|---|")
        for row in there:
            ours, theirs = (by_row[row.area, row.title, who] for who in ("fullshard", "torch"))
            verdict = VERDICTS[row.torch] + (f": {row.reason}" if row.reason else "")
            torch = _said(theirs) if theirs else "compared in the test" if row.torch == "equal" else "-"
            cells = [row.title, _said(ours), torch, verdict, _ranks(ours), _links(row)]
            parts.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
        parts.append("")
    return "\n".join(parts)


def _said(results: list[Result]) -> str:
    bad = [result for result in results if result.outcome != "pass"]
    if not results:
        return "not run"
    if not bad:
        return "pass"
    cases, failed = sum(result.cases for result in results), sum(result.failed for result in results)
    word = {"wrong": "wrong result"}.get(bad[0].outcome, bad[0].outcome)
    share = f" in {failed} of {cases} cases" if failed < cases else ""
    return f"{word}{share}" + (f": {bad[0].detail}" if bad[0].detail else "")


def _ranks(results: list[Result]) -> str:
    tiers: dict[str, set[int]] = defaultdict(set)
    for world in (world for result in results for world in result.worlds):
        tier, number = world.split()
        tiers[tier].add(int(number))
    return "; ".join(f"{tier} {', '.join(map(str, sorted(worlds)))}" for tier, worlds in sorted(tiers.items())) or "-"


def _links(row: Row) -> str:
    return ", ".join(f"[{test.split('::')[1]}](../{test.split('::')[0]})" for test in sorted(row.runs))


def _cell(text: str) -> str:
    """One line without anything that ends a cell, a link or a tag."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").strip()


def write_page(cases: list[Case]) -> None:
    path = document()
    PAGE.write_text(render(cases, *load(path), path.name if path else ""))


# ---- the check -----------------------------------------------------------------------------------------------


def problems(cases: list[Case], *, page: str | None = None, path: Path | None = None) -> list[str]:
    """What keeps the page from being true, in sentences; empty when it is. Runs nothing."""
    path = path or document()
    if path is None:
        return ["no results are recorded yet; run python -m tests.harness.behaviours --write"]
    _, wrong = rows_of(cases)
    about, results = load(path)
    recorded = {result.key: result for result in results}
    marked = {(case.area, case.title, case.test, case.implementation): case for case in cases}
    again = "run python -m tests.harness.behaviours --write"
    for key in marked.keys() - recorded.keys():
        wrong.append(f"{key[2]}: {key[1]!r} was not recorded for {key[3]}; {again} {key[2].split('::')[0]}")
    for key in recorded.keys() - marked.keys():
        wrong.append(f"{key[2]}: {key[1]!r} is recorded for {key[3]}, and no mark says so; {again}")
    better: dict[tuple[str, str], bool] = {}
    for key in marked.keys() & recorded.keys():
        case, result = marked[key], recorded[key]
        passed = result.outcome == "pass"
        if case.only_when_written:
            row = (case.area, case.title)
            better[row] = better.get(row, False) or result.outcome not in ("pass", "skipped")
        elif not passed and not (result.outcome == "skipped" and case.test.startswith("tests/gpu/")):
            wrong.append(f"{case.test}: {case.title!r}, {case.implementation}: {result.outcome}: {result.detail}")
    wrong += [f"{title!r} is 'better', but torch passes it, too" for (_, title), fails in better.items() if not fails]
    if (PAGE.read_text() if page is None else page) != render(cases, about, results, path.name):
        wrong.append(f"{PAGE.relative_to(ROOT)} is not what marks and results say; {again}")
    return sorted(wrong)
