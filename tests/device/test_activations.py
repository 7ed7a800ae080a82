"""`checkpoint_activations` on a device: what is kept there between forward and backward, and equal gradients."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tests.harness.on_device import Setup, case_of, sharded, whole
from tests.harness.pool import pool

SETUP = Setup("transformer")
WAYS: dict[str, dict[str, Any] | None] = {
    "kept": None,
    "recomputed": {},
    "inputs on the host": {"offload": True},
    "all on the host": {"recompute": False, "offload": True},
}


def _held(rank: int, way: dict[str, Any] | None) -> tuple[int, dict[str, torch.Tensor], list[str]]:
    """Bytes that a forward leaves on the device, its gradients, and accesses without an order."""
    import fullshard
    from tests.harness import simulated

    device, case = torch.device("simulated", 0), case_of(SETUP)
    memory = torch.get_device_module(device)
    with simulated.watched() as seen:
        model = sharded(case.build().to(device), SETUP)
        if way is not None:
            assert len(fullshard.checkpoint_activations(model, "classes", classes=["_Block"], **way)) == 3
        inputs = tuple(part.to(device) for part in case.batch(0, rank, size=16))
        case.loss(model, inputs).backward()  # the first step records the order
        model.zero_grad()
        gc.collect()
        before = memory.memory_allocated()
        loss = case.loss(model, inputs)
        held = memory.memory_allocated() - before
        loss.backward()
        gradients = {name: whole(p.grad).cpu() for name, p in model.named_parameters()}
        races = [race.explain() for race in seen.races]
    return held, gradients, races


@pytest.mark.slow
def test_activations_on_the_host_leave_the_device() -> None:
    found = {name: pool(2, backend="nccl").run(_held, way) for name, way in WAYS.items()}
    for rank in range(2):
        held = {name: ranks[rank][0] for name, ranks in found.items()}
        # Of a block the inputs are far less than all that it keeps; the rest is the ends' of the model.
        assert held["inputs on the host"] < held["recomputed"] < held["kept"], held
        assert held["all on the host"] < held["recomputed"], held
        for name, ranks in found.items():
            assert ranks[rank][2] == [], name
            expected = found["kept"][rank][1]
            assert all(torch.equal(value, expected[n]) for n, value in ranks[rank][1].items()), name
