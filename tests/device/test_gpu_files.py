"""The tests and benchmarks for hardware run on the device "simulated", so that they work at once on a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str, timeout_s: float = 110) -> str:
    """What a command of this interpreter prints; fails with its errors."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_tests_for_hardware() -> None:
    """All of them, none left out."""
    printed = run("pytest", "-q", "-p", "tests.harness.on_simulated", "-p", "no:cacheprovider", "tests/gpu")
    last = printed.strip().splitlines()[-1]
    assert " passed" in last and "skipped" not in last, printed


@pytest.mark.slow
@pytest.mark.hang_after(600)
@pytest.mark.parametrize("parts", [("ranks",), pytest.param((), marks=pytest.mark.slow)], ids=["ranks", "all"])
def test_the_benchmarks_for_hardware(parts: tuple[str, ...]) -> None:
    """Every part runs, bytes are those of `report`, and no time is told."""
    only = ["--parts", *parts] if parts else []
    printed = run("benchmarks.gpu", "--device", "simulated", "--tiny", *only, timeout_s=570)
    results = json.loads(printed.splitlines()[-1])["results"]
    assert all(part["ok"] for part in results.values()), printed
    assert "times on this device mean nothing" in printed
    worlds = results["ranks"]["figures"]["results"]
    assert [found["world"] for found in worlds] == [1, 2]
    for found in worlds:
        for way, row in found["ways"].items():
            # Three steps of SGD in float32, each of a few roundings of the largest element.
            assert row["apart"] <= 1e-6, way
            if row["report"] is not None:
                assert abs(row["peak / report"] - 1) <= 0.05, (found["world"], way, row)
            assert all(row[time] is None for time in ("step", "/ bare", "/ fsdp2", "exposed", "hidden"))
    for part in () if parts else ("step, 8B-shaped", "step, 1B-shaped"):
        for result in results[part]["figures"]["results"]:
            assert result["ways"]["fullshard"]["step_ms"] is None
