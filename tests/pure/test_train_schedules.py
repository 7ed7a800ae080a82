"""Schedules of the trainer beside those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullshard.train.optimizer_keys import OptimizerKeys
from fullshard.train.schedules import learning_rate

WARMUP, STEPS = 7, 50


@pytest.mark.parametrize(
    ("schedule", "theirs", "least", "arguments"),
    [
        ("linear", "linear", 0.0, {}),
        ("cosine", "cosine", 0.0, {}),
        ("cosine", "cosine_with_min_lr", 0.25, {"min_lr_rate": 0.25}),
        ("constant", "constant_with_warmup", 0.1, {}),
        ("inverse_sqrt", "inverse_sqrt", 0.0, {}),
        ("wsd", "warmup_stable_decay", 0.0, {"num_decay_steps": 12, "decay_type": "linear"}),
        ("wsd", "warmup_stable_decay", 0.3, {"num_decay_steps": 12, "decay_type": "linear", "min_lr_ratio": 0.3}),
    ],
)
def test_as_transformers(schedule: str, theirs: str, least: float, arguments: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    keys = OptimizerKeys(
        lr=2e-3, schedule=schedule, warmup_steps=WARMUP, min_lr_ratio=least, decay_steps=12 * (schedule == "wsd")
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=keys.lr)
    found = transformers.get_scheduler(
        theirs, optimizer, num_warmup_steps=WARMUP, num_training_steps=STEPS, scheduler_specific_kwargs=arguments
    )
    # The warm-up of theirs with a floor begins at the floor.
    begins = WARMUP if "stable" in theirs and least else 1
    for step in range(1, STEPS + 1):
        optimizer.step()
        found.step()
        if step >= begins:
            # Both are products of a few factors: a handful of roundings in float64.
            expected = found.get_last_lr()[0]
            assert learning_rate(keys, STEPS, step) == pytest.approx(expected, rel=8 * 2**-52, abs=2**-60), step


def test_the_least_is_kept() -> None:
    for schedule in ("linear", "cosine", "wsd"):
        keys = OptimizerKeys(lr=1.0, schedule=schedule, warmup_steps=0, min_lr_ratio=0.2)
        assert learning_rate(keys, STEPS, STEPS) == pytest.approx(0.2, rel=2**-50)
    keys = OptimizerKeys(lr=1.0, schedule="inverse_sqrt", warmup_steps=1, min_lr_ratio=0.5)
    assert [learning_rate(keys, STEPS, step) for step in (1, 4, 9)] == [1.0, 0.5, 0.5]
