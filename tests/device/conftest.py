"""Compiles the device once, before the processes of the pool load it."""

from __future__ import annotations

import pytest

from tests.harness import simulated


@pytest.fixture(scope="session", autouse=True)
def _device() -> None:
    simulated.build()
