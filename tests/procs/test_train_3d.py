"""examples/train_3d.toml on eight processes: three axes of degree two, as one process trains, and as a command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fullshard.train.config import load_config
from tests.harness import tolerance
from tests.harness.pool import pool
from tests.procs.test_train_cli import environment
from tests.procs.test_train_world import Run, assert_equal, trained, unexplained

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_3d.toml"
ALONE = ("parallelism.data_parallel_replicate_degree=1", "parallelism.tensor_parallel_degree=1")
pytestmark = [pytest.mark.slow, pytest.mark.hang_after(600)]


def test_it_begins_as_on_one_process() -> None:
    """Initial values to the bit, the same on all ranks; two steps with their moments within rounding."""
    overrides = "training.steps=2", "metrics.eval_windows=8", "training.device=cpu"
    config = load_config(EXAMPLE, overrides)
    config.check_world(8)
    assert dict(config.axes(8).mesh) == {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    runs: list[Run] = pool(8).run(trained, config, timeout=400)
    (plain,) = pool(1).run(trained, load_config(EXAMPLE, (*overrides, *ALONE)), timeout=150)
    for run in runs:
        assert_equal(run.initial, plain.initial)
        first, wanted = run.records[0], plain.records[0]
        for mine, its in ((first.loss, wanted.loss), (first.grad_norm, wanted.grad_norm)):
            assert abs(mine - its) <= tolerance.sums(torch.float32, plain.terms) * its
        assert_equal(run.parameters, runs[0].parameters)
    alone = load_config(EXAMPLE, (*overrides, *ALONE))
    ends = [pool(1).run(trained, alone, sign, timeout=150)[0] for sign in (1.0, -1.0)]
    assert not unexplained(runs[0], plain, ends, 2)
    # AdamW's first steps are near to signs of gradients, which rounding turns where a gradient is about zero: so the
    # largest difference may be a whole step, the median not.
    for name, value in plain.parameters.items():
        far = max(float((end.parameters[name] - value).abs().median()) for end in ends)
        away = float((runs[0].parameters[name] - value).abs().median())
        assert away <= tolerance.updates(value, 2) + far, (name, away, far)


def test_it_learns_as_a_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fullshard", "train", str(EXAMPLE), "--nproc", "8"]
    command += ["--set", f"run.dir={tmp_path / 'run'}"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=500)
    assert ended.returncode == 0, ended.stderr
    losses = [float(loss) for loss in re.findall(r"^step +\d+/20  loss ([\d.]+)", ended.stdout, re.M)]
    assert losses[-1] < losses[0] - 0.5
