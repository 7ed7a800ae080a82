"""Full state dicts of shards on the host, where only the device sends, as NCCL alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.harness.on_device import Setup, case_of
from tests.harness.pool import pool

CASE = case_of(Setup())


def _prepared(rank: int, folder: str) -> list[dict[str, torch.Tensor]]:
    from fullshard import checkpoint, prepare_fully_shard
    from fullshard.checkpoint.formats import export_full

    config = {"wrap": "children", "cpu_offload": True, "state_dict": {"kind": "full"}}
    prepared = prepare_fully_shard(CASE.build().to("simulated"), None, config, show=False)
    assert {p.device.type for p in prepared.model.parameters()} == {"cpu"}
    state = prepared.state_dict()
    export_full(checkpoint.get_state_dict(prepared.model)[0], f"{folder}/whole.pt", "torch")
    return [state, torch.load(f"{folder}/whole.pt") if rank == 0 else {}]


def _wrapped(rank: int, folder: str) -> list[dict[str, torch.Tensor]]:
    from fullshard.compat.fsdp1 import CPUOffload, FullyShardedDataParallel

    model: Any = FullyShardedDataParallel(CASE.build().to("simulated"), cpu_offload=CPUOffload(offload_params=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    CASE.loss(model, tuple(part.to("simulated") for part in CASE.batch(0, rank))).backward()  # type: ignore[arg-type]
    optimizer.step()
    own, state = model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    assert {name: entries["momentum_buffer"].shape for name, entries in state.items()} == {
        name: value.shape for name, value in CASE.build().named_parameters()
    }
    return [own]


@pytest.mark.sample(1)
@pytest.mark.parametrize("job", [_prepared, _wrapped])
def test_a_full_state_dict_of_shards_on_the_host(job: Any, tmp_path: Any) -> None:
    expected = CASE.build().state_dict()
    for rank, dicts in enumerate(pool(2, backend="simulated:nccl").run(job, str(tmp_path))):
        for number, found in enumerate(dicts):
            assert found.keys() == (expected.keys() if not number or not rank else set())
            assert all(value.device.type == "cpu" and torch.equal(value, expected[n]) for n, value in found.items())
