"""Facts over gloo: with gradients that travel in pairs, and after an error all train on; the rest is
tests/threads/test_facts.py, which test_data_groups_over_gloo.py runs over gloo, too."""

from __future__ import annotations

from typing import Any

import pytest

import fullshard
from fullshard import RanksDisagree
from tests.harness.pool import pool
from tests.threads.test_facts import Run, outcome, plain


def _large(rank: int, odd: bool) -> tuple[int, str, str]:
    """Gradients that ranks send to each other from where they are."""
    from torch import nn

    from tests.harness.models import seeded

    class Wide(Run):
        def loss(self) -> Any:
            import torch

            return self.model(torch.ones(2, 400) * (self.rank + 1)).pow(2).mean()

    def make(rank: int) -> Run:
        model: Any = seeded(lambda: nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 400)))
        for layer in model:
            fullshard.fully_shard(layer)
        return Wide(rank, fullshard.fully_shard(model))

    def change(run: Run) -> None:
        for group in run.optimizer.param_groups:
            group["lr"] = 1e-3 if odd and run.rank == 1 else 1e-4

    return outcome(rank, make, change, 1)


@pytest.mark.parametrize("odd", [True, False])
def test_gradients_that_travel_in_pairs(odd: bool) -> None:
    found = pool(2).run(_large, odd)
    assert {(step, what) for step, what, _ in found} == {(2, "lr of the optimizer") if odd else (4, "")}, found


def _again(rank: int) -> tuple[str, list[float]]:
    """After the error all have the same rate, and train on from a checkpoint of the state before."""
    run = plain(rank)
    run.one_step()
    state = {name: value.full_tensor() for name, value in run.model.state_dict().items()}
    for group in run.optimizer.param_groups:
        group["lr"] = 0.1 * (1 + rank)
    run.one_step()
    said = ""
    try:
        run.one_step()
    except RanksDisagree as error:
        said = error.what
    run.optimizer.zero_grad()
    run.model.load_state_dict(state)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.1
    for _ in range(3):
        run.one_step()
    return said, [p.full_tensor().sum().item() for p in run.model.parameters()]


def test_ranks_train_on_after_it() -> None:
    (said, values), (said_too, values_too) = pool(2).run(_again)
    assert said == said_too == "lr of the optimizer" and values == values_too
