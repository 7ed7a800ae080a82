"""Lightning's Trainer on fullshard: `fully_shard` in `configure_model`, under Lightning's `ModelParallelStrategy`.

    torchrun --nproc-per-node 2 examples/lightning_trainer.py

Lightning starts the process group, makes the mesh and saves in shards; what is sharded, and how, is said in
`configure_model`. On GPUs leave out `process_group_backend` and `accelerator`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fullshard
from fullshard import fully_shard


class Autoencoder(LightningModule):
    """Learns to give back vectors of 8 numbers that were mapped to 32 dims."""

    def configure_model(self) -> None:
        if hasattr(self, "layers"):
            return  # called before each fit, and before a checkpoint is loaded
        torch.manual_seed(0)  # the same initial values on every rank
        blocks = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))
        self.layers = nn.Sequential(*blocks)
        for block in self.layers:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def loss(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x + 0.1 * torch.randn_like(x)), x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("loss", self.loss(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    torch.manual_seed(0)
    vectors = torch.randn(1024, 8) @ torch.randn(8, 32) / 3
    train, valid = (DataLoader(TensorDataset(part), batch_size=32) for part in (vectors[:896], vectors[896:]))
    module = Autoencoder()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=ModelParallelStrategy(2, 1, process_group_backend="gloo"),  # data parallel, tensor parallel
            max_epochs=8,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, train, valid)
        loss = trainer.callback_metrics["loss"].item()
        folder = trainer.strategy.broadcast(folder)
        trainer.save_checkpoint(Path(folder) / "sharded")  # each rank writes its shards
        if trainer.global_rank == 0:
            print(fullshard.report(module.layers))
            print(f"loss {loss:.4f}, saved: {', '.join(sorted(p.name for p in (Path(folder) / 'sharded').iterdir()))}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
