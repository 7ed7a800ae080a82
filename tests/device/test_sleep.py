"""`sleep` and `wake` on a device: what it has meanwhile, order with the steps around them, late messages."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import fullshard
from fullshard.param.initial import table_nbytes
from tests.harness import on_device
from tests.harness.on_device import Setup
from tests.harness.pool import pool

CASE = on_device.case_of(Setup("packed"))


def _trained(rank: int, model: Any, optimizer: Any, step: int) -> None:
    batch = tuple(part.to("simulated", non_blocking=True) for part in CASE.batch(step, rank))
    CASE.loss(model, batch).backward()  # type: ignore[arg-type]
    optimizer.step()
    optimizer.zero_grad()


def _sleeps(rank: int, sleeps: bool, offload: bool, replicas: int = 1) -> dict[str, Any]:
    from tests.harness import nccl, simulated

    device = torch.simulated  # type: ignore[attr-defined]
    found: dict[str, Any] = {"said": [], "reports": []}
    with simulated.watched() as seen:
        setup = Setup("packed", offload=offload, replicas=replicas)
        model: Any = on_device.sharded(CASE.build().to("simulated"), setup)
        model.register_buffer("table", torch.ones(1000, device="simulated"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            _trained(rank, model, optimizer, step)
            # Gradients that are pending over a sleep, as one micro-batch of two, right after the step.
            model.set_requires_gradient_sync(False)
            batch = tuple(part.to("simulated") for part in CASE.batch(10 + step, rank))
            CASE.loss(model, batch).backward()  # type: ignore[arg-type]
            model.set_requires_gradient_sync(True)
            del batch
            if sleeps:
                gc.collect()
                found["sharded"] = sum(p.to_local().nbytes for p in model.parameters())
                before = device.memory_allocated()
                drop: Any = "replicas" if replicas > 1 else False
                found["reports"].append(fullshard.sleep(model, optimizer, drop=drop))
                gc.collect()
                found["asleep"] = device.memory_allocated()
                found["before"], found["table"] = before, table_nbytes(torch.device("simulated", 0))
                for use in (
                    lambda model=model: model.first.weight + 1,
                    model.state_dict,
                    lambda model=model: model.table + 1,
                ):
                    with pytest.raises(RuntimeError) as caught:
                        use()
                    found["said"].append(str(caught.value))
                fullshard.wake(model)
                found["after"] = device.memory_allocated()
            _trained(rank, model, optimizer, 20 + step)
        torch.accelerator.synchronize()
        found["values"] = {
            name: p.to_local().double().sum().item() for name, p in model.named_parameters() if p.to_local().numel()
        }
        del model, optimizer
        gc.collect()
    found["faults"] = [race.explain() for race in seen.races] + nccl.failures()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_memory_is_the_device_s_meanwhile(offload: bool, seed: int) -> None:
    slept = pool(2, backend="nccl").run(_sleeps, True, offload, seed=seed, timeout=90)
    awake = pool(2, backend="nccl").run(_sleeps, False, offload, seed=seed, timeout=90)
    for found, expected in zip(slept, awake, strict=True):
        assert not found["faults"], found["faults"][0]
        assert found["values"] == expected["values"]
        assert not [said for said in found["said"] if "asleep" not in said] and len(found["said"]) == 6
        report = found["reports"][-1]
        assert report.freed_nbytes == report.moved_nbytes > 0 == report.dropped_nbytes
        # The allocator rounds up: at least what is reported is there again, and all of it is taken back.
        assert found["asleep"] <= found["before"] - report.freed_nbytes
        assert found["after"] == found["before"]
        # Shards, gradients of a window and two states of AdamW. Nothing of them stays on the device.
        assert report.freed_nbytes >= (0 if offload else 3) * found["sharded"]
        assert found["asleep"] - found["table"] < found["sharded"] / 20
        assert offload or report.stayed_nbytes < found["sharded"] / 50  # counts of steps
        assert (report.stayed_nbytes > report.freed_nbytes) is offload


@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_replicas_keep_a_part_each(offload: bool) -> None:
    """Two replicas: each has half of what is sharded on the host, and with offload no more than that."""
    slept = pool(2, backend="nccl").run(_sleeps, True, offload, 2, seed=3, timeout=90)
    awake = pool(2, backend="nccl").run(_sleeps, False, offload, 2, seed=3, timeout=90)
    for found, expected in zip(slept, awake, strict=True):
        assert not found["faults"], found["faults"][0]
        assert found["values"] == expected["values"]
        report = found["reports"][-1]
        # Parameters and two states of AdamW, less a remainder of 16 bytes for each storage.
        assert abs(report.dropped_nbytes - 1.5 * found["sharded"]) < found["sharded"] / 50
        assert report.freed_nbytes == report.moved_nbytes + report.dropped_nbytes
        assert found["asleep"] - found["table"] < found["sharded"] / 20
        assert found["after"] == found["before"]
