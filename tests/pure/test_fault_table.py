"""The fault matrix: its table is whole, and its verdicts are computed from what ranks report."""

from __future__ import annotations

import signal
from collections import Counter
from typing import Any

import pytest
import torch

from tests.faults import document
from tests.faults.cases import Case, Equal, Outcome, Raises, Recovers, Warns, at
from tests.faults.judge import judge
from tests.faults.ranks import Caught, Report
from tests.faults.table import CASES, CLASSES, OPEN


def test_ids_are_distinct_and_begin_with_a_class() -> None:
    ids = [case.id for case in CASES]
    assert len(ids) == len(set(ids))
    assert {case.group for case in CASES} <= set(CLASSES)


def test_what_is_done_is_distinct() -> None:
    told = Counter(case.does for case in CASES)
    assert [text for text, number in told.items() if number > 1] == []


def test_the_table_is_as_large_as_it_has_to_be() -> None:
    assert len(CASES) >= 150
    numbers = Counter(case.group for case in CASES)
    assert all(numbers[group] >= 20 for group in CLASSES), numbers


def test_the_slice_has_cases_of_every_class() -> None:
    assert {case.group for case in CASES if case.fast and case.id not in OPEN} == set(CLASSES)


def test_what_is_open_exists() -> None:
    assert set(OPEN) <= {case.id for case in CASES}


def test_the_page_names_every_case_and_what_is_demanded() -> None:
    """`python -m tests.faults --write` writes it."""
    rows = {
        line.split("`")[1]: [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in document.PAGE.read_text().splitlines()
        if line.startswith("| `") and "/" in line.split("`")[1]
    }
    assert set(rows) == {case.id for case in CASES}
    for case in CASES:
        _, does, demanded, ours, _ = rows[case.id]
        assert does == case.does and demanded == document._cell(document.demanded(case.expected)), case.id
        assert (ours == case.wanted) == (case.id not in OPEN), f"{case.id} is {ours} in docs/reliability.md"


# ---- verdicts ------------------------------------------------------------------------------------------------

GOOD = {"w": torch.ones(3)}
BAD = {"w": torch.tensor([1.0, 1.0, 1.1])}


def _verdict(expected: Outcome, *reports: Report, deaths: tuple[int, ...] = (), also: Raises | None = None) -> str:
    case = Case("x/y", "", expected, (at(1, "loss"),), deaths=deaths, also=also)
    return judge(case, list(reports), GOOD).kind


def _done(rank: int, state: Any = GOOD, **more: Any) -> Report:
    return Report(rank, "done", state=state, **more)


def _raised(
    rank: int, text: str = "rank 1 failed", after: float = 1.0, kind: str = "PeerFailed", **more: Any
) -> Report:
    return Report(rank, "raised", Caught((kind, "RuntimeError"), text, 100.0 + after), **more)


def _told(rank: int, text: str = "rank 1 failed", after: float = 1.0, state: Any = GOOD) -> Report:
    return _done(rank, state, caught=[Caught(("PeerFailed", "RuntimeError"), text, 100.0 + after)])


STRUCK: dict[str, Any] = {"strikes": [(100.0, 0)]}
PEER = Raises("PeerFailed", ("rank 1",), on="others")
RECOVERS = Recovers("PeerFailed", ("rank 1",))


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("CORRECT", lambda: _verdict(Equal(), _done(0), _done(1, **STRUCK))),
        ("SILENT", lambda: _verdict(Equal(), _done(0), _done(1, BAD, **STRUCK))),
        ("SILENT", lambda: _verdict(Equal(), _done(0, {"v": torch.ones(3)}), _done(1, **STRUCK))),
        ("SILENT", lambda: _verdict(Equal(), _done(0, {"w": torch.full((3,), torch.nan)}), _done(1, **STRUCK))),
        ("SILENT", lambda: _verdict(Equal(bound=1e-3), _done(0, {"w": torch.full((3,), torch.nan)}))),
        ("CORRECT", lambda: _verdict(Equal(bound=0.2), _done(0, BAD), _done(1, **STRUCK))),
        ("UNCLEAR", lambda: _verdict(Equal(), _done(0), _raised(1, **STRUCK))),
        ("CLEAR", lambda: _verdict(Equal(), _raised(0), _raised(1), also=Raises("RuntimeError", ("failed",)))),
        ("CLEAR", lambda: _verdict(PEER, _raised(0), _raised(1, "injected", **STRUCK))),
        ("UNCLEAR", lambda: _verdict(PEER, _raised(0, "connection reset"), _raised(1, "injected", **STRUCK))),
        ("UNCLEAR", lambda: _verdict(PEER, _raised(0, kind="OSError"), _raised(1, "injected", **STRUCK))),
        ("UNCLEAR", lambda: _verdict(PEER, _done(0), _raised(1, "injected", **STRUCK))),
        ("HANG", lambda: _verdict(PEER, _raised(0, after=5.5), _raised(1, "injected", **STRUCK))),
        ("HANG", lambda: _verdict(PEER, Report(0, "hung"), _raised(1, "injected", **STRUCK))),
        ("SILENT", lambda: _verdict(Raises("ValueError", ()), _done(0, BAD), _done(1, BAD, **STRUCK))),
        ("CORRECT", lambda: _verdict(Raises("ValueError", ()), _done(0), _done(1, **STRUCK))),
        ("CRASH", lambda: _verdict(PEER, Report(0, "died", code=-signal.SIGABRT), _raised(1, "injected", **STRUCK))),
        ("CRASH", lambda: _verdict(PEER, Report(0, "died", code=3), _raised(1, "injected", **STRUCK))),
        ("CLEAR", lambda: _verdict(PEER, _raised(0), Report(1, "died", code=-9, **STRUCK), deaths=(1,))),
        ("HANG", lambda: _verdict(PEER, _raised(0, after=9.0), Report(1, "died", code=-9, **STRUCK), deaths=(1,))),
        ("CORRECT", lambda: _verdict(RECOVERS, _told(0), _done(1, **STRUCK))),
        ("SILENT", lambda: _verdict(RECOVERS, _told(0, state=BAD), _done(1, **STRUCK))),
        ("UNCLEAR", lambda: _verdict(RECOVERS, _done(0), _done(1, **STRUCK))),
        ("UNCLEAR", lambda: _verdict(RECOVERS, _told(0, "closed by peer"), _done(1, **STRUCK))),
        ("HANG", lambda: _verdict(RECOVERS, _told(0, after=6.0), _done(1, **STRUCK))),
        ("CLEAR", lambda: _verdict(Warns(("buffer",)), _done(0, BAD, warned=["a buffer differs"]))),
        ("SILENT", lambda: _verdict(Warns(("buffer",)), _done(0, BAD))),
    ],
)
def test_verdicts(wanted: str, found: Any) -> None:
    assert found() == wanted
