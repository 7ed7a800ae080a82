"""Saves beside training: the copies of shards are ordered with the steps before and after them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard import checkpoint
from tests.harness import on_device
from tests.harness.on_device import Setup
from tests.harness.pool import pool

CASE = on_device.case_of(Setup())


def _saves(rank: int, folder: str, offload: bool) -> tuple[list[str], list[bool]]:
    from tests.harness import nccl, simulated

    with simulated.watched() as seen:
        model: Any = on_device.sharded(CASE.build().to("simulated"), Setup(offload=offload))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        futures, saved = [], []
        for step in range(3):
            batch = tuple(part.to("simulated") for part in CASE.batch(step, rank))
            CASE.loss(model, batch).backward()  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()
            state = {"model": model.state_dict(), "step": step}
            saved.append({name: p.to_local().cpu().clone() for name, p in model.named_parameters()})
            futures.append(checkpoint.async_save(state, checkpoint_id=f"{folder}/{step}"))
        for future in futures:
            future.result()
        same = []
        for step in range(3):
            state = {"model": model.state_dict(), "step": -1}
            checkpoint.load(state, checkpoint_id=f"{folder}/{step}")
            model.load_state_dict(state["model"])
            loaded = {name: p.to_local().cpu() for name, p in model.named_parameters()}
            same.append(all(torch.equal(loaded[name], value) for name, value in saved[step].items()))
    return [race.explain() for race in seen.races] + nccl.failures(), same


@pytest.mark.slow
def test_saves_beside_training_hold_the_step_that_they_name(tmp_path: Path) -> None:
    for offload in (False, True):
        for races, same in pool(2, backend="nccl").run(_saves, str(tmp_path / str(offload)), offload, timeout=90):
            assert not races, races[0]
            assert same == [True, True, True]
