"""One accelerator, a world of one: the engine's device paths against plain training on the same device."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

import fullshard
from fullshard.engine import unit_of
from tests.harness.implementations import each_case
from tests.harness.models import Case, adamw, assert_same_training, collect, train_reference


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
    assert_same_training(collect(model, optim), expected)


@each_case
def test_offload_moves_one_copy_each_way(case: Case, device: torch.device) -> None:
    """Shards, gradients and optimizer state on the host, page-locked; per unit and step, uploads are gathers and
    downloads are reductions; the training is that without offload, but for AdamW running on the host."""
    plain = case.shard(case.build(), fullshard.fully_shard)
    offloaded = case.shard(case.build(), fullshard.fully_shard, offload_policy=fullshard.CPUOffloadPolicy())
    optims = [adamw(model.parameters()) for model in (plain, offloaded)]
    units = [unit for module in offloaded.modules() if (unit := unit_of(module)) is not None]
    for step in range(3):
        for model, optim in zip((plain, offloaded), optims, strict=True):
            case.loss(model, tuple(t.to(device) for t in case.batch(step))).backward()
            fullshard.clip_grad_norm_(model.parameters(), 1.0)
            optim.step()
            optim.zero_grad()
    for p, host in zip(plain.parameters(), offloaded.parameters(), strict=True):
        assert isinstance(p, DTensor) and isinstance(host, DTensor)
        assert host.device.type == host.to_local().device.type == "cpu"
        torch.testing.assert_close(host.to_local(), p.to_local().cpu())
    for unit in (unit for unit in units if unit.groups):
        link = unit.host_link
        assert link is not None and all(group.flat.is_pinned() for group in unit.groups)
        assert link.downloads == 3 * sum(any(p.sharded.requires_grad for p in group.params) for group in unit.groups)
        assert 3 * len(unit.groups) <= link.uploads <= 6 * len(unit.groups)
