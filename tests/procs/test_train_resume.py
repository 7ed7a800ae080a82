"""A run that was stopped goes on as if it had not been: bit for bit on as many processes, with the same samples on "
"others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fullshard import checkpoint
from fullshard.cli import main
from fullshard.train import process
from fullshard.train.config import Config, ConfigError, load_config
from fullshard.train.console import Console
from fullshard.train.folder import (
    CHECKPOINTS,
    check_resumable,
    close_manifest,
    forget_steps_after,
    make_run_dir,
    newest_unfinished,
    open_manifest,
    sole_user,
)
from fullshard.train.launch import EXIT_STOPPED
from fullshard.train.loop import Outputs
from fullshard.train.metrics import MetricsFile, StepRecord, read_metrics
from fullshard.train.process import Stopped, noting_stops
from tests.harness import tolerance
from tests.harness.pool import pool
from tests.procs.test_train_cli import children_of, command, environment, linux_only, metrics_of
from tests.procs.test_train_world import TINY, checkpoints_of, full, state_of, trainer_of

STEPS = 20


class Ran(NamedTuple):
    """What a run leaves: figures of its steps, then parameters and AdamW's state, full, on the CPU."""

    figures: list[tuple[Any, ...]]
    tensors: dict[str, torch.Tensor]
    stopped_after: int  # 0: not
    most: int  # checkpoints in the folder behind any step


def config_of(*overrides: str) -> Config:
    tiny = [o for o in TINY if not o.startswith("metrics.eval_every")]
    return load_config(
        None, (*tiny, "metrics.eval_every=7", "checkpoint.every=6", f"training.steps={STEPS}", *overrides)
    )


def ran(rank: int, config: Config, folder: str, stop_at: int = 0, stop_rank: int = 0) -> Ran:
    """A run in this process, from its newest checkpoint to the end; told to stop on one rank during step `stop_at`."""
    trainer = trainer_of(rank, config)
    checkpoints = checkpoints_of(trainer, folder)
    after, _ = checkpoints.resume()
    records = _Records(stop_at if rank == stop_rank else 0, Path(folder) / CHECKPOINTS)
    stopped = 0
    try:
        with noting_stops(60.0):
            if stop_at == 1 and rank == stop_rank:
                process._stop.signum = signal.SIGTERM
            trainer.run(records, checkpoints, after=after)
    except Stopped as stop:
        stopped = stop.step
    return Ran([_figures(record) for record in records.records], state_of(trainer), stopped, records.most)


class _Records(Outputs):
    """Keeps what each step reports; asks to stop behind the step before `stop_at`, as a signal between two steps "
    "does."""

    def __init__(self, stop_at: int, folder: Path) -> None:
        super().__init__(Console())
        self.folder, self.most = folder, 0
        self.records: list[StepRecord] = []
        self.stop_at = stop_at

    def step(self, record: StepRecord) -> None:
        self.records.append(record)
        self.most = max(self.most, len(list(self.folder.glob("step-*"))))
        if record.step + 1 == self.stop_at:
            process._stop.signum = signal.SIGTERM


def _figures(record: StepRecord) -> tuple[Any, ...]:
    return (record.step, record.samples, record.loss, record.grad_norm, record.lr, record.tokens, record.val_loss)


@cache
def undisturbed(world: int) -> Ran:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        results: list[Ran] = pool(world).run(ran, config_of(), folder, timeout=60)
    return results[0]


def goes_on(world: int, then: int, folder: Path, stop_at: int, stop_rank: int, *overrides: str) -> tuple[Ran, Ran]:
    first = pool(world).run(ran, config_of(*overrides), str(folder), stop_at, stop_rank, timeout=60)
    assert [one.stopped_after for one in first] == [stop_at] * world, "all ranks stop behind the same step"
    assert checkpoint.is_complete(folder / CHECKPOINTS / f"step-{stop_at}")
    second = pool(then).run(ran, config_of(*overrides), str(folder), timeout=60)
    return first[0], second[0]


def assert_bitwise(first: Ran, second: Ran, world: int) -> None:
    expected = undisturbed(world)
    assert first.figures + second.figures == expected.figures
    assert second.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert torch.equal(second.tensors[name], tensor), name


