"""Lightning's Trainer: `configure_model`, accumulation, clipping by value, a validation after each epoch."""

import os
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning import LightningModule, Trainer
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # Lightning's own use of torch's pytrees
warnings.filterwarnings("ignore", ".*does not have many workers")


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.losses = []

    def configure_model(self):
        if hasattr(self, "layers"):
            return
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 20), nn.GELU(), nn.Linear(20, 8)) for _ in range(3)))
        for layer in self.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, x, index):
        loss = F.mse_loss(self.layers(x), x.roll(1, 1))
        self.losses.append(loss.item())
        return loss

    def validation_step(self, x, index):
        self.losses.append(F.mse_loss(self.layers(x), x.roll(1, 1)).item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT="1")  # the group is there already
    data = torch.randn(24, 8, generator=torch.Generator().manual_seed(3))
    trainer = Trainer(
        accelerator="cpu", devices=world, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.01,
        gradient_clip_algorithm="value", plugins=[LightningEnvironment()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        strategy=ModelParallelStrategy(world, 1, process_group_backend="gloo"),
    )  # fmt: skip
    net = Net()
    trainer.fit(net, DataLoader(data[:16], batch_size=2), DataLoader(data[16:], batch_size=2))
    return net.layers, trainer.optimizers[0], net.losses
