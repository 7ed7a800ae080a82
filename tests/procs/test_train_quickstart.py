"""The example of the README runs as it is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_the_quickstart_learns() -> None:
    """Under plain torchrun on two processes; the loss falls, and nothing but the example's own lines is printed."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*torchrun, EXAMPLES / "quickstart.py"], capture_output=True, text=True, env=environment, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert [line[1] for line in lines] == ["50", "100", "150", "200"]
    losses = [float(line[3]) for line in lines]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.02  # the first loss is about 2
