"""tests/gpu with warnings shown instead of raised: a row for each test and for each warning, as they come.

    python -m benchmarks.gpu_tests
    python -m benchmarks.gpu_tests --device simulated     without hardware

In this repository warnings are errors. Real CUDA warns once of things that a simulated device does not know, so a first
run lists them: a test with a warning would have failed, and its row says so.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from benchmarks.device import SIMULATED
from benchmarks.gpu_parts import row, shows_stacks


class Rows:
    """A plugin of pytest."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()
        # Tests during which something was warned of.
        self._warned: set[str] = set()
        self.outcomes: dict[str, int] = {}

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str) -> None:
        text = str(warning_message.message).strip().splitlines()[0][:300]
        self._warned.add(nodeid)
        key = warning_message.category.__name__, text
        if key not in self._seen:
            self._seen.add(key)
            place = f"{os.path.basename(warning_message.filename)}:{warning_message.lineno}"
            row("warning", category=key[0], text=text, place=place, when=when, test=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1
        found: dict[str, Any] = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.outcome == "failed":
            lines = [line.strip() for line in str(report.longrepr).splitlines() if line.strip()]
            said = [line for line in lines if line.startswith("E ")] or lines
            found["could_not"] = " / ".join(said[:3])[:400]
        row("test", **found)

    def pytest_sessionfinish(self) -> None:
        row("tests", **self.outcomes, different_warnings=len(self._seen), tests_that_warned=sorted(self._warned))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda (the default), another one, or simulated")
    parser.add_argument("--tiny", action="store_true", help="one file, to try the script itself")
    options = parser.parse_args()
    shows_stacks()
    import pytest

    plugin = ["-p", "tests.harness.on_simulated"] if options.device == SIMULATED else []
    files = ["tests/gpu/test_facts.py"] if options.tiny else ["tests/gpu"]
    command = ["-q", "-p", "no:cacheprovider", "-W", "default", "--tb=short", *plugin, *files]
    return int(pytest.main(command, plugins=[Rows()]))


if __name__ == "__main__":
    raise SystemExit(main())
