"""`step_on_owners` on a device: order with the steps around it, late messages, memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from fullshard import step_on_owners
from fullshard.extras import matrices
from tests.harness import on_device
from tests.harness.on_device import Setup
from tests.harness.pool import pool

CASE = on_device.case_of(Setup("packed"))
CHUNK = 500_000


def _steps(rank: int, offload: bool) -> dict[str, Any]:
    """Muon on owners in several chunks, AdamW beside it; and both on whole tensors with the same gradients."""
    from tests.harness import nccl, simulated

    device = torch.simulated  # type: ignore[attr-defined]
    with simulated.watched() as seen:
        model: Any = on_device.sharded(CASE.build().to("simulated"), Setup("packed", offload=offload))
        plain = CASE.build().to("cpu" if offload else "simulated")
        pairs: list[list[torch.optim.Optimizer]] = [
            [torch.optim.Muon(matrices(one), lr=0.02), torch.optim.AdamW(matrices(one, rest=True), lr=1e-2)]
            for one in (plain, model)
        ]
        owners = step_on_owners(pairs[1], model=model, chunk_nbytes=CHUNK)
        peaks, same = [], []
        for step in range(3):
            batch = tuple(part.to("simulated", non_blocking=True) for part in CASE.batch(step, rank))
            CASE.loss(model, batch).backward()  # type: ignore[arg-type]
            for parameter, other in zip(plain.parameters(), model.parameters(), strict=True):
                parameter.grad = other.grad.full_tensor().to(parameter.device)
            for optimizer in pairs[0]:
                optimizer.step()
            gc.collect()
            rest = device.memory_allocated()
            device.reset_peak_memory_stats()
            owners.step()
            peaks.append(device.max_memory_allocated() - rest)
            # The next forward reads shards that the last chunk wrote.
            owners.zero_grad()
        for (name, parameter), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            if not torch.equal(on_device.whole(other).cpu(), parameter.detach().cpu()):
                same.append(name)
        plan = owners.plan()
        (fleet,) = plan.fleets
        torch.accelerator.synchronize()
        bound = fleet.transient_nbytes(rank) + max(one.made_nbytes for one in fleet.matrices)
        found = {"differ": same, "peak": peaks[-1], "bound": bound, "chunks": fleet.chunks}
        del model, plain, pairs, owners, optimizer, parameter, other, batch
        gc.collect()
    return {**found, "faults": [race.explain() for race in seen.races] + nccl.failures()}


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_owners_are_ordered_late_messages_included_and_bounded(offload: bool, seed: int) -> None:
    for found in pool(2, backend="nccl").run(_steps, offload, seed=seed, timeout=90):
        assert not found["faults"], found["faults"][0]
        assert found["differ"] == [] and found["chunks"] > 2
        assert found["peak"] <= found["bound"], "more than the plan says"
        # Offloaded shards and gradients are on the host, and so are their messages and whole matrices.
        assert (found["peak"] == 0) is offload
