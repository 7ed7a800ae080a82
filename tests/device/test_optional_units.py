"""Units that only some ranks run, on a device: the order of all accesses, late messages, numbers of plain training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fullshard
from tests.harness import nccl, simulated
from tests.harness.models import assert_close_to_tensor_max, seeded
from tests.harness.on_device import whole
from tests.harness.optional_units import STEPS, Model, batch, loss_of, parts_of, shard
from tests.harness.pool import pool

WORLD = 2


def _trains(rank: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
    with simulated.watched() as seen:
        model = shard(seeded(Model).to("simulated"), mark=True, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in STEPS:
            inputs, targets = (part.to("simulated") for part in batch(step, rank))
            F.mse_loss(model(inputs, parts_of(step, rank)), targets).backward()
            fullshard.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        values = {name: whole(parameter).cpu().clone() for name, parameter in model.named_parameters()}
        torch.accelerator.synchronize()
    return values, [race.explain() for race in seen.races] + nccl.failures()


def _plain() -> dict[str, Tensor]:
    model = seeded(Model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in STEPS:
        for rank in range(WORLD):
            (loss_of(model, step, rank, parts_of(step, rank)) / WORLD).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_who_leaves_a_unit_out_sends_what_the_others_send(reshard: bool, seed: int) -> None:
    expected = _plain()
    found = pool(WORLD, backend="nccl").run(_trains, {"reshard_after_forward": reshard}, seed=seed, timeout=90)
    for values, faults in found:
        assert not faults, faults[0]
        for name, value in values.items():
            # The numbers of test_training.py: sums of as many terms, as many steps.
            assert_close_to_tensor_max(value, expected[name], 4 * len(STEPS), name)
