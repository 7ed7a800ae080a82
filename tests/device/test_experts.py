"""Experts that ranks divide, on a device: the order of all accesses, late messages, numbers of plain training."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import fullshard
from fullshard import prepare_fully_shard
from tests.harness import moe, nccl, simulated
from tests.harness.axes import MAX_NORM
from tests.harness.models import Trained, adamw, assert_same_training
from tests.harness.on_device import whole
from tests.harness.pool import pool

WORLD, STEPS = 2, 2


def _trains(rank: int) -> tuple[Trained, list[str]]:
    with simulated.watched() as seen:
        model = moe.tiny(balance=0.1).to("simulated")
        optimizer = adamw(model.parameters(), watched=False)
        plan = {"expert_parallel_degree": WORLD}
        prepare_fully_shard(model, optimizer, parallelism=plan, show=False)
        for step in range(STEPS):
            found = model(moe.tokens(step, rank).to("simulated", non_blocking=True)).square().sum() / 8
            (found + fullshard.balance_loss(model)).backward()
            fullshard.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        names = {parameter: name for name, parameter in model.named_parameters()}
        trained = Trained(
            {name: whole(parameter).cpu().clone() for parameter, name in names.items()},
            {
                f"{names[parameter]}.{key}": whole(value).cpu().clone() if value.ndim else value.cpu().clone()
                for parameter, entries in optimizer.state.items()
                for key, value in entries.items()
            },
        )
        torch.accelerator.synchronize()
    return trained, [race.explain() for race in seen.races] + nccl.failures()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_tokens_are_ordered_late_messages_included(seed: int) -> None:
    expected, _ = moe.plainly(partial(moe.tiny, balance=0.1), STEPS, WORLD)
    for trained, faults in pool(WORLD, backend="nccl").run(_trains, seed=seed, timeout=90):
        assert not faults, faults[0]
        assert_same_training(trained, expected)
