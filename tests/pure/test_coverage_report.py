"""The table of `make coverage`: files add up to rooms, and an engine below its least is an exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import coverage_report

ROOT = Path(__file__).parents[2]


def _file(lines: int, ran: int, branches: int = 0, taken: int = 0) -> dict[str, dict[str, int]]:
    return {"summary": dict(zip(coverage_report.COUNTED, (lines, ran, branches, taken), strict=True))}


def test_files_add_up_to_rooms_and_rooms_to_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "src/fullshard/comm/gather.py": _file(60, 60, 20, 10),
        "src/fullshard/comm/reduce.py": _file(20, 20),
        "src/fullshard/plan/search.py": _file(100, 0),
        "src/fullshard/keys.py": _file(10, 5),
    }
    path = tmp_path / "coverage.json"
    path.write_text(json.dumps({"files": files}))
    assert coverage_report.main(str(path)) == 0, "90 of 100 lines and branches of the engine"
    said = capsys.readouterr().out
    assert "| `comm` | 80 | 100.0% | 20 | 50.0% | 90.0% |" in said
    assert "| **the engine** | 80 | 100.0% | 20 | 50.0% | 90.0% |" in said
    assert "| `plan` | 100 | 0.0% | 0 | - | 0.0% |" in said and "| `.` | 10 | 50.0% | 0 | - | 50.0% |" in said
    assert "| **the package** | 190 | 44.7% | 20 | 50.0% | 45.2% |" in said

    files["src/fullshard/comm/reduce.py"] = _file(20, 19)
    path.write_text(json.dumps({"files": files}))
    assert coverage_report.main(str(path)) == 1
    assert "89.0% of the engine ran, expected at least 90%" in capsys.readouterr().err


def test_the_engine_is_rooms_that_exist() -> None:
    missing = [room for room in coverage_report.ENGINE if not (ROOT / "src/fullshard" / room / "__init__.py").exists()]
    assert missing == []
