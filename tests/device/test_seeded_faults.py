"""The tier sees: every seeded fault of the executor and the channels is found, and nothing where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.harness import lifetime_faults, on_device
from tests.harness.errors import RanksFailed
from tests.harness.models import assert_close_to_tensor_max
from tests.harness.on_device import Found, Setup
from tests.harness.pool import pool
from tests.harness.seeded_faults import FAULTS, PROVEN, SeededFault, seeded, source_of

# Enough for what is compared a step later.
STEPS = 2


def _train(rank: int, setup: Setup, name: str) -> Found | str:
    try:
        if not name:
            return on_device.train(rank, setup)
        with seeded(FAULTS[name]):
            return on_device.train(rank, setup)
    except (RuntimeError, AssertionError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def _noticed(found: Found | str, setup: Setup, world: int) -> str:
    """How the fault shows on this rank; empty if it does not."""
    if isinstance(found, str):
        return found
    try:
        found.check()
        for name, expected in on_device.reference(setup, world).items():
            if setup.dtype:  # plain training in float32 is no reference for it
                assert found.params[name].isfinite().all(), name
            else:
                assert_close_to_tensor_max(found.params[name], expected, 12, name)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name",
    # "a fault, in another setup" runs in `make test-full`.
    [name if ", " not in name else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS],
)
def test_a_seeded_fault_is_found(name: str) -> None:
    fault = FAULTS[name]
    setup = replace(fault.setup, steps=STEPS)
    try:
        results = pool(fault.world, backend="nccl").run(_train, setup, name, seed=setup.seed, timeout=30)
    except RanksFailed as failed:
        # A rank that reads what did not arrive may also see facts that differ: it asks its peers, who still wait for
        # the messages of the step that it left out. Only a fault does that: the sound engine trains in this pool below.
        assert " hung" in str(failed)
        return
    assert any(_noticed(found, setup, fault.world) for found in results)


# Most setups are those of test_training.py.
@pytest.mark.slow
@pytest.mark.parametrize("setup, world", sorted({(f.setup, f.world) for f in FAULTS.values()}, key=repr), ids=repr)
def test_the_sound_engine_shows_nothing(setup: Setup, world: int) -> None:
    setup = replace(setup, steps=STEPS)
    for found in pool(world, backend="nccl").run(_train, setup, "", seed=setup.seed, timeout=30):
        assert _noticed(found, setup, world) == ""


def test_there_are_sixty() -> None:
    assert len(FAULTS) >= 60


def test_every_fault_finds_the_text_that_it_changes() -> None:
    """Also those that only `make test-full` runs."""
    every: list[object] = [*FAULTS.values(), *(case.fault for case in PROVEN.values())]
    every += [one for fault in lifetime_faults.LIFETIMES.values() for one in fault]
    found = [fault for fault in every if isinstance(fault, SeededFault)]
    assert len(found) >= 100
    for fault in found:
        source_of(fault)
