"""An evaluation before the first step, on the real backend: what it made must serve training."""

from __future__ import annotations

import copy

import torch

import fullshard
from tests.harness.pool import pool
from tests.threads.programs import Model, batch, part, shard


def _evaluate_then_train(rank: int) -> float:
    torch.manual_seed(0)
    policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(copy.deepcopy(Model()), mp_policy=policy)
    with torch.inference_mode():
        model(part(batch(2, 0), rank))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        loss = model(part(batch(2, 0), rank)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:
            model.double()  # new shards and new messages, again first used by an evaluation
            with torch.inference_mode():
                model(part(batch(2, 0), rank))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return losses[-1] - losses[0]


def test_inference_mode_before_training() -> None:
    assert all(change < 0 for change in pool(2).run(_evaluate_then_train))
