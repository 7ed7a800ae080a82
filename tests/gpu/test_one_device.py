"""One accelerator, a world of one: the engine's device paths against plain training on the same device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import fullshard
from tests.harness.implementations import each_case
from tests.harness.models import Case, adamw, assert_same_training, collect, train_reference


@pytest.fixture
def device(tmp_path: Path) -> Iterator[torch.device]:
    """This machine's accelerator, with a default process group of one rank on the backend that belongs to it."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    backend = dist.get_default_backend_for_device(accelerator)
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        yield torch.device(accelerator.type, 0)
    finally:
        dist.destroy_process_group()


@each_case
def test_training_equals_the_plain_model(case: Case, device: torch.device) -> None:
    """A world of one runs the plain model's kernels; on a device, some of them add in no fixed order."""
    steps = [[tuple(t.to(device) for t in case.batch(step))] for step in range(3)]
    expected = train_reference(case.build().to(device), case.loss, steps)
    model = case.shard(case.build(), fullshard.fully_shard)
    assert all(isinstance(p, DTensor) and p.to_local().device == device for p in model.parameters())
    optim = adamw(model.parameters())
    for (batch,) in steps:
        case.loss(model, batch).backward()
        optim.step()
        optim.zero_grad()
    assert_same_training(collect(model, optim), expected, eps_multiple=2 * len(steps))
