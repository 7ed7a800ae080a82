"""The published runs that plans are compared with: which half a line is in, and what the dated document has of it."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from benchmarks.plan_truth import (
    FILE,
    FITTED,
    HELD_OUT,
    LATER,
    half_of,
    has_axes,
    name_of,
    published,
    strategy_of,
    unasked,
)
from fullshard.plan import find_hardware

DOCUMENT = FILE.with_name("plan_truth_2026-11-27.md").read_text()
AXES = FILE.with_name("plan_truth_axes_2026-11-27.md").read_text()
RUNS = published()


def test_each_line_has_a_source_a_name_of_its_own_and_a_legal_strategy() -> None:
    sources = tomllib.loads(FILE.read_text())["sources"]
    assert {run["source"] for run in [*(run for run, _ in RUNS), *unasked()]} == set(sources)
    assert len({name_of(run) for run, _ in RUNS}) == len(RUNS) >= 60
    for run, _ in RUNS:
        assert strategy_of(run).ranks == run["devices"] and find_hardware(run["hardware"]).time_error > 0


@pytest.mark.parametrize("key", ["tokens_per_second", "reserved_gib", "active_gib"])
def test_the_half_of_a_line_does_not_depend_on_what_came_out(key: str) -> None:
    for run, half in RUNS:
        assert half_of({**run, key: 1}) == half
    halves = [half for _, half in RUNS]
    assert min(halves.count(FITTED), halves.count(HELD_OUT)) >= 20 and halves.count(LATER) >= 10
    # What is known of a run decides.
    first: dict[str, Any] = next(run for run, half in RUNS if half != LATER)
    assert {half_of({**first, "micro": n}) for n in range(8)} == {FITTED, HELD_OUT}


def test_the_document_has_every_line_and_its_half() -> None:
    for run, half in RUNS:
        document = AXES if has_axes(run) else DOCUMENT
        assert f"| {name_of(run)} | {half} | {run['tokens_per_second']:,} |" in document, name_of(run)
    assert all(each["line"] in AXES for each in unasked())


def test_lines_over_axes_fitted_nothing() -> None:
    assert {half for run, half in RUNS if has_axes(run)} == {LATER}
    assert sum(has_axes(run) for run, _ in RUNS) >= 20
