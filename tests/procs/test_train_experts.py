"""The trainer's model with experts: the example on four processes, and the same run as on one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.train.config import ConfigError, load_config
from fullshard.train.model import LlamaShape, flop_per_token
from tests.harness import tolerance
from tests.harness.pool import pool
from tests.procs.test_train_cli import environment
from tests.procs.test_train_world import Run, assert_equal, config_of, differences, trained

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_moe.toml"
# A loss that balances experts is of the tokens of each process: without it the run does not depend on their number.
UNBALANCED = "model.balance_loss=0.0"
EP = "parallelism.expert_parallel_degree"


@pytest.mark.slow
@pytest.mark.hang_after(200)
def test_the_example_begins_as_on_one_process() -> None:
    """Initial values to the bit; loss and norm of the first step within rounding."""
    overrides = UNBALANCED, "training.steps=1", "metrics.eval_windows=8", "training.device=cpu"
    config = load_config(EXAMPLE, overrides)
    config.check_world(4)
    runs: list[Run] = pool(4).run(trained, config, timeout=150)
    (plain,) = pool(1).run(trained, load_config(EXAMPLE, (*overrides, f"{EP}=1")), timeout=150)
    for run in runs:
        assert_equal(run.initial, plain.initial)
        for mine, its in (
            (run.records[0].loss, plain.records[0].loss),
            (run.records[0].grad_norm, plain.records[0].grad_norm),
        ):
            assert abs(mine - its) <= tolerance.sums(torch.float32, plain.terms) * its


@pytest.mark.slow
@pytest.mark.hang_after(500)
@pytest.mark.parametrize(
    "axes", [(f"{EP}=2",), (f"{EP}=4", "parallelism.tensor_parallel_degree=2")], ids=["ep", "ep over tp"]
)
def test_a_run_equals_one_process(axes: tuple[str, ...]) -> None:
    """Losses, parameters and AdamW's state after 20 steps with micro-batches."""
    model = "model.experts=4", UNBALANCED
    (found, *_) = pool(4).run(trained, config_of(*model, *axes), timeout=240)
    assert not differences(found, *model)


@pytest.mark.slow
@pytest.mark.hang_after(300)
def test_the_example_as_a_command(tmp_path: Path) -> None:
    """It learns; its checkpoint continues without experts divided, on two processes."""

    def run(*arguments: Any) -> str:
        command = [sys.executable, "-m", "fullshard", "train", *map(str, arguments)]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=140)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    folder = tmp_path / "run"
    printed = run(EXAMPLE, "--nproc", 4, "--set", f"run.dir={folder}", "--set", "checkpoint.every=10")
    losses = [float(loss) for loss in re.findall(r"^step +\d+/20  loss ([\d.]+)", printed, re.M)]
    assert losses[-1] < losses[0] - 1 and "on efsdp=2 x ep=2" in printed
    changed = ("--set", "training.steps=24", "--set", f"{EP}=1")
    printed = run("--resume", folder, "--nproc", 2, *changed)
    assert "step 24/24" in printed and "step 21" not in printed.partition("step")[0]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("model.experts=4", "model.experts_per_token=5"), "must be at most model.experts = 4; nearest valid: 4"),
        (("model.experts_per_token=1",), "has no effect with model.experts = 0"),
        ((f"{EP}=2",), "has no effect with model.experts = 0"),
        (("model.experts=4", f"{EP}=2", "training.micro_batch=auto"), "ranks that share experts wait"),
    ],
)
def test_settings_that_are_refused(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(None, overrides)


def test_degrees_that_do_not_fit_the_model() -> None:
    with pytest.raises(
        ConfigError, match=r"must divide the experts, 6; nearest legal plan: .*expert_parallel_degree = 2"
    ):
        load_config(None, ("model.experts=6", f"{EP}=4")).check_world(4)


def test_operations_of_a_token_are_those_of_its_experts() -> None:
    shape = LlamaShape(vocab=7, layers=2, dim=8, heads=2, kv_heads=2, ffn_dim=16, context=4)
    few, many = (LlamaShape(*(getattr(shape, n) for n in shape.__slots__[:7]), experts=n) for n in (2, 8))
    of_experts = 2 * 3 * 8 * 16
    # Routers alone are larger.
    assert flop_per_token(many, 1000 + 6 * of_experts) == flop_per_token(few, 1000)
