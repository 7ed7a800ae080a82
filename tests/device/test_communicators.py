"""How many communicators a training step opens on the device, beside those of FSDP2; `report` names them.

NCCL makes the communicator of a process group with its first message, and each takes memory of the device. The data
groups of fullshard take the place of the mesh's own groups, which stay without a message, so without one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.on_device import Setup, case_of, sharded
from tests.harness.pool import pool

# What is done, and the purposes of the communicators of fullshard.
CASES = {
    "ZeRO-3": (Setup(), ["data"]),
    "clip": (Setup(clip=1.0), ["data", "small"]),
    "HSDP": (Setup(replicas=2), ["data", "data"]),
    "HSDP, clip": (Setup(replicas=2, clip=1.0), ["data", "data", "small"]),
    # FSDP2 makes groups for each module.
    "hpZ": (Setup(reshard=2), ["block", "data"]),
}


@pytest.mark.parametrize("name", CASES)
def test_at_most_one_communicator_more_than_fsdp2(name: str) -> None:
    setup, purposes = CASES[name]
    groups = pool(4, backend="late")
    for (used, told), (used_by_fsdp2, _) in zip(
        groups.run(_train, setup, "fullshard"), groups.run(_train, setup, "torch"), strict=True
    ):
        assert told == purposes and used == len(purposes)
        # One more for small messages on the device, as of `clip_grad_norm_`, and none without them.
        assert used <= used_by_fsdp2 + bool(setup.clip)


def _train(rank: int, setup: Setup, library: str) -> tuple[int, list[str]]:
    import fullshard
    from tests.harness import late, pretend

    before, told = late.LateGroup.used, []
    device, case = torch.device("pretend", 0), case_of(setup)
    clip = fullshard.clip_grad_norm_ if library == "fullshard" else nn.utils.clip_grad_norm_
    with pretend.watched():
        model: Any = sharded(case.build().to(device), setup, library)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(3):
            case.loss(model, tuple(part.to(device) for part in case.batch(step, rank))).backward()
            if setup.clip:
                clip(model.parameters(), setup.clip)
            optimizer.step()
            optimizer.zero_grad()
        if library == "fullshard":
            told = [term.name.split('"')[1] for term in fullshard.report(model).communicators]
    return late.LateGroup.used - before, sorted(told)
