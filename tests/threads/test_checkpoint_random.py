"""Random state as a function of (seed, step, rank), and a whole training state that goes on bitwise."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard import checkpoint
from fullshard.checkpoint import RandomState, derived_seed
from tests.harness.behaviours import behaviour
from tests.harness.forked import run_forks
from tests.harness.models import seeded


def test_seeds_depend_on_everything_and_nothing_else() -> None:
    seeds = {derived_seed(s, n, r, p) for s in range(4) for n in range(9) for r in range(9) for p in ("", "numpy")}
    assert len(seeds) == 4 * 9 * 9 * 2
    assert derived_seed(0, 0, 0) == 6879008285140718943, "fixed for ever: checkpoints depend on it"
    assert all(0 <= seed < 2**63 for seed in seeds)


def drawn() -> tuple[float, float, float]:
    import numpy

    return float(torch.rand(())), random.random(), float(numpy.random.rand())


def test_a_step_draws_the_same_whenever_it_is_begun() -> None:
    state, before = RandomState(7, rank=1), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            state.begin(3)
            first = drawn()
            assert drawn() != first
            state.begin(4)
            assert drawn() != first
            state.begin(3)
            assert drawn() == first
            RandomState(7, rank=0).begin(3)
            assert drawn() != first
            other = RandomState(0, rank=1)
            other.load_state_dict(state.state_dict())
            assert drawn() == first and other.seed == 7
    finally:
        random.setstate(before)
    with pytest.raises(TypeError, match="seed: expected an int"):
        RandomState(True)


# ---- a whole training ------------------------------------------------------------------------------------------


class Training:
    """Model with dropout, optimizer, schedule, scaler, random state: all that a training is."""

    def __init__(self) -> None:
        self.model = seeded(lambda: nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.3), nn.Tanh(), nn.Linear(9, 2)))
        fullshard.fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=20)
        self.scaler = fullshard.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.random = RandomState(5)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            self.random.begin(step)
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            loss = self.model(x).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.schedule.step()
            losses.append(float(loss.detach()))
        return losses

    def state(self, step: int) -> dict[str, Any]:
        model, optimizer = checkpoint.get_state_dict(self.model, self.optimizer)
        own = {"schedule": self.schedule, "scaler": self.scaler, "random": self.random, "step": step}
        return {"model": model, "optimizer": optimizer, **own}

    def load(self, folder: Path) -> int:
        state = self.state(0)
        checkpoint.load(state, checkpoint_id=folder)
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        checkpoint.set_state_dict(self.model, self.optimizer, **parts)
        return int(state["step"])


def stopped(rank: int, folder: str) -> tuple[list[float], list[float], list[float]]:
    """Losses of an undisturbed run, and of one that stops behind step 3 and goes on in new objects."""
    straight = Training().train(range(7))
    first = Training()
    losses = first.train(range(4))
    checkpoint.save(first.state(4), checkpoint_id=Path(folder))
    second = Training()
    second.train(range(1))  # whatever happened to it before
    start = second.load(Path(folder))
    return straight, losses + second.train(range(start, 7)), [float(second.scaler.get_scale())]


@behaviour(
    "a training of {world} ranks with dropout, schedule and scaler continues bitwise after a stop",
    area="checkpoints",
    torch="none",
    reason="random state is derived from seed, step and rank",
)
@pytest.mark.parametrize("world", [1, 2])
def test_a_stopped_training_goes_on_bitwise(world: int, tmp_path: Path) -> None:
    """In processes: ranks that are threads share one random state."""
    for straight, resumed, scale in run_forks(world, stopped, (str(tmp_path / "c"),), 60.0):
        assert straight == resumed and scale == [32.0]


@pytest.mark.slow
def test_another_world_goes_on(tmp_path: Path) -> None:
    """Its random streams are others, and defined: twice the same."""

    def resumed(rank: int) -> list[float]:
        training = Training()
        start = training.load(tmp_path / "c")
        assert start == 4
        return training.train(range(start, 7))

    run_forks(2, stopped, (str(tmp_path / "c"),), 60.0)
    assert run_forks(3, resumed, (), 60.0) == run_forks(3, resumed, (), 60.0)
