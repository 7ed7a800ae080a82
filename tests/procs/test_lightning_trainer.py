"""Lightning's Trainer under `ModelParallelStrategy`: `configure_model` shards over the mesh that the strategy makes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, TORCH, for_each_implementation
from tests.harness.models import BY_NAME, Trained, adamw, assert_same_training, collect, seeded
from tests.harness.packages import Poisoned
from tests.harness.pool import pool

# Imports of packages take longer than what is tested.
pytestmark = pytest.mark.slow

IMPLEMENTATIONS = {"torch": TORCH, "fullshard": FULLSHARD}
WORLD, STEPS, MICROS = 2, 3, 2
TIMEOUT = 110.0
CASE = BY_NAME["transformer"]


def _trainer(rank: int, *, one_file: bool = True, plugins: tuple[Any, ...] = (), **options: Any) -> Any:
    """A Trainer on the group that the ranks are in, without what it writes and draws by itself."""
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # never asked: the group is there
    # Lightning asks torch's pytrees in a way that torch has deprecated.
    warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
    from lightning import Trainer
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(
        data_parallel_size=dist.get_world_size(),
        tensor_parallel_size=1,
        save_distributed_checkpoint=not one_file,
        process_group_backend="gloo",
    )
    return Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        plugins=[LightningEnvironment(), *plugins],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def _module(impl: str, seed: int) -> Any:
    """A LightningModule that is built and sharded in `configure_model`, which Lightning calls for each `fit`."""
    from lightning import LightningModule

    fully_shard = IMPLEMENTATIONS[impl].fully_shard

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = None

        def configure_model(self) -> None:
            if self.net is None:
                self.net = CASE.build(seed)
                CASE.shard(self.net, lambda module: fully_shard(module, mesh=self.device_mesh["data_parallel"]))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return CASE.loss(self.net, batch)

        def validation_step(self, batch: Any, index: int) -> None:
            assert not torch.is_grad_enabled() and not self.net.training
            self.log("seen", CASE.loss(self.net, batch), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.parameters())

    return Module()


class _Loader:
    """Batches; a list would be as many loaders to Lightning."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def _batches(epoch: int, rank: int) -> list[Any]:
    return [CASE.batch(STEPS * MICROS * epoch + number, rank) for number in range(STEPS * MICROS)]


def plain(epochs: int, world: int) -> tuple[Trained, list[float]]:
    """One process: accumulation of two batches, clipping, AdamW; and the validation losses after each epoch."""
    model = CASE.build()
    optimizer = adamw(model.parameters())
    seen = []
    for epoch in range(epochs):
        for number in range(STEPS * MICROS):
            for rank in range(world):
                (CASE.loss(model, _batches(epoch, rank)[number]) / world / MICROS).backward()
            if number % MICROS == MICROS - 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            seen.append(sum(CASE.loss(model, CASE.batch(99, rank)).item() for rank in range(world)) / world)
    return collect(model, optimizer), seen


def _fit(rank: int, impl: str, one_file: bool, folder: str) -> list[Any]:
    """An epoch, a checkpoint, and another epoch from it by a second Trainer with a model of other values."""
    found = []
    options = {"accumulate_grad_batches": MICROS, "gradient_clip_val": 0.1, "default_root_dir": folder}
    checkpoint = os.path.join(folder, "checkpoint")
    for epoch in range(2):
        trainer = _trainer(rank, one_file=one_file, max_epochs=epoch + 1, **options)
        module = _module(impl, seed=epoch)
        loaders = _Loader(_batches(epoch, rank)), _Loader([CASE.batch(99, rank)])
        trainer.fit(module, *loaders, ckpt_path=checkpoint if epoch else None)
        assert trainer.global_step == STEPS * (epoch + 1)
        assert isinstance(module.net, IMPLEMENTATIONS[impl].FSDPModule)
        module.net.reshard()  # torch's root is full after the validation
        found.append((collect(module.net, trainer.optimizers[0]), trainer.callback_metrics["seen"].item()))
        if not epoch:
            trainer.save_checkpoint(checkpoint)
            torch.distributed.barrier()
    return found


@behaviour(
    "Lightning: the Trainer: accumulation, clipping, validation, a resume from shards or one file",
    area="packages",
)
@for_each_implementation
@pytest.mark.parametrize("one_file", [False, True], ids=["shards", "one file"])
def test_the_trainer_trains_and_resumes(impl: Any, one_file: bool, tmp_path: Path) -> None:
    ranks = pool(WORLD).run(_fit, impl.name, one_file, str(tmp_path), timeout=TIMEOUT)
    for epochs in (1, 2):
        expected, seen = plain(epochs, WORLD)
        for found in ranks:
            assert_same_training(found[epochs - 1][0], expected)
            assert found[epochs - 1][1] == pytest.approx(seen[-1], rel=tolerance.figure(steps=epochs * STEPS))
    assert (tmp_path / "checkpoint").is_file() is one_file


# ---- float16 with a scaler -------------------------------------------------------------------------------------


def _inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def _scaled(rank: int, impl: str, scaler_class: type[torch.amp.GradScaler]) -> tuple[Trained, float]:
    from lightning import LightningModule
    from lightning.pytorch.plugins.precision import MixedPrecision

    fully_shard = IMPLEMENTATIONS[impl].fully_shard

    class Module(LightningModule):
        def configure_model(self) -> None:
            self.net: Any = seeded(Poisoned)
            fully_shard(self.net.linear, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            self.net.poisoned = index == 1
            output = self.net(batch)
            assert output.dtype == torch.float16
            return output.float().square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _sgd(self)

    scaler = scaler_class(device="cpu", init_scale=1024.0)
    precision = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    trainer = _trainer(rank, plugins=(precision,), max_epochs=1, gradient_clip_val=0.5)
    module = Module()
    trainer.fit(module, _Loader([_inputs(step, rank) for step in range(STEPS)]))
    return collect(module.net, trainer.optimizers[0]), scaler.get_scale()


@behaviour("Lightning: float16 with a GradScaler: a step that overflows on one rank is skipped by all", area="packages")
@for_each_implementation
def test_all_ranks_skip_a_step_that_overflowed(impl: Any) -> None:
    plain = seeded(Poisoned)
    # Products of float16, whose rounding depends on the rows that a rank has.
    optimizer = tolerance.watch(_sgd(plain), dtype=torch.float16)
    for step in (0, 2):
        for rank in range(WORLD):
            with torch.autocast("cpu", dtype=torch.float16):
                output = plain(_inputs(step, rank))
            (output.float().square().mean() / WORLD).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    expected = collect(plain, optimizer)
    for scaler in {torch.amp.GradScaler, getattr(impl.namespace, "GradScaler", torch.amp.GradScaler)}:
        for trained, scale in pool(WORLD).run(_scaled, impl.name, scaler, timeout=TIMEOUT):
            assert_same_training(trained, expected)
            assert scale == 512.0
