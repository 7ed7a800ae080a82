"""`training.nonfinite`: what a run does with a step whose loss or gradients have a NaN or inf on some rank."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fullshard.train.config import Config
from fullshard.train.metrics import StepRecord
from tests.harness.pool import pool
from tests.procs.test_train_cli import TINY, environment, metrics_of
from tests.procs.test_train_world import config_of, full, trainer_of

BAD = 2


class Steps(NamedTuple):
    records: list[StepRecord]
    error: str
    unchanged: bool  # by the bad step
    tensors: list[torch.Tensor]  # parameters and AdamW's state


def steps(rank: int, config: Config, without_bad: bool, what: str) -> Steps:
    """Steps 1 to 4; in step 2 rank 1 has a loss, or one element of a gradient, that is NaN."""
    trainer = trainer_of(rank, config)
    records, error, unchanged = [], "", False
    for step in range(1, 5):
        if step == BAD and without_bad:
            continue
        handle: Any = None
        if step == BAD and rank == 1 and what == "loss":
            handle = trainer.model.register_forward_hook(lambda module, arguments, output: output * math.nan)
        elif step == BAD and rank == 1:
            # An accumulated gradient: the loss is good on all ranks.
            parameter = trainer.model.get_parameter("layers.1.ffn.down.weight")
            handle = parameter.register_post_accumulate_grad_hook(spoil)
        before = tensors(trainer)
        try:
            records.append(trainer.step(step))
        except FloatingPointError as raised:
            error = str(raised)
        if step == BAD:
            unchanged = len(before) == len(tensors(trainer)) and all(map(torch.equal, before, tensors(trainer)))
        if handle is not None:
            handle.remove()
        if error:
            break
    return Steps(records, error, unchanged, tensors(trainer))


def spoil(parameter: torch.Tensor) -> None:
    gradient: Any = parameter.grad
    gradient.to_local()[-1, -1] = math.nan


def tensors(trainer: Any) -> list[torch.Tensor]:
    values = [v for state in trainer.optimizer.state.values() for v in state.values()]
    return [full(tensor).clone() for tensor in (*trainer.model.parameters(), *values)]


def run(mode: str, *, without_bad: bool = False, what: str = "loss") -> list[Steps]:
    config = config_of(f"training.nonfinite={mode}")
    found: list[Steps] = pool(2).run(steps, config, without_bad, what, timeout=60)
    return found


def test_raise_names_the_rank_and_changes_nothing() -> None:
    for outcome in run("raise"):
        assert outcome.error.startswith("step 2: loss is nan") and "the loss is not finite on rank 1" in outcome.error
        assert "optimizer.lr" in outcome.error and "training.nonfinite" in outcome.error
        assert outcome.unchanged and len(outcome.records) == 1
    for outcome in run("raise", what="gradient"):
        assert "the gradient of layers.1." in outcome.error and "on rank 1: 1 of" in outcome.error
        assert outcome.unchanged


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_skip_is_the_run_without_that_update(what: str) -> None:
    """Parameters and AdamW's state bitwise; the record of that step says what it was."""
    for outcome, expected in zip(run("skip", what=what), run("skip", without_bad=True), strict=True):
        assert not outcome.error and outcome.unchanged
        assert all(map(torch.equal, outcome.tensors, expected.tensors))
        told = [record.nonfinite for record in outcome.records]
        assert told[0] is told[2] is told[3] is None and told[1] is not None
        assert ("the loss" if what == "loss" else "the gradient of layers.1.") in told[1] and "rank 1" in told[1]
        assert "nonfinite" not in outcome.records[0].to_json()
        line = json.loads(outcome.records[1].to_json())
        assert line["grad_norm"] is None and (line["loss"] is None) == (what == "loss") and line["nonfinite"] == told[1]


def test_count_updates_all_the_same() -> None:
    for outcome in run("count"):
        assert not outcome.error and not outcome.unchanged
        assert [record.nonfinite is None for record in outcome.records] == [True, False, False, False]
        assert any(not tensor.isfinite().all() for tensor in outcome.tensors)


@pytest.mark.slow  # two runs of the command
@pytest.mark.parametrize("mode", ["skip", "count"])
def test_a_run_that_goes_on_ends_well(tmp_path: Path, mode: str) -> None:
    """The rate of the first step throws the weights to where no gradient is finite; the files can be read."""
    run_dir = tmp_path / "run"
    keys = (*TINY, f"run.dir={run_dir}", "training.steps=4", "training.clip_norm=0", "optimizer.lr=1e37")
    arguments = [item for key in (*keys, f"training.nonfinite={mode}") for item in ("--set", key)]
    ended = subprocess.run(
        [sys.executable, "-m", "fullshard", "train", *arguments, "--nproc", "2"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    records = metrics_of(run_dir)
    assert ["nonfinite" in record for record in records] == [False, True, True, True]
    assert "the gradient of embedding.weight is not finite on rank 0" in str(records[1]["nonfinite"])
    counted = mode == "count"
    assert [record["grad_norm"] is None for record in records] == [False, True, True, True]
    # That of the weights before the update: skipped ones leave a model that can be evaluated.
    assert [record["loss"] is None for record in records] == [False, False, counted, counted]
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest["status"] == "completed" and manifest["nonfinite_steps"] == 3
    assert (manifest["val_loss"] is None) == counted
    told = "and updated all the same" if counted else "and left out"
    assert f"3 steps had a NaN or inf, {told}; the first was step 2" in ended.stdout
    assert (run_dir / "loss.png").exists() and (run_dir / "sample.txt").exists() != counted
