"""Lightning: `ModelParallelStrategy` under Fabric, which asks torch's class whom to tell to hold gradients back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, TORCH, for_each_implementation
from tests.harness.models import (
    BY_NAME,
    adamw,
    assert_same_training,
    collect,
    full_copy,
)
from tests.harness.pool import pool

# Imports of packages take longer than what is tested.
pytestmark = pytest.mark.slow

IMPLEMENTATIONS = {"torch": TORCH, "fullshard": FULLSHARD}
WORLD, STEPS, MICROS = 2, 3, 2
TIMEOUT = 110.0
CASE = BY_NAME["transformer"]


def _fabric(rank: int, impl: str, *, one_file: bool) -> Any:
    """A Fabric on the group that the ranks are in; the strategy shards what it sets up over its mesh."""
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # never asked: the group is there
    from lightning import Fabric
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.fabric.strategies import ModelParallelStrategy

    fully_shard = IMPLEMENTATIONS[impl].fully_shard

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        return CASE.shard(model, lambda module: fully_shard(module, mesh=mesh["data_parallel"]))

    strategy = ModelParallelStrategy(
        parallelize_fn=parallelize,
        data_parallel_size=dist.get_world_size(),
        tensor_parallel_size=1,
        save_distributed_checkpoint=not one_file,
        process_group_backend="gloo",
    )
    fabric = Fabric(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, plugins=[LightningEnvironment()]
    )
    fabric.launch()
    return fabric


def _training(rank: int, impl: str, one_file: bool, folder: str) -> tuple[Any, ...]:
    fabric = _fabric(rank, impl, one_file=one_file)
    model = fabric.setup_module(CASE.build())
    optimizer = fabric.setup_optimizers(adamw(model.parameters()))
    plain = CASE.build()
    whole = adamw(plain.parameters())
    norms, early = [], []
    for step in range(STEPS):
        for micro in range(MICROS):
            with fabric.no_backward_sync(model, enabled=micro < MICROS - 1):
                fabric.backward(CASE.loss(model, CASE.batch(MICROS * step + micro, rank)))
            if micro < MICROS - 1:  # nothing was reduced
                early += [
                    tuple(p.grad.shape) for p in model.parameters() if type(p.grad) is torch.distributed.tensor.DTensor
                ]
            for each in range(dist.get_world_size()):
                (CASE.loss(plain, CASE.batch(MICROS * step + micro, each)) / dist.get_world_size()).backward()
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.1)
        norms.append((full_copy(norm), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)))
        for done in (optimizer, whole):
            done.step()
            done.zero_grad()
    fabric.save(folder, {"model": model, "optimizer": optimizer, "step": STEPS})
    fabric.barrier()
    other = fabric.setup_module(CASE.build(seed=1))
    state = {"model": other, "optimizer": fabric.setup_optimizers(adamw(other.parameters())), "step": 0}
    fabric.load(folder, state)
    before = collect(model.module, optimizer.optimizer)
    after = collect(other.module, state["optimizer"].optimizer)
    return before, collect(plain, whole), norms, early, after, state["step"]


@behaviour(
    "Lightning: `ModelParallelStrategy`, accumulation, clipping, checkpoints in shards or one file", area="packages"
)
@for_each_implementation
@pytest.mark.parametrize("one_file", [False, True], ids=["shards", "one file"])
def test_fabric_trains_and_saves(impl: Any, one_file: bool, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    for before, whole, norms, early, after, step in pool(WORLD).run(
        _training, impl.name, one_file, str(folder), timeout=TIMEOUT
    ):
        assert_same_training(before, whole)
        for norm, plain in norms:
            tolerance.assert_close(norm, plain, what="norm")
        assert early == [] and step == STEPS
        assert_same_training(after, before, 0)
    assert folder.is_file() is one_file
