"""`fullshard train --from`: a whole short run on two processes as another library's configuration says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.train.config import load_config
from tests.harness.elsewhere import FILES
from tests.procs.test_train_cli import BOUND, TINY, command, environment, metrics_of
from tests.pure.test_train_elsewhere import TAKEN

pytestmark = pytest.mark.hang_after(BOUND + 40)
QUICK = "torchtitan"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in FILES]
)
def test_a_run_from_a_configuration_of_another_library(name: str, tmp_path: Path) -> None:
    file, text = FILES[name]
    (tmp_path / file).write_text(text)
    run_dir = tmp_path / "run"
    more = ["--from", file, "--set", "training.steps=3"]
    start = [sys.executable, "-m", "fullshard"]
    ended = subprocess.run(
        [*start, *command(run_dir, *more)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
        timeout=BOUND,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"{file}:" in ended.stdout and "step 3/3" in ended.stdout
    settings = [*TINY, "training.steps=3", f"run.dir={run_dir}", *(f"{key}={v}" for key, v in TAKEN[name].items())]
    assert load_config(run_dir / "config.toml") == load_config(None, settings)
    losses = [record["loss"] for record in metrics_of(run_dir)]
    assert len(losses) == 3 and losses[-1] < losses[0]


@pytest.mark.slow
def test_under_torchrun_one_rank_says_what_became_of_the_keys(tmp_path: Path) -> None:
    file, text = FILES["accelerate"]
    (tmp_path / file).write_text(text)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = {}
    for accepted, code in ((text, 0), (text.replace("mixed_precision: bf16", "mixed_precision: fp16"), 1)):
        (tmp_path / file).write_text(accepted)
        more = ["--from", file, "--set", "training.steps=1"]
        ended = subprocess.run(
            [*launcher, "-m", "fullshard", *command(tmp_path / f"run-{code}", *more)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment(),
            timeout=BOUND,
        )
        assert ended.returncode == code, ended.stderr
        said[code] = ended
    assert said[0].stdout.count("accelerate.yaml:3: exact: distributed_type") == 1
    assert said[1].stderr.count("--accept-lossy precision.param") == 1 and not (tmp_path / "run-1").exists()
