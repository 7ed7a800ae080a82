"""`fullshard train` and `fullshard generate` as a user calls them: real processes, real files, real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fullshard.checkpoint.formats.hf import read_safetensors
from fullshard.cli import main
from fullshard.train.config import load_config
from fullshard.train.data import read_corpus

# Against a hang: on a machine with five times as many processes as cores a run takes a minute and more.
BOUND = 240
pytestmark = [pytest.mark.hang_after(BOUND + 40), pytest.mark.slow]

TINY = (
    "model.layers=2",
    "model.dim=32",
    "training.global_batch=8",
    "training.sequence_length=32",
    "training.device=cpu",
    "optimizer.warmup_steps=2",
    "metrics.eval_every=4",
    "metrics.eval_windows=8",
    "sample.tokens=12",
)


def command(run_dir: Path, *arguments: str) -> list[str]:
    settings = [part for setting in (*TINY, f"run.dir={run_dir}") for part in ("--set", setting)]
    return ["train", *settings, *arguments]


def environment() -> dict[str, str]:
    """Without what a surrounding torchrun or test may have left."""
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    text = (run_dir / "metrics.jsonl").read_text()
    assert text.endswith("\n") or not text
    return [json.loads(line) for line in text.splitlines()]


class Finished(NamedTuple):
    run_dir: Path
    output: str
    errors: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A whole run of six steps on two processes, with its plan first."""
    run_dir = tmp_path_factory.mktemp("train") / "run"
    ended = subprocess.run(
        [sys.executable, "-m", "fullshard", *command(run_dir, "--plan", "--set", "training.steps=6")],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=BOUND,
    )
    assert ended.returncode == 0, ended.stderr
    return Finished(run_dir, ended.stdout, ended.stderr)


def test_a_run_is_quiet(finished: Finished) -> None:
    """Nothing on stderr: no warnings of other packages, no notes of the launcher."""
    assert finished.errors == ""


def test_metrics_have_a_line_per_step(finished: Finished) -> None:
    """The fields that scripts rely on, in every line; validation at its interval and at the end."""
    records = metrics_of(finished.run_dir)
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    for record in records:
        assert {"loss", "grad_norm", "lr", "tokens_per_second", "bits_per_byte", "memory_bytes"} <= record.keys()
        assert record["loss"] > 0 and record["grad_norm"] > 0 and record["tokens_per_second"] > 0
    assert [r["step"] for r in records if "val_loss" in r] == [4, 6]
    assert records[0]["lr"] == pytest.approx(1e-3)  # half of the warm-up