# A stop in the first step, behind an evaluation, beside a checkpoint at its interval, and in the last step but one.
STOPS = [(1, 2, 1), (2, 8, 1), (2, 12, 0), (4, 19, 3)]
MANY = [(world, stop, stop % world) for world in (1, 2) for stop in range(1, STEPS + 1)] + [
    (4, stop, 1) for stop in (2, 3, 7, 13)
]


@pytest.mark.sample(1, full=8)
@pytest.mark.parametrize(
    ("world", "stop_at", "stop_rank"),
    [*((w, s, min(r, w - 1)) for w, s, r in STOPS), *(pytest.param(*one, marks=pytest.mark.slow) for one in MANY)],
)
def test_a_stop_at_any_step_changes_no_bit(world: int, stop_at: int, stop_rank: int, tmp_path: Path) -> None:
    """Losses, norms, samples, validations, parameters and AdamW's state are those of a run that nobody stopped."""
    assert_bitwise(*goes_on(world, world, tmp_path, stop_at, stop_rank), world)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "then"),
    [(2, 1), (1, 4), *(pytest.param(a, b, marks=pytest.mark.slow) for a, b in ((1, 2), (2, 4), (4, 1), (4, 2)))],
)
def test_it_goes_on_with_another_number_of_processes(world: int, then: int, tmp_path: Path) -> None:
    first, second = goes_on(world, then, tmp_path, 7, 0, "checkpoint.keep_every=7")
    found, expected = first.figures + second.figures, undisturbed(world).figures
    assert [one[:2] for one in found] == [one[:2] for one in expected]  # steps, and the samples of each
    for ours, theirs in zip(found, expected, strict=True):
        # A loss is over some thousand tokens and weights, of which each step has other sums.
        allowed = tolerance.figure(4096, STEPS)
        assert ours[2] == pytest.approx(theirs[2], rel=allowed)
        assert (ours[6] or 0) == pytest.approx(theirs[6] or 0, rel=allowed)
    # At the moment of the stop nothing has been rounded yet: what was loaded is what was saved.
    loaded = pool(then).run(_loaded, config_of(), str(tmp_path / CHECKPOINTS / "step-7"))[0]
    for name, tensor in first.tensors.items():
        assert torch.equal(loaded[name], tensor), name


def _loaded(rank: int, config: Config, path: str) -> dict[str, torch.Tensor]:
    trainer = trainer_of(rank, config)
    assert checkpoints_of(trainer, Path(path).parents[1]).load(Path(path)) == 7
    return state_of(trainer)


