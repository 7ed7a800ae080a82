"""The tests and benchmarks for hardware run on the device "pretend", so that they work the first time on a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_the_tests_for_hardware() -> None:
    """All of them, none left out."""
    printed = run("pytest", "-q", "-p", "tests.harness.pretended", "-p", "no:cacheprovider", "tests/gpu")
    last = printed.strip().splitlines()[-1]
    assert " passed" in last and "skipped" not in last, printed
