"""The conformance tests on processes, for torch's FSDP2 and for ours: one source, with `--ranks=gloo --both`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import torch_suite

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.hang_after(900)
def test_conformance_on_processes() -> None:
    """Ranks are forks of a child. Each test of these files; of those that run in several worlds, two ranks."""
    files = [f"tests/threads/test_conformance_{name}.py" for name in ("basic", "training", "suite")]
    options = ["-q", "-rA", "-p", "no:cacheprovider", "--ranks=gloo", "--both", "-k", "not 1- and not 3- and not 4-"]
    child = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=ROOT,
        env={**os.environ, "HYPOTHESIS_PROFILE": "quick"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout[-8000:] + child.stderr[-2000:]
    passed = set(re.findall(r"^PASSED (\S+)", child.stdout, re.M))
    for test in torch_suite.tests():
        if test.partition("::")[0] in files and "conformance_suite" in test:
            for implementation in ("torch", "fullshard"):
                found = [name for name in passed if name.startswith(f"{test}[") and implementation in name]
                assert found, f"{test} did not run on processes for {implementation}"
