"""`fullshard verify` and the faults of `tests/harness/planted_faults.py`, which came before what finds them."""

from __future__ import annotations

import pytest

from tests.harness.planted_faults import PLACES, PLANTED, Planted
from tests.harness.seeded_faults import PROVEN, source_of


def test_the_registry() -> None:
    assert len(PLANTED) >= 40 and not set(PLANTED) & set(PROVEN)
    assert sum(fault.new for fault in PLANTED.values()) >= 30
    assert {fault.place for fault in PLANTED.values()} == set(PLACES)


@pytest.mark.parametrize("fault", PLANTED.values(), ids=PLANTED)
def test_what_a_fault_changes_is_there(fault: Planted) -> None:
    for each in fault.faults:
        assert source_of(each)
