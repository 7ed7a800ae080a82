"""CPU offload as beside a device, on a mesh of CPUs: every copy takes place, from host memory to host memory."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from torch import nn

from fullshard.comm import HostLink
from fullshard.engine import unit_of
from fullshard.policy import Offload


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """`CPUOffloadPolicy` is taken at its word on a CPU mesh."""
    module = sys.modules["fullshard.api.fully_shard"]

    def resolve(policy: Any, device_type: str) -> Offload:
        return Offload(to_host="CPUOffload" in type(policy).__name__)

    monkeypatch.setattr(module, "resolve_offload", resolve)


def links(model: nn.Module) -> list[HostLink]:
    """Those of the units of `model` that offload, which count their copies."""
    units = [unit for module in model.modules() if (unit := unit_of(module)) is not None]
    return [unit.host_link for unit in units if unit.host_link is not None]
