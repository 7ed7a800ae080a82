"""`weights`, `transfer` and `average` on a device: order with the steps around them, late messages, memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from fullshard import average, transfer, weights
from tests.harness import on_device
from tests.harness.on_device import Setup
from tests.harness.pool import pool

CASE = on_device.case_of(Setup("packed"))
BUCKET = 64 << 10


def _trained(rank: int, model: Any, optimizer: Any, step: int) -> None:
    batch = tuple(part.to("simulated", non_blocking=True) for part in CASE.batch(step, rank))
    CASE.loss(model, batch).backward()  # type: ignore[arg-type]
    optimizer.step()
    optimizer.zero_grad()


def _hands_over(rank: int, offload: bool) -> dict[str, Any]:
    from tests.harness import nccl, simulated

    device = torch.simulated  # type: ignore[attr-defined]
    with simulated.watched() as seen:
        setup = Setup("packed", offload=offload)
        model: Any = on_device.sharded(CASE.build().to("simulated"), setup)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        mean = average(model, decay=0.5, device="cpu" if offload else None)
        engine: Any = CASE.build(seed=1).bfloat16()
        engine = engine.to("simulated") if rank == 1 else None
        move = transfer(model, engine, limit_nbytes=BUCKET)
        same, peaks = [], []
        for step in range(2):
            _trained(rank, model, optimizer, step)
            mean.update()
            gc.collect()
            rest = device.memory_allocated()
            device.reset_peak_memory_stats()
            found = {}
            for bucket in weights(model, bucket_nbytes=BUCKET):
                found.update({name: tensor.cpu() for name, tensor in bucket})
            del bucket
            peaks.append(device.max_memory_allocated() - rest)
            device.reset_peak_memory_stats()
            move.run()
            peaks.append(device.max_memory_allocated() - rest)
            with mean.applied():
                averaged = {name: tensor.cpu() for name, tensor in weights(model).tensors()}
            # The next step follows at once: what was read is that of this one.
            _trained(rank, model, optimizer, 10 + step)
            if engine is not None:
                arrived = {name: tensor.cpu() for name, tensor in engine.state_dict().items()}
                same.append(all(torch.equal(arrived[name], found[name].bfloat16()) for name in found))
            same.append(any(not torch.equal(averaged[name], found[name]) for name in found) or step == 0)
        torch.accelerator.synchronize()
        largest = max(tensor.nbytes for tensor in found.values())
        values = {name: tensor.double().sum().item() for name, tensor in found.items()}
        del model, optimizer, engine, move, mean
        gc.collect()
    return {
        "faults": [race.explain() for race in seen.races] + nccl.failures(),
        "same": same,
        "peaks": peaks,
        "largest": largest,
        "values": values,
    }


@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_hand_over_between_steps_is_ordered_and_bounded(offload: bool, seed: int) -> None:
    one, other = pool(2, backend="nccl").run(_hands_over, offload, seed=seed, timeout=90)
    for found in (one, other):
        assert not found["faults"], found["faults"][0]
        assert all(found["same"]), found["same"]
        buckets, moves = found["peaks"][::2], found["peaks"][1::2]
        # The tensors of a bucket, and the messages that they come in; the bucket before is freed later.
        most = max(BUCKET, found["largest"])
        assert max(buckets) <= 3 * most + 4096
        # One message; a target that is not sharded has memory of its own.
        assert max(moves) <= BUCKET + found["largest"]
    assert one["values"] == other["values"]
