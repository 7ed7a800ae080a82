"""The names that torch has for NCCL, and their two classes: "nccl", and from 2.14 on "nccl2", "nccl-lazy",
"nccl-legacy". Over each of them messages travel over data groups, with limits of the watch and a cut."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import lifetimes
from tests.harness.lifetime_faults import LIFETIMES
from tests.harness.pool import pool
from tests.harness.seeded_faults import seeded

NAMES = ("nccl", "nccl2", "nccl-lazy", "nccl-legacy")


# "nccl2" and "nccl-lazy" run in tests/device/test_lifetimes.py, beside their faults.
@pytest.mark.parametrize(
    "name", [name if name == "nccl-legacy" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_messages_are_the_same_over_each_name(name: str) -> None:
    """As many, in as few launches, over data groups of one kind."""
    assert pool(2, backend=name).run(lifetimes.named) == ["", ""]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:]])
def test_a_cut_and_a_load(name: str) -> None:
    assert pool(2, backend=name).run(lifetimes.cuts) == ["", ""]


@pytest.mark.slow  # with "nccl2" in tests/device/test_lifetimes.py too
@pytest.mark.parametrize("name", ["nccl2", "nccl-lazy"])
def test_no_group_connects_on_another_device_than_the_models(name: str) -> None:
    """LOCAL_RANK names another device, and the user's group is on it, as torch binds it."""
    assert pool(4, backend=name).run(lifetimes.elsewhere, timeout=40) == [""] * 4


def _over_the_other_class(rank: int, program: Any, *args: Any) -> str:
    with seeded(LIFETIMES["data groups are of the other class"].fault):
        return str(program(rank, *args))


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(lifetimes.cuts),
        pytest.param(lifetimes.direct, marks=pytest.mark.slow),
        pytest.param(lifetimes.closes, marks=pytest.mark.slow),
        pytest.param(lifetimes.dies_connecting, marks=pytest.mark.slow),
        pytest.param(lifetimes.goes_on, marks=pytest.mark.slow),
        pytest.param(lifetimes.holds_nothing, marks=pytest.mark.slow),
    ],
    ids=lambda program: program.__name__,
)
def test_data_groups_of_the_other_class_would_do(program: Any) -> None:
    """Waits that raise after an abort, an error that an abort leaves, launches one by one: fullshard bears them."""
    assert pool(2, backend="nccl2").run(_over_the_other_class, program) == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_errors_of_the_other_class(late: bool) -> None:
    assert pool(2, backend="nccl2").run(_over_the_other_class, lifetimes.breaks, late) == ["", ""]
