"""The dated document of benchmarks/plan_rows.py has each fault and its test: red at the commit of then, green here."""

from __future__ import annotations

from benchmarks.plan_rows import KINDS, ROOT, faults

LINES = (ROOT / "benchmarks/plan_rows_2026-11-28.md").read_text().splitlines()


def test_each_fault_was_red_and_is_green() -> None:
    rows = [line.strip("| ").split(" | ") for line in LINES if line.startswith("| ") and "`test_" in line]
    assert {row[2].strip("`").partition("[")[0] for row in rows} == set(faults()) and len(rows) >= 24
    assert {row[0] for row in rows} == {f"{kind}: {name}" for kind, name in KINDS.items()}
    assert all(row[1] == faults()[row[2].strip("`").partition("[")[0]] for row in rows)
    assert all(row[3] != "green" and row[4] == "green" for row in rows)
