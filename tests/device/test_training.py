"""Every strategy on the device "pretend": its numbers, the order of all accesses, and what the host waits for."""

from __future__ import annotations

import pytest

from tests.harness import on_device
from tests.harness.models import assert_close_to_tensor_max
from tests.harness.on_device import Setup

SETUPS = {
    "ZeRO-3": Setup(),
    "ZeRO-2": Setup(reshard=False),
    "transformer": Setup("transformer"),
    "offload": Setup(offload=True),
    "recomputation": Setup("transformer", recompute=True),
    "micro-batches": Setup(micro=2),
    "clip": Setup(clip=0.1),
    "large parameters": Setup("wide"),
    "uneven": Setup("uneven_mlp"),
    "frozen": Setup("frozen"),
    "one unit": Setup("one_unit"),
    "one collective each": Setup(calls=(("set_communication", "torch"),)),
}
WIDER = {
    "HSDP": Setup(replicas=2),
    "hpZ": Setup(reshard=2),
    "HSDP, micro-batches": Setup("transformer", replicas=2, micro=2),
}


@pytest.mark.parametrize("name", SETUPS)
def test_every_access_is_ordered_and_the_numbers_are_plain_training_s(name: str) -> None:
    _check(SETUPS[name], 2)


@pytest.mark.parametrize("name", WIDER)
def test_strategies_of_four_ranks(name: str) -> None:
    _check(WIDER[name], 4)


def _check(setup: Setup, world: int) -> None:
    expected = on_device.reference(setup, world)
    for found in on_device.run(setup, world=world):
        found.check()
        for name, values in found.params.items():
            # Three AdamW steps, each of two roundings at the size of the largest element, and the sums of gradients.
            assert_close_to_tensor_max(values, expected[name], 12)
