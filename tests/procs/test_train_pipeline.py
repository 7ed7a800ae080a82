"""The trainer's pipelines: figures on all processes as of one process, and checkpoints that another split continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.checkpoint.formats.hf import read_safetensors
from fullshard.cli import main
from fullshard.train.config import load_config
from tests.harness import tolerance
from tests.harness.models import Trained, assert_same_training, collect
from tests.harness.pipelines import part_of
from tests.harness.pool import pool
from tests.procs.test_train_world import TINY, Run, checkpoints_of, figures, run_on, trained, trainer_of

UNTIED = ("model.tie_embeddings=false", "model.layers=4")
TIED = ("model.tie_embeddings=true",)
EXPERTS = ("model.experts=4", "model.experts_per_token=2", "model.balance_loss=0.1", "training.micro_batch=1")
CP = "sharding.parallelism.context_parallel_degree=2"
EP = "sharding.parallelism.expert_parallel_degree=2"
PP = "sharding.parallelism.pipeline_parallel_degree=2"
LOOPS = "sharding.parallelism.pipeline_parallel_schedule=Interleaved1F1B"
BUBBLE = "sharding.parallelism.pipeline_parallel_schedule=InterleavedZeroBubble"


@pytest.mark.hang_after(300)
@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        pytest.param(2, (PP,), marks=pytest.mark.slow),
        pytest.param(4, (PP, "sharding.activation_checkpointing.at=units"), marks=pytest.mark.slow),
        pytest.param(4, (PP, LOOPS, "training.micro_batch=1"), marks=pytest.mark.slow),
        pytest.param(4, (PP, BUBBLE, "sharding.precision.reduce=float64"), marks=pytest.mark.slow),
        pytest.param(4, (PP, "sharding.data_parallel_replicate_degree=2"), marks=pytest.mark.slow),
        (2, (PP, *TIED)),
        pytest.param(2, (PP, LOOPS, *TIED, "training.micro_batch=1"), marks=pytest.mark.slow),
        pytest.param(4, (PP, CP), marks=pytest.mark.slow),
        pytest.param(8, (PP, CP, *TIED), marks=pytest.mark.slow),
        pytest.param(2, (PP, *EXPERTS), marks=pytest.mark.slow),
        pytest.param(4, (PP, *EXPERTS, EP), marks=pytest.mark.slow),
        pytest.param(4, (PP, LOOPS, *EXPERTS, *TIED, EP, "training.micro_batch=1"), marks=pytest.mark.slow),
    ],
)
def test_two_steps_of_a_pipeline(world: int, overrides: tuple[str, ...]) -> None:
    """Losses, validations and norms, on every process; beside cut sequences, a tied embedding, and experts."""
    model = [each for each in overrides if each.startswith(("model.", "training."))]
    steps = ("training.steps=2", "metrics.eval_every=2", *UNTIED, *model)
    expected = run_on(1, *steps)
    config = load_config(None, (*TINY, *steps, *overrides))
    config.check_world(world)
    ranks: list[Run] = pool(world).run(trained, config, 0.0, 0.0, timeout=240)
    names: set[str] = set()
    for found in ranks:
        assert figures(found.records) == figures(ranks[0].records)
        names |= {*found.parameters}
        for name, value in found.initial.items():
            assert torch.equal(value, expected.initial[name]), name
    assert names == {*expected.parameters}
    for mine, its in zip(figures(ranks[0].records), figures(expected.records), strict=True):
        assert mine == pytest.approx(its, rel=tolerance.figure(expected.terms, steps=2))
    assert ranks[0].records[-1].val_loss


def saved(rank: int, configs: list[Any], folder: str) -> list[Trained]:
    """Each configuration continues with a step what the one before it saved; its state as it was loaded, and then."""
    found = []
    for config in configs:
        trainer = trainer_of(rank, config)
        model, optimizer = trainer.model, trainer.optimizer
        checkpoints = checkpoints_of(trainer, folder)
        after, _ = checkpoints.resume()
        found.append(collect(model, optimizer))
        trainer.step(after + 1)
        checkpoints.save(after + 1, wait=True)
        found.append(collect(model, optimizer))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tie", [(), pytest.param(TIED, marks=pytest.mark.slow)], ids=["untied", "tied"])
def test_another_split_continues(tie: tuple[str, ...], tmp_path: Path) -> None:
    """Two stages, none, and two in a loop on each process: bitwise as they were saved."""
    overrides: list[tuple[str, ...]] = [(PP,), (), (PP, LOOPS)]
    configs = [load_config(None, (*TINY, *UNTIED, *tie, *more)) for more in overrides]
    ranks = pool(2).run(saved, configs, str(tmp_path), timeout=240)
    for number in range(1, len(configs)):
        before: dict[str, torch.Tensor] = {}
        for found in ranks:
            before |= found[2 * number - 1].params | found[2 * number - 1].state
        whole = Trained({n: v for n, v in before.items() if n.endswith("weight")}, before)
        for found in ranks:
            loaded = found[2 * number]
            assert loaded.state
            assert_same_training(loaded, part_of(whole, loaded.params), 0)


@pytest.mark.slow
@pytest.mark.hang_after(300)
def test_the_command_trains_a_pipeline(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The example, stopped after a few steps: figures, the whole model as one file, and a text of it; then it continues
    without a pipeline."""
    example = str(Path(__file__).parents[2] / "examples" / "train_pipeline.toml")
    folder = tmp_path / "run"
    small = [f"run.dir={folder}", "sample.tokens=8", "metrics.tensorboard=false", "metrics.plot=false"]
    for steps, more in ((4, []), (6, ["parallelism.pipeline_parallel_degree=1"])):
        settings = [*small, f"training.steps={steps}", *more]
        sets = [part for each in settings for part in ("--set", each)]
        assert main(["train", example, "--nproc", "4", *sets]) == 0
        manifest = json.loads((folder / "manifest.json").read_text())
        tensors = read_safetensors(folder / "model.safetensors")
        assert manifest["parameters"] == sum(tensor.numel() for tensor in tensors.values())
        assert manifest["status"] == "completed" and manifest["last_step"] == steps
        assert (folder / "sample.txt").read_text().startswith("The ")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 7)) and lines[-1]["loss"] < lines[0]["loss"]
    said = capfd.readouterr().out
    assert "pipeline: 1F1B; this rank has 0 of 2 stages" in said and "continuing after step 4" in said