def test_the_folder_holds_everything(finished: Finished) -> None:
    names = {path.name for path in finished.run_dir.iterdir()}
    expected = {"config.toml", "manifest.json", "metrics.jsonl", "model.safetensors", "sample.txt", "loss.png"}
    assert names == expected | {"tensorboard", "checkpoints", "see"}
    assert (finished.run_dir / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert list((finished.run_dir / "tensorboard").iterdir())


def test_the_config_of_the_run_is_complete(finished: Finished) -> None:
    """The stored configuration is the one that ran, with every key."""
    config = load_config(finished.run_dir / "config.toml")
    overrides = [*TINY, f"run.dir={finished.run_dir}", "training.steps=6"]
    assert config == load_config(None, overrides)


def test_the_manifest_tells_what_ran(finished: Finished) -> None:
    manifest = json.loads((finished.run_dir / "manifest.json").read_text())
    assert manifest["status"] == "completed" and manifest["last_step"] == 6
    assert manifest["corpus"]["sha256"] == read_corpus(load_config(None).data).sha256
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["world"] == {"processes": 2, "copies": 1, "device": "cpu", "backend": "gloo"}
    assert sum(unit["numel"] for unit in manifest["units"]) == manifest["parameters"]
    held, whole = manifest["memory"]["rank0_measured"], manifest["memory"]["unsharded"]
    assert 0.5 <= held["parameters"] / whole["parameters"] < 0.55
    assert manifest["val_loss"] == metrics_of(finished.run_dir)[-1]["val_loss"]


def test_the_output_shows_units_progress_and_where_things_are(finished: Finished) -> None:
    lines = finished.output.rstrip().splitlines()
    assert any(line.startswith("layers.0 .. layers.1  Block x2") for line in lines)
    assert any(line.startswith("step 6/6  loss ") and " val " in line and line.endswith("left 0:00") for line in lines)
    assert f"run folder: {finished.run_dir}" in lines[-3] and lines[-2].startswith("generate:")


def test_the_plan_comes_before_the_first_step_and_is_compared_after_the_last(finished: Finished) -> None:
    lines = finished.output.rstrip().splitlines()
    planned = next(i for i, line in enumerate(lines) if re.match(r"step .+: compute .+, waiting for messages .+", line))
    assert planned < next(i for i, line in enumerate(lines) if line.startswith("step 1/6"))
    took = re.fullmatch(
        r"plan: a step was predicted to take ([\d.,]+) (\w+) and took ([\d.,]+) (\w+) \(median\)", lines[-1]
    )
    assert took is not None, lines[-1]
    units = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
    measured = statistics.median(record["seconds"] for record in metrics_of(finished.run_dir))
    assert float(took[3].replace(",", "")) * units[took[4]] == pytest.approx(measured, rel=0.1)
    assert float(took[1].replace(",", "")) > 0


def test_the_model_file_is_the_whole_model(finished: Finished) -> None:
    """Unsharded tensors under plain names, readable by the package safetensors too."""
    ours = read_safetensors(finished.run_dir / "model.safetensors")
    assert ours["embedding.weight"].shape == (259, 32)
    package = pytest.importorskip("safetensors.torch")
    theirs = package.load_file(finished.run_dir / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_generate_continues_the_prompt(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    """The same seed gives the same text; the sharded model's sample at the end of the run is one such text."""
    run_dir = str(finished.run_dir)
    assert main(["generate", run_dir]) == 0
    assert capsys.readouterr().out == (finished.run_dir / "sample.txt").read_text()
    assert main(["generate", run_dir, "--prompt", "né", "--tokens", "5", "--temperature", "0"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("né") and len(first) > 3
    assert main(["generate", run_dir, "--prompt", "né", "--tokens", "5", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == first


def test_a_used_folder_is_refused(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that ended well is not run again, and none goes on as another one; one line, exit 2."""
    assert main(command(finished.run_dir, "--set", "training.steps=6")) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "run.dir" in error and f"{finished.run_dir.name}-2" in error
    assert main(command(finished.run_dir, "--set", "model.heads=2")) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "a continued run must not change it; nearest valid: 4" in error


def test_under_torchrun_it_is_the_same_run(finished: Finished, tmp_path: Path) -> None:
    """`torchrun -m fullshard train` starts no processes of its own and ends with the very same weights."""
    run_dir = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "fullshard"]
    arguments = command(
        run_dir, "--set", "training.steps=6", "--set", "metrics.plot=false", "--set", "training.threads=1"
    )
    ended = subprocess.run([*torchrun, *arguments], capture_output=True, text=True, env=environment(), timeout=BOUND)
    assert ended.returncode == 0, ended.stderr
    for theirs, ours in zip(metrics_of(run_dir), metrics_of(finished.run_dir), strict=True):
        assert theirs["loss"] == ours["loss"]
    expected = read_safetensors(finished.run_dir / "model.safetensors")
    for name, found in read_safetensors(run_dir / "model.safetensors").items():
        assert torch.equal(found, expected[name]), name


def started(run_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    """A long run that has trained at least two steps."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fullshard", *command(run_dir, "--set", "training.steps=100000", *arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if (run_dir / "metrics.jsonl").exists() and len(metrics_of(run_dir)) >= 2:
            return process
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no step within 60 s: {process.communicate()[1]}")


def children_of(process: subprocess.Popen[str]) -> list[int]:
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in text.split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


@linux_only
@pytest.mark.parametrize(
    # SIGTERM stops behind a step, with a checkpoint (test_train_resume.py).
    "signum, code",
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 75, marks=pytest.mark.slow)],
)
def test_an_interrupted_run_ends_whole_and_at_once(tmp_path: Path, signum: signal.Signals, code: int) -> None:
    """All processes end within seconds; one line; whole files; an exit code that tells it from a failure."""
    run_dir = tmp_path / "run"
    process = started(run_dir)
    ranks = children_of(process)
    assert len(ranks) == 2
    process.send_signal(signum)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == code
    assert not any(alive(pid) for pid in ranks)
    assert errors.count("\n") == 1 and signum.name in errors and str(run_dir) in errors
    records = metrics_of(run_dir)
    assert [r["step"] for r in records] == list(range(1, len(records) + 1))
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest["status"] == ("stopped" if code == 75 else "interrupted")
    assert manifest["last_step"] == len(records)
    assert not list(run_dir.glob("*.part"))


@linux_only
def test_a_killed_rank_ends_the_run(tmp_path: Path) -> None:
    """The death of one process ends the other, and the line names the rank and the signal, not the lost connection."""
    run_dir = tmp_path / "run"
    process = started(run_dir)
    ranks = children_of(process)
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=15)
    assert process.returncode == 1
    assert not any(alive(pid) for pid in ranks)
    assert errors.count("\n") == 1 and "rank 1 was killed by SIGKILL" in errors
    assert json.loads((run_dir / "manifest.json").read_text())["status"] == "failed"
