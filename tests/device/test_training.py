"""Every strategy on the device "simulated": its numbers, the order of all accesses, and what the host waits for."""

from __future__ import annotations

import functools
import os
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fullshard import fully_shard
from tests.harness import nccl, on_device, simulated
from tests.harness.models import assert_close_to_tensor_max
from tests.harness.on_device import Found, Setup
from tests.harness.pool import pool

SETUPS = {
    "ZeRO-3": Setup(),
    "ZeRO-2": Setup(reshard=False),
    "transformer": Setup("transformer"),
    "offload": Setup(offload=True),
    "recomputation": Setup("transformer", recompute=True),
    "micro-batches": Setup(micro=2),
    "clip": Setup(clip=0.1),
    "large parameters": Setup("alone"),
    "uneven": Setup("uneven_mlp"),
    "frozen": Setup("frozen"),
    "one unit": Setup("one_unit"),
    "unused on a rank": Setup(unused=("1", "2"), unused_on=(1,)),
    "unused on all ranks": Setup(unused=("1", "2"), unused_on=(0, 1)),
    "two send buffers": Setup("transformer", calls=(("set_reduce_scatter_max_input_buffers", 2),)),
    "exchanged": Setup("transformer", calls=(("set_communication", "all-to-all"),)),
    "offload, transformer": Setup("transformer", offload=True, queries=False),
    "evaluations": Setup(offload=True, evaluate=True),
    "one collective each": Setup(calls=(("set_communication", "torch"),)),
}
WIDER = {
    "HSDP": Setup(replicas=2),
    "hpZ": Setup(reshard=2),
    "HSDP, micro-batches": Setup("transformer", replicas=2, micro=2),
    "HSDP, partial sums": Setup("transformer", replicas=2, micro=2, partial=True),
    "HSDP, partial sums, unused on a rank": Setup(replicas=2, micro=2, partial=True, unused=("1", "2"), unused_on=(1,)),
    "HSDP, partial sums, unused": Setup(replicas=2, micro=2, partial=True, unused=("1", "2"), unused_on=(0, 1, 2, 3)),
}


@functools.cache
def _runs(name: str) -> list[Found]:
    return on_device.run(SETUPS[name])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SETUPS)
def test_every_access_is_ordered_and_the_numbers_are_plain_training_s(name: str) -> None:
    _check(SETUPS[name], 2, _runs(name))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", WIDER)
def test_strategies_of_four_ranks(name: str) -> None:
    found = on_device.run(WIDER[name], world=4)
    _check(WIDER[name], 4, found)
    for rank in found:
        # A backward waits for flags once, and a step for the digest of the last one.
        assert sum(n for place, n in rank.waits.items() if "comparison.py" in place) <= WIDER[name].micro + 1


def _check(setup: Setup, world: int, runs: list[Found] | None = None) -> None:
    expected = on_device.reference(setup, world)
    for found in runs or on_device.run(setup, world=world):
        found.check()
        for name, values in found.params.items():
            # Three AdamW steps, each of two roundings at the size of the largest element, and the sums of gradients.
            assert_close_to_tensor_max(values, expected[name], 12)


@pytest.mark.sample(2)
@pytest.mark.parametrize("setup", [Setup("uneven_mlp"), Setup(dtype="bfloat16"), Setup(offload=True)], ids=repr)
def test_a_world_of_one(setup: Setup) -> None:
    for found in on_device.run(setup, world=1):
        found.check()
        expected = on_device.reference(setup, 1)
        for name, values in found.params.items():
            assert values.isfinite().all()
            if not setup.dtype:
                assert_close_to_tensor_max(values, expected[name], 12)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_messages_may_run_at_any_time(seed: int) -> None:
    _check(Setup("transformer", seed=seed), 2)


def _fails(rank: int, where: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Every rank raises once, at the same place of its first step; then they train."""
    case = on_device.case_of(Setup())
    with simulated.watched() as seen:
        model = on_device.sharded(case.build().to("simulated"), Setup())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def fail(module: Any, args: Any, output: torch.Tensor) -> None:
            if where == "forward":
                raise ArithmeticError
            output.register_hook(_raise)

        handle = model[1].register_forward_hook(fail)
        for step in (-1, 0, 1, 2):
            batch = tuple(part.to("simulated") for part in case.batch(max(step, 0), rank))
            try:
                case.loss(model, batch).backward()  # type: ignore[arg-type]
                optimizer.step()
            except ArithmeticError:
                handle.remove()
            optimizer.zero_grad()
        params = {name: on_device.whole(p).cpu() for name, p in model.named_parameters()}
    return [race.explain() for race in seen.races] + nccl.failures(), params


def _raise(_: torch.Tensor) -> None:
    raise ArithmeticError


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_nothing_is_unordered_after_an_exception(where: str) -> None:
    expected = on_device.reference(Setup(), 2)
    for wrong, params in pool(2, backend="nccl").run(_fails, where, timeout=40):
        assert not wrong, wrong[0]
        for name, values in params.items():
            assert_close_to_tensor_max(values, expected[name], 12)


# What the host may wait for in a steady step of training, by where it does, and why.
ALLOWED_WAITS = {
    "copy to device, waiting at tests/harness/on_device.py": "the batch of the test, which is not page-locked",
    "event.synchronize at fullshard/comm/comparison.py": "the last step's digest; once a step, flags of gradients",
    "event.synchronize at fullshard/comm/offload.py": "with offload: gradients are on the host when the backward ends",
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SETUPS)
def test_the_host_waits_for_nothing_else(name: str) -> None:
    """A wait of the host that hides in a step costs the time to launch all that follows."""
    for found in _runs(name):
        places = {place.rpartition(":")[0] for place in found.waits}
        assert places <= ALLOWED_WAITS.keys(), found.waits


def test_missing_gradients_cost_one_wait_for_a_backward() -> None:
    for found in _runs("unused on a rank"):
        waits = sum(n for place, n in found.waits.items() if "comparison.py" in place)
        assert waits <= 1 + 1  # the flags of two units without gradients, and the digest of the last step


def _more_processes_than_devices(rank: int, beyond: bool) -> str:
    local = str(torch.accelerator.device_count() if beyond else rank)
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = local
    try:
        # As in a new process: the program chose no device yet.
        with mock.patch.object(torch.get_device_module("simulated"), "is_initialized", lambda: False):
            fully_shard(nn.Linear(2, 2))
    except ValueError as error:
        return str(error)
    finally:
        os.environ.pop("LOCAL_RANK") if before is None else os.environ.update(LOCAL_RANK=before)
    return f"rank {rank} trains"


def test_more_processes_than_devices() -> None:
    """Red before: "invalid device ordinal", of the driver, on one GPU."""
    ranks = pool(2, backend="nccl")
    assert ranks.run(_more_processes_than_devices, False) == ["rank 0 trains", "rank 1 trains"]
    for text in ranks.run(_more_processes_than_devices, True):
        assert text.startswith("mesh: expected a simulated device for each process of this machine")
        assert "LOCAL_RANK" in text and "--nproc-per-node" in text and 'init_device_mesh("cpu"' in text
