"""The fault matrix as tests: its fast slice, and all of it where slow tests run."""

from __future__ import annotations

import pytest

from tests.faults.cases import Case
from tests.faults.run import Runner
from tests.faults.table import CASES, OPEN

# `python -m tests.faults` runs all.
# Two of three that take little time.
FAST = [case for i, case in enumerate(case for case in CASES if case.fast and case.id not in OPEN) if i % 3]


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner()


@pytest.mark.sample(4, full=80)
@pytest.mark.hang_after(120)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in FAST else pytest.mark.slow, id=case.id) for case in CASES],
)
def test_case(runner: Runner, case: Case) -> None:
    result = runner.run(case)
    told = "\n".join(
        f"--- rank {r.rank} {r.ended} {r.code}\n{r.error.trace if r.error else r.output}" for r in result.reports
    )
    if case.id in OPEN:
        assert not result.good, f"{case.id} is right now: take it off OPEN in tests/faults/table"
        return
    assert result.good, f"{case.id}: expected {case.wanted}, found {result.verdict}; {case.command}\n{told}"
