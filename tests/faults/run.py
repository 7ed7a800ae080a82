"""Run cases of the matrix, for either implementation, and print what came of them."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from tests.faults.cases import Case, Equal, Raises, Recovers
from tests.faults.judge import KINDS, State, Verdict, judge
from tests.faults.program import rank_main
from tests.faults.ranks import Report, run_ranks
from tests.harness import hang
from tests.harness.implementations import FULLSHARD, TORCH, Implementation

IMPLEMENTATIONS = {"fullshard": FULLSHARD, "torch": TORCH}


@dataclass(frozen=True)
class Result:
    """One case, run."""

    case: Case
    verdict: Verdict
    seconds: float
    reports: tuple[Report, ...]

    @property
    def good(self) -> bool:
        """Whether the outcome is the one that the case demands."""
        return self.verdict.kind == self.case.wanted

    def as_json(self) -> dict[str, Any]:
        return {"id": self.case.id, "seconds": round(self.seconds, 2), **asdict(self.verdict)}


# Another implementation may say with any error what ours says with one of these.
_OUR_ERRORS = ("PeerFailed", "RanksDisagree", "FloatingPointError")
# What still runs then, on another implementation, is a hang; some forty of the cases are.
_OTHERS_LIMIT = 15.0


class Runner:
    """Runs cases; what they are compared with is run once for all cases that share it."""

    def __init__(self, implementation: str = "fullshard") -> None:
        self.implementation = implementation
        self._references: dict[Any, State | None] = {}

    def run(self, case: Case) -> Result:
        """Run one case to its verdict.

        Raises AssertionError when its fault did not strike: then it showed nothing.
        """
        started = time.monotonic()
        impl = IMPLEMENTATIONS[self.implementation]
        if impl is not FULLSHARD:
            case = _for_others(case)
        reports = self._ranks(case, impl, faults=True)
        if case.faults and not any(report.strikes or report.ended != "done" for report in reports):
            raise AssertionError(f"{case.id}: no fault struck, the case shows nothing: {case.faults}")
        verdict = judge(_patient(case), reports, self._reference(case, impl))
        return Result(case, verdict, time.monotonic() - started, tuple(reports))

    def _ranks(self, case: Case, impl: Implementation | None, *, faults: bool) -> list[Report]:
        plain = impl is None
        return run_ranks(
            1 if plain else case.setup.world,
            rank_main(case, impl, faults=faults),
            limit=hang.patience(case.limit),
            environment=case.setup.environment,
            group=not plain,
            deaths=() if plain or not faults else case.deaths,
            group_seconds=case.setup.group_seconds,
            hosted=case.setup.hosted,
        )

    def _reference(self, case: Case, impl: Implementation) -> State | None:
        plain = isinstance(case.expected, Equal) and case.expected.to == "plain"
        key = (case.setup, case.program, case.id if plain else "")
        if key not in self._references:
            reports = self._ranks(case, None if plain else impl, faults=plain)
            bad = [r for r in reports if r.ended != "done"]
            if plain and bad:
                raise AssertionError(
                    f"{case.id}: plain training failed: {bad[0].error.trace if bad[0].error else bad[0].output}"
                )
            self._references[key] = None if bad else reports[0].state
        return self._references[key]


def _patient(case: Case) -> Case:
    """The case with the time that this machine, which others may use too, takes for it."""
    expected = case.expected
    if isinstance(expected, Raises | Recovers):
        case = replace(case, expected=replace(expected, within=hang.patience(expected.within)))
    return case


def _for_others(case: Case) -> Case:
    """The case with what is demanded of every implementation."""
    expected = case.expected
    if isinstance(expected, Raises | Recovers) and expected.error in _OUR_ERRORS:
        expected = replace(expected, error="Exception")
    limit = _OTHERS_LIMIT if case.limit == Case.limit else case.limit
    return replace(case, expected=expected, limit=limit)


def table(results: list[Result]) -> str:
    """One line for each case, and a summary line."""
    width = max(len(result.case.id) for result in results)
    lines = []
    for result in results:
        mark = " " if result.good else "!"
        why = "" if result.verdict.kind == "CORRECT" else result.verdict.why
        lines.append(f"{mark} {result.case.id:{width}}  {result.verdict.kind:7}  {result.seconds:5.1f} s  {why[:200]}")
    return "\n".join([*lines, summary(results)])


def summary(results: list[Result]) -> str:
    counts = {kind: sum(result.verdict.kind == kind for result in results) for kind in KINDS}
    told = ", ".join(f"{number} {kind}" for kind, number in counts.items() if number)
    good = counts["CORRECT"] + counts["CLEAR"]
    return f"{good} of {len(results)} cases correct or clear ({told}); {sum(r.seconds for r in results):.0f} s"
