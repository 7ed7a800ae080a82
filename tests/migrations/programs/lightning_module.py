"""A module of Lightning (a stand-in) that wraps its layers itself."""
import torch
from lightning_standin import LightningModule
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import enable_wrap, wrap


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def configure_model(self):
        with enable_wrap(wrapper_cls=FSDP, use_orig_params=True):
            self.first = wrap(self.first)
            self.second = wrap(self.second)

    def training_step(self, batch, batch_idx):
        return self.second(self.first(batch).tanh()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main():
    torch.manual_seed(0)
    net = Net()
    net.configure_model()
    optimizer = net.configure_optimizers()
    torch.manual_seed(torch.distributed.get_rank())
    for i in range(2):
        net.training_step(torch.randn(4, 4), i).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.first.state_dict(), net.second.state_dict()