@pytest.mark.slow
def test_what_a_kill_leaves_is_passed_over(tmp_path: Path) -> None:
    """Killed while it saved step 12, with step 6 whole: it goes on from there."""
    pool(2).run(ran, config_of(), str(tmp_path), 13, 0, timeout=60)
    torn = tmp_path / CHECKPOINTS / "step-13"
    (torn / "CURRENT").unlink()
    results = pool(2).run(ran, config_of(), str(tmp_path), timeout=60)
    assert results[0].figures == undisturbed(2).figures[12:]
    for name, tensor in undisturbed(2).tensors.items():
        assert torch.equal(results[0].tensors[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_old_checkpoints_go_and_the_last_is_kept(asynchronous: str, tmp_path: Path) -> None:
    config = config_of("checkpoint.every=3", "checkpoint.keep_every=6", f"checkpoint.asynchronous={asynchronous}")
    first = pool(2).run(ran, config, str(tmp_path), timeout=60)[0]
    # On the way, too: the newest two, the multiples of six that are older, and one that is being made.
    assert 2 <= first.most <= 5
    # Two newest, and the multiples of six.
    kept = sorted(path.name for path in (tmp_path / CHECKPOINTS).iterdir())
    assert kept == [
        "step-12",
        "step-18",
        "step-20",
        "step-6",
    ]
    again = pool(1).run(ran, config, str(tmp_path))[0]
    assert again.figures == [] and again.stopped_after == 0


def _refuses(rank: int, config: Config, folder: str) -> str:
    trainer = trainer_of(rank, config)
    before = {name: full(p).clone() for name, p in trainer.model.named_parameters()}
    checkpoints = checkpoints_of(trainer, folder, corpus_sha256="another")
    newest = checkpoints.newest()
    assert newest is not None
    try:
        checkpoints.load(newest)
    except RuntimeError as error:
        assert all(torch.equal(full(p), before[name]) for name, p in trainer.model.named_parameters())
        return str(error)
    return ""


def test_another_corpus_is_refused(tmp_path: Path) -> None:
    config = config_of("training.steps=2")
    pool(2).run(ran, config, str(tmp_path), timeout=60)
    for text in pool(2).run(_refuses, config, str(tmp_path)):
        assert "belongs to another run: corpus_sha256: 'x' there, 'another' here" in text


def _seeds(rank: int, config: Config) -> list[int]:
    trainer = trainer_of(rank, config)
    found = []
    for step in (1, 2):
        trainer.step(step)
        found.append(torch.initial_seed())
        assert found[-1] == checkpoint.derived_seed(config.training.seed, step, rank)
    return found


def test_each_step_seeds_each_rank() -> None:
    seeds = pool(2).run(_seeds, config_of())
    assert len({seed for found in seeds for seed in found}) == 4


# ---- the folder ------------------------------------------------------------------------------------------------


def test_what_may_change_and_what_not(tmp_path: Path) -> None:
    folder = f"run.dir={tmp_path}/run"
    make_run_dir(load_config(None, [folder]))
    for allowed in (
        "training.steps=900",
        "training.micro_batch=2",
        "sharding.reshard_after_forward=always",
        "checkpoint.every=7",
        "metrics.log_every=3",
        "sharding.activation_checkpointing.at=units",
    ):
        check_resumable(tmp_path / "run", load_config(None, [folder, allowed]))
    for refused in (
        "model.dim=64",
        "training.seed=3",
        "training.global_batch=32",
        "optimizer.lr=0.1",
        "data.tokenizer=bpe",
    ):
        with pytest.raises(ConfigError, match="a continued run must not change it; nearest valid"):
            make_run_dir(load_config(None, [folder, refused]))
    assert load_config(tmp_path / "run" / "config.toml") == load_config(None, [folder])  # as it was
    open_manifest(tmp_path / "run", {"world": {"processes": 2}})
    close_manifest(tmp_path / "run", "completed", last_step=300)
    with pytest.raises(ConfigError, match="is complete after 300 steps"):
        make_run_dir(load_config(None, [folder]))
    make_run_dir(load_config(None, [folder, "training.steps=301"]))
    open_manifest(tmp_path / "run", {"world": {"processes": 4}})
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["status"] == "running" and len(manifest["sittings"]) == 1
    assert manifest["sittings"][0]["last_step"] == 300 and manifest["sittings"][0]["world"] == {"processes": 2}


def test_one_process_at_a_time_has_the_folder(tmp_path: Path) -> None:
    config = load_config(None, [f"run.dir={tmp_path}/run"])
    path = make_run_dir(config)
    with sole_user(path), pytest.raises(ConfigError, match="another process is training in this folder"):
        make_run_dir(config)
    make_run_dir(config)


def test_the_newest_unfinished_run_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume"]) == 2
    assert main(["train", "--resume", "nowhere"]) == 2
    for name in ("a", "b", "c"):
        make_run_dir(load_config(None, [f"run.dir=runs/{name}"]))
        os.utime(f"runs/{name}/config.toml", ns=(1, ord(name)))
    open_manifest(Path("runs/c"), {})
    close_manifest(Path("runs/c"), "completed", last_step=300)
    assert newest_unfinished() == Path("runs/b")
    assert main(["train", "x.toml", "--resume"]) == 2


def test_lines_of_steps_that_are_made_again_go(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.close()
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    forget_steps_after(tmp_path, 2)
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    forget_steps_after(tmp_path, 0)
    assert path.read_text() == ""


# ---- real processes and signals --------------------------------------------------------------------------------


def launched(run_dir: Path, steps: int, *arguments: str) -> subprocess.Popen[str]:
    words = command(run_dir, "--set", f"training.steps={steps}", "--set", "metrics.plot=false", *arguments)
    return subprocess.Popen(
        [sys.executable, "-m", "fullshard", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def wait_for_steps(process: subprocess.Popen[str], run_dir: Path, count: int) -> None:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        if (run_dir / "metrics.jsonl").exists() and len(metrics_of(run_dir)) >= count:
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"no step {count} within 100 s: {process.communicate()[1]}")


@pytest.mark.slow
@linux_only
@pytest.mark.parametrize(
    "told", ["rank 1", pytest.param("launcher", marks=pytest.mark.slow), pytest.param("all", marks=pytest.mark.slow)]
)
@pytest.mark.hang_after(300)
def test_sigterm_to_one_process_stops_the_run_with_a_checkpoint(told: str, tmp_path: Path) -> None:
    """Within one more step, exit code 75, and `--resume` goes on from there to the end."""
    run_dir = tmp_path / "run"
    process = launched(run_dir, 100_000)
    wait_for_steps(process, run_dir, 2)
    ranks = children_of(process)
    before = len(metrics_of(run_dir))
    for pid in {"rank 1": ranks[1:2], "launcher": [process.pid], "all": [process.pid, *ranks]}[told]:
        os.kill(pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == EXIT_STOPPED == 75
    manifest = json.loads((run_dir / "manifest.json").read_text())
    last = manifest["last_step"]
    assert manifest["status"] == "stopped" and errors.count("\n") == 1
    assert f"stopped by SIGTERM after step {last}, with a checkpoint" in errors and f"--resume {run_dir}" in errors
    assert last == len(metrics_of(run_dir)) and last >= before
    assert checkpoint.latest(run_dir / CHECKPOINTS) == run_dir / CHECKPOINTS / f"step-{last}"
    checkpoint.verify(run_dir / CHECKPOINTS / f"step-{last}")
    words = ["train", "--resume", str(run_dir), "--set", f"training.steps={last + 2}"]
    done = subprocess.run(
        [sys.executable, "-m", "fullshard", *words], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert f"continuing after step {last}" in done.stdout
    assert [record["step"] for record in metrics_of(run_dir)] == list(range(1, last + 3))
    assert json.loads((run_dir / "manifest.json").read_text())["sittings"][0]["status"] == "stopped"


def wait_for_sitting(process: subprocess.Popen[str], run_dir: Path, sitting: int) -> None:
    """Until this sitting, counted from 0, has made three steps, or the process is over."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        path = run_dir / "manifest.json"
        manifest = json.loads(path.read_text()) if path.exists() else {"sittings": []}
        if len(manifest["sittings"]) == sitting and manifest.get("status") == "running":
            if (run_dir / "metrics.jsonl").exists():
                if len(metrics_of(run_dir)) >= manifest["resumed_after_step"] + 3:
                    return
        time.sleep(0.02)


@linux_only
@pytest.mark.slow
@pytest.mark.hang_after(500)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_cut_off_again_and_again_ends_as_if_it_was_not(signum: signal.Signals, tmp_path: Path) -> None:
    """SIGKILL of all its processes, or SIGTERM to one, at any moment, and the same command again."""
    straight, run_dir = tmp_path / "straight", tmp_path / "run"
    options = ("--set", "checkpoint.every=4")
    process = launched(straight, 40, *options)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    codes = []
    for sitting, wait in enumerate((0.0, 0.13, 0.0, 0.4)):
        process = launched(run_dir, 40, *options)
        wait_for_sitting(process, run_dir, sitting)
        time.sleep(wait)
        if process.poll() is None:
            ranks = children_of(process)
            told = [process.pid, *ranks] if signum == signal.SIGKILL else ranks[sitting % 2 : sitting % 2 + 1]
            for pid in told:
                with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
                    os.kill(pid, signum)
        process.communicate(timeout=100)
        codes.append(process.returncode)
    process = launched(run_dir, 40, *options)
    process.communicate(timeout=100)
    assert process.returncode in (0, 2), codes  # 2: the last signal came when it had ended
    assert signum == signal.SIGKILL or set(codes) <= {75, 143, 0, 2}
    assert len(set(codes) - {0, 2}) == 1  # it was cut off
    keys = ("step", "loss", "samples", "grad_norm", "val_loss")
    found, expected = ([tuple(r.get(k) for k in keys) for r in metrics_of(path)] for path in (run_dir, straight))
    assert found == expected
    assert (run_dir / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()
