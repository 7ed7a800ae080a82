"""`training.nonfinite`, `.replay_every`, `.check_every`: what a run does with a step that has a NaN or inf, a wrong
bit, or a message that brings something else."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import fullshard
from fullshard.extras import ReplayError
from fullshard.observe import Recorder
from fullshard.train.config import Config
from fullshard.train.console import Console
from fullshard.train.loop import Outputs
from fullshard.train.metrics import StepRecord
from tests.harness.pool import pool
from tests.harness.seeded_faults import SeededFault, seeded
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_count_updates_all_the_same() -> None:
    for outcome in run("count"):
        assert not outcome.error and not outcome.unchanged
        assert [record.nonfinite is None for record in outcome.records] == [True, False, False, False]
        assert any(not tensor.isfinite().all() for tensor in outcome.tensors)


def replaying(rank: int, config: Config, flips: bool) -> tuple[str, list[float], list[torch.Tensor]]:
    """What `Trainer.run` raises, its losses, and what it leaves; with `flips` one bit of a weight of rank 1 changes in
    the second of the two runs of step 4."""
    trainer = trainer_of(rank, config)
    outputs = Outputs(Console())
    losses: list[float] = []
    calls: list[int] = []
    outputs_step, step = outputs.console.step, trainer.step

    def counted(number: int, recorder: Recorder | None = None) -> StepRecord:
        calls.append(number)
        if flips and rank == 1 and calls.count(4) == 2:
            weight: Any = trainer.model.get_parameter("layers.0.ffn.up.weight")
            weight.to_local().data.view(-1).view(torch.int32)[3] ^= 1 << 12
        return step(number, recorder)

    def kept(record: StepRecord) -> None:
        losses.append(record.loss)
        outputs_step(record)

    trainer.step = counted  # type: ignore[method-assign]
    outputs.console.step = kept  # type: ignore[method-assign]
    error = ""
    try:
        trainer.run(outputs)
    except ReplayError as raised:
        error = str(raised)
    every = config.training.replay_every
    assert flips or calls == [n for n in range(1, 6) for _ in range(2 if every and n % every == 0 else 1)]
    return error, losses, tensors(trainer)


@pytest.mark.slow
def test_steps_are_replayed_by_a_key() -> None:
    """The run is the same in every bit with it; a bit that flips ends it, with the rank and the parameter."""
    configs = [config_of("training.steps=5", "metrics.eval_every=2", f"training.replay_every={n}") for n in (0, 2)]
    plain, replayed = (pool(2).run(replaying, config, False, timeout=60) for config in configs)
    for (_, losses, state), (error, found, after) in zip(plain, replayed, strict=True):
        assert not error and found == losses and len(found) == 5
        assert all(map(torch.equal, after, state))
    for error, losses, _ in pool(2).run(replaying, configs[1], True, timeout=60):
        assert "differ first on rank 1, in the shard of layers.0.ffn.up.weight" in error and len(losses) == 3


def checking(rank: int, config: Config, fault: SeededFault | None) -> tuple[str, list[float]]:
    """What `Trainer.run` raises, and its losses."""
    trainer = trainer_of(rank, config)
    outputs = Outputs(Console())
    losses: list[float] = []
    outputs.console.step = lambda record: losses.append(record.loss)  # type: ignore[method-assign]
    with seeded(fault) if fault else nullcontext():
        try:
            trainer.run(outputs)
        except fullshard.extras.InvariantBroken as raised:
            return str(raised), losses
    return "", losses


@pytest.mark.slow
def test_messages_are_checked_by_a_key() -> None:
    """With it, a reduction that doubles a gradient ends the run before the first update; without, nobody notices."""
    fault = SeededFault(
        "param.group:ParamGroup.receive",
        "gradients.reduced = part if",
        "gradients.reduced = part * (1 + self.params[i].name.endswith('ffn.up.weight')) if",
    )
    configs = [config_of("training.steps=3", "metrics.eval_every=3", f"training.check_every={n}") for n in (0, 1)]
    sound, checked, faulty, found = (
        pool(2).run(checking, config, fault if broken else None, timeout=60)
        for broken in (False, True)
        for config in configs
    )
    assert sound == checked and all(not error and len(losses) == 3 for error, losses in sound)
    assert faulty[0][1] != sound[0][1] and not faulty[0][0]
    for error, losses in found:
        assert error.startswith("layers.0.ffn.up.weight: expected the reduced gradient to be the sum") and not losses


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
    told = "and updated anyway" if counted else "and skipped"
    assert f"3 steps had a NaN or inf, {told}; the first was step 2" in ended.stdout
    assert (run_dir / "loss.png").exists() and (run_dir / "sample.txt").exists() != counted
