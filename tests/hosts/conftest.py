"""Tests of simulated hosts are skipped where the kernel or the user cannot have them, with what lacks."""

from __future__ import annotations

import pytest

from tests.harness import hosts


@pytest.fixture(autouse=True, scope="session")
def _hosts_can_be_made() -> None:
    if lacks := hosts.lacking():
        pytest.skip(lacks)
