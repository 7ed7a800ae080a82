"""A job that is killed, stopped and told to stop again and again ends as if it had not been (tests/harness/chaos.py).

`make test` has three blows; ten kills are in `make test-full`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fullshard import checkpoint
from tests.harness.chaos import Blow, Job, blows, differences, run
from tests.procs.test_train_cli import linux_only

pytestmark = linux_only


@pytest.mark.hang_after(400)
@pytest.mark.slow
def test_blows_change_no_bit(tmp_path: Path) -> None:
    """A rank is held up, killed, and another one told to stop: parameters, AdamW's state, figures of each step."""
    told, wrong = run(
        tmp_path,
        [
            Blow(signal.SIGSTOP, "rank 0", 2, 0.0, held=0.5),
            Blow(signal.SIGKILL, "rank 1", 10, 0.01),
            Blow(signal.SIGTERM, "rank 0", 3, 0.0),
        ],
    )
    assert not wrong
    assert [one.code for one in told] == [None, 1, 75, 0]


@pytest.mark.slow
@pytest.mark.sample(full=1)
@pytest.mark.hang_after(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_ten_kills_change_no_bit(seed: int, tmp_path: Path) -> None:
    told, wrong = run(tmp_path, blows(seed, 10))
    assert not wrong
    assert sum(one.code is not None for one in told if one.what != "nothing") == 10


def test_blows_are_chosen_by_the_seed() -> None:
    assert blows(1, 10) == blows(1, 10) != blows(2, 10)
    assert sum(bool(blow.codes) for blow in blows(3, 10)) == 10
    chosen = [blow for seed in range(20) for blow in blows(seed, 10)]
    assert {blow.target for blow in chosen} == {"launcher", "rank 0", "rank 1"}
    assert {blow.signum for blow in chosen} == {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP}
    assert {blow.steps < 0 for blow in chosen} == {True, False}


def test_a_difference_is_seen(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 1.0 + 2**-23)):
        (tmp_path / name).mkdir()
        line = json.dumps({"step": 1, "loss": 2.5, "seconds": time.monotonic()}) + "\n"
        (tmp_path / name / "metrics.jsonl").write_text(line)
        checkpoint.save({"x": torch.tensor([value])}, checkpoint_id=tmp_path / name / "checkpoints" / "step-1")
    a, b, c = (tmp_path / name for name in "abc")
    assert differences(a, b) == []
    assert differences(c, a) == ["x differs"]
    with (b / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": 2.0}\n{"step": 3')
    assert differences(b, a) == ["2 steps, expected 1"]
    (b / "metrics.jsonl").write_text('{"step": 1, "loss": 2.25}\n')
    assert "line 1 of metrics.jsonl" in differences(b, a)[0]
    checkpoint.save({"x": torch.ones(1)}, checkpoint_id=b / "checkpoints" / "step-2")
    assert "last checkpoints" in differences(b, a)[-1]


def test_a_process_that_does_not_end_is_seen(tmp_path: Path) -> None:
    """Also one that its launcher left behind."""
    job = Job(tmp_path / "run", 1)
    sleeps = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    environment = {**os.environ, "TESTS_CHAOS": job.word}
    job._process = subprocess.Popen([sys.executable, "-c", sleeps], env=environment)
    job._process.wait()
    (left,) = job.pids()
    assert job.wait(0.4) == 0.4
    deadline = time.monotonic() + 5
    while job.pids() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left not in job.pids()
