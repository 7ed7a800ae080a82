"""`docs/compatibility.md`: a page that is made of marks (`behaviours.py`) and recorded results, and of nothing else."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.harness.behaviours import AREAS, ROOT, Case, Row, release, rows_of

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


def newest_document() -> Path | None:
    """That of the newest torch's FSDP2; None before the first run."""
    found = sorted(DOCS.glob("compatibility_newest_torch-*.json"), key=lambda path: path.stem.rsplit("_", 1)[1])
    return found[-1] if found else None


def save(about: dict[str, str], results: Iterable[Result]) -> Path:
    """Write the results under the torch version and the date that `about` says, instead of the last ones."""
    return _save(document(), f"compatibility_torch-{about['torch']}_{about['date']}.json", about, results)


def save_newest(about: dict[str, str], results: Iterable[Result]) -> Path:
    """Likewise those of the newest FSDP2."""
    return _save(newest_document(), f"compatibility_newest_torch-{about['torch']}_{about['date']}.json", about, results)


def _save(last: Path | None, name: str, about: dict[str, str], results: Iterable[Result]) -> Path:
    path = DOCS / name
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
of a line marked *same* runs for both implementations, from one source; torch's half in `make
test-full`.

* **same**: both pass the test. **better**: fullshard passes, and torch's own result says how it does not; the reason
  says what that costs. **different**: both have it and behave otherwise, as the reason says. **ours**: torch has no
  such thing.
* *torch {pinned}* is what came of the same test with `fully_shard` of the torch that everything is developed with:
  pass, a wrong result (an assertion of the test failed), an error (it raised), a hang or a crash; - where the test is
  ours alone. The results of both, test by test: [{document}]({document}).
* *torch {newest}* is what came of it with the newest torch's: *as before* if that is the same. What became right
  is said in the verdict, and [listed](#what-became-right-in-torch). The results:
  [{newest_document}]({newest_document}).
* What a reason says of DCP, of other packages, or of torch where its column has no result, was found with torch
  {pinned}.
* *ranks*: the worlds in which the line was shown. Ranks are threads (values), fake (layout and order, no values), or
  processes (gloo).
"""

VERDICTS = {"same": "same", "equal": "same", "better": "**better**", "different": "different", "none": "ours"}


@dataclass(frozen=True)
class Recorded:
    """A dated document. `path`: None where there is none yet."""

    path: Path | None
    about: dict[str, str]
    results: list[Result]

    @classmethod
    def of(cls, path: Path | None) -> Recorded:
        return cls(path, *load(path))

    @property
    def name(self) -> str:
        return self.path.name if self.path else ""

    @property
    def torch(self) -> str:
        """Its version of torch, as people say it: "2.13"."""
        return ".".join(self.about.get("torch", "?").split(".")[:2])

    def of_row(self, row: Row, implementation: str) -> list[Result]:
        """What came of the row's tests. Those of another row, or of a test that has no mark any more, are left out."""
        return [
            result
            for result in self.results
            if (result.area, result.title, result.implementation) == (row.area, row.title, implementation)
            and result.test in row.runs
        ]


def verdict_of(row: Row, newest: Recorded) -> str:
    """The word of a row; of one in which torch failed, "right" since the newest torch passes."""
    found = newest.of_row(row, "torch")
    return "right" if row.torch == "better" and found and not _bad(found) else row.torch


def render(cases: list[Case], pinned: Recorded, newest: Recorded) -> str:
    """The page as text."""
    rows, _ = rows_of(cases)
    verdicts = [(row, verdict_of(row, newest)) for row in rows]
    words = {**VERDICTS, "right": f"better than {pinned.torch}, same as {newest.torch}"}
    parts = [HEAD.format(pinned=pinned.torch, newest=newest.torch, document=pinned.name, newest_document=newest.name)]
    said = [words[verdict].strip("*") for _, verdict in verdicts]
    counts = ", ".join(f"{said.count(word)} {word}" for word in dict.fromkeys(w.strip("*") for w in words.values()))
    parts.append(f"{len(rows)} behaviours: {counts}. torch {pinned.about.get('torch', '?')}, {_where(pinned)}. "
                 f"torch {newest.about.get('torch', '?')}, {_where(newest)}.\n")  # fmt: skip
    parts.append(_became_right([row for row, verdict in verdicts if verdict == "right"], pinned, newest))
    for area in AREAS:
        there = [(row, verdict) for row, verdict in verdicts if row.area == area]
        if not there:
            continue
        parts.append(f"## {area[0].upper()}{area[1:]}\n")
        parts.append(
            f"| behaviour | fullshard | torch {pinned.torch} | torch {newest.torch} | | ranks | shown by |\n"
            "|---|---|---|---|---|---|---|"
        )
        for row, verdict in there:
            ours = pinned.of_row(row, "fullshard")
            reason = f": {row.reason}" if row.reason else ""
            cells = [row.title, _said(ours), _torch(row, pinned), _newest(row, pinned, newest), words[verdict] + reason]
            parts.append("| " + " | ".join(_cell(cell) for cell in [*cells, _ranks(ours), _links(row)]) + " |")
        parts.append("")
    return "\n".join(parts)


def _where(recorded: Recorded) -> str:
    return f"{recorded.about.get('machine', '?')}, {recorded.about.get('date', '?')}"


def _became_right(rows: list[Row], pinned: Recorded, newest: Recorded) -> str:
    lines = [f"## What became right in torch\n\nFSDP2 of torch {newest.torch} passes these tests, which that of "
             f"{pinned.torch} fails:\n"]  # fmt: skip
    lines += [f"* {_cell(row.title)} ({row.area})" for row in rows]
    return "\n".join([*lines, ""]) if rows else "\n".join([lines[0], "None.", ""])


def _torch(row: Row, recorded: Recorded) -> str:
    """What came of a row with the torch of `recorded`."""
    if row.torch in ("none", "equal"):
        return {"none": "-", "equal": "compared in the test"}[row.torch]
    if not any("torch" in implementations for implementations in row.runs.values()):
        return "-"
    if release(recorded.about.get("torch", "")) < release(row.since):
        return f"not there before {row.since}"
    return _said(recorded.of_row(row, "torch"))


def _newest(row: Row, pinned: Recorded, newest: Recorded) -> str:
    if row.torch == "equal":
        return _said(newest.of_row(row, "fullshard"))
    before, now = _torch(row, pinned), _torch(row, newest)
    return "as before" if before == now != "-" and now not in ("pass", "not run") else now


def _said(results: list[Result]) -> str:
    bad = _bad(results)
    if not results:
        return "not run"
    if not bad:
        return "pass"
    cases, failed = sum(result.cases for result in results), sum(result.failed for result in results)
    word = {"wrong": "wrong result"}.get(bad[0].outcome, bad[0].outcome)
    share = f" in {failed} of {cases} cases" if failed < cases else ""
    return f"{word}{share}" + (f": {bad[0].detail}" if bad[0].detail else "")


def _bad(results: list[Result]) -> list[Result]:
    return [result for result in results if result.outcome != "pass"]


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
    PAGE.write_text(render(cases, Recorded.of(document()), Recorded.of(newest_document())))


# ---- the check -----------------------------------------------------------------------------------------------


def problems(
    cases: list[Case], *, page: str | None = None, path: Path | None = None, newest: Path | None = None
) -> list[str]:
    """What keeps the page from being true, in sentences; empty when it is. Runs nothing.

    A test that was not recorded with the newest torch is none: the page says so, and `left_out` counts them.
    """
    path, newest = path or document(), newest or newest_document()
    if path is None:
        return ["no results are recorded yet; run python -m tests.harness.behaviours --write"]
    rows, wrong = rows_of(cases)
    here, there = Recorded.of(path), Recorded.of(newest)
    recorded = {result.key: result for result in here.results}
    marked = {case.key: case for case in cases if case.is_in(here.about["torch"])}
    again = "run python -m tests.harness.behaviours --write"
    for key in marked.keys() - recorded.keys():
        wrong.append(f"{key[2]}: {key[1]!r} was not recorded for {key[3]}; {again} {key[2].split('::')[0]}")
    for key in recorded.keys() - marked.keys():
        wrong.append(f"{key[2]}: {key[1]!r} is recorded for {key[3]}, and no mark says so; {again}")
    for key in marked.keys() & recorded.keys():
        case, result = marked[key], recorded[key]
        on_gpu = result.outcome == "skipped" and case.test.startswith("tests/gpu/")
        if not case.only_when_written and result.outcome != "pass" and not on_gpu:
            wrong.append(f"{case.test}: {case.title!r}, {case.implementation}: {result.outcome}: {result.detail}")
    by_key = {case.key: case for case in cases}
    for result in there.results:
        case_then = by_key.get(result.key)
        if case_then is not None and not case_then.only_when_written and result.outcome != "pass":
            wrong.append(f"{result.test}: {result.title!r}, torch {there.torch}: {result.outcome}: {result.detail}")
    for row in (row for row in rows if row.torch == "better"):
        first = here if release(here.about["torch"]) >= release(row.since) else there
        found = first.of_row(row, "torch")
        if found and all(result.outcome in ("pass", "skipped") for result in found):
            wrong.append(f"{row.title!r} is 'better', but torch passes it, too")
    if (PAGE.read_text() if page is None else page) != render(cases, here, there):
        wrong.append(f"{PAGE.relative_to(ROOT)} is not what marks and results say; {again}")
    return sorted(wrong)


def left_out(cases: list[Case]) -> list[str]:
    """Tests whose run for torch was not recorded with the newest torch."""
    there = {result.key for result in load(newest_document())[1]}
    return sorted(
        {
            case.test
            for case in cases
            if (case.implementation == "torch" or case.torch == "equal") and case.key not in there
        }
    )
