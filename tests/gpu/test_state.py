"""State on one accelerator: full parameters and loading, with shards on the device and on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import fullshard
from tests.harness.models import BY_NAME


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("to_cpu", [False, True])
def test_full_parameters_are_where_they_were_asked_for(offloaded: bool, to_cpu: bool, device: torch.device) -> None:
    case = BY_NAME["tied"]
    options: dict[str, Any] = {"offload_policy": fullshard.CPUOffloadPolicy()} if offloaded else {}
    model, plain = case.shard(case.build(), fullshard.fully_shard, **options), case.build()
    home = torch.device("cpu") if offloaded else device
    batch = tuple(t.to(device) for t in case.batch(0))
    for assign in (False, True):
        with fullshard.full_params(model, writeback=True, offload_to_cpu=to_cpu), torch.no_grad():
            for p in model.parameters():
                assert p.device == (torch.device("cpu") if to_cpu else device)
                p.mul_(2)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(p, DTensor) and p.to_local().device == home
            assert torch.equal(p.to_local().cpu(), 2 * q)
        case.loss(model, batch).backward()
        model.load_state_dict(plain.state_dict(), assign=assign)  # plain tensors on the host
        assert all(isinstance(p, DTensor) and p.to_local().device == home for p in model.parameters())
        case.loss(model, batch).backward()
        model.zero_grad()
    report = fullshard.report(model)
    assert report.measured.parameters == report.expected.parameters
