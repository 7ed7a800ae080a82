"""What `fullshard plan` predicts of offload, which CPUs do not have, beside what the device "simulated" held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from fullshard.plan import Strategy, find_hardware, plan_of
from fullshard.plan.facts import describe
from fullshard.plan.spans import steps_of
from fullshard.program import Program
from tests.device.test_memory import MIXED, measure
from tests.harness.on_device import Setup, case_of
from tests.harness.pool import pool

SETUPS = {
    "two ranks": (2, Setup("wide", offload=True)),
    "two ranks, packed, mixed precision": (2, Setup("packed", offload=True, **MIXED)),
    "micro-batches": (2, Setup("wide", offload=True, micro=2)),
    "micro-batches, mixed precision": (2, Setup("wide", offload=True, micro=2, **MIXED)),
    "one rank": (1, Setup("wide", offload=True)),
    "one rank, mixed precision": (1, Setup("wide", offload=True, **MIXED)),
}
# Nothing is added to what is counted: communicators of this device take nothing.
BARE = replace(find_hardware("h100-80g"), backend="simulated", reserved=0.0, fragmentation=0.0)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SETUPS)
def test_offload_is_predicted_on_the_device_and_on_the_host(name: str) -> None:
    world, setup = SETUPS[name]
    case = case_of(setup)

    def shard(model: nn.Module, fully_shard: Callable[..., Any]) -> None:
        for unit in case.units:
            fully_shard(model.get_submodule(unit))
        fully_shard(model)

    program = Program(case.build, case.loss, lambda index: case.batch(index, 0), shard=shard)
    strategy = Strategy(
        world,
        offload=True,
        compute=setup.dtype,
        reduce=setup.reduce_dtype,
        accumulate=setup.micro,
        backend="nccl",
    )
    model = describe(program, name, compute=setup.dtype)
    plan = plan_of(model, steps_of(model), strategy, BARE)
    on_host = dict(plan.host_terms)
    for found in pool(world, backend="nccl").run(measure, setup, seed=setup.seed):
        # The guard's table is of one size, whatever the model.
        peak = found.peak - dict(found.terms).get("table of the digests of initial values", 0)
        assert abs(plan.peak_nbytes - peak) <= 0.02 * peak, (
            f"{plan.peak_nbytes} in {plan.simulated.peak.phase}, {plan.simulated.terms[:12]}: {found.explain()}"
        )
        assert found.optimizer == 0 and on_host["optimizer"] == found.optimizer_on_host
        # Paddings at an end, and a few bytes of facts beside reduced gradients, are not among these storages.
        assert 0 <= on_host["parameters"] - found.shards_on_host <= 64
        assert 0 <= on_host["gradients of shards"] - found.gradients_on_host <= 4096
