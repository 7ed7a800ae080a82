"""What a program needs of Lightning's module."""

from torch import nn


class LightningModule(nn.Module):
    def configure_model(self) -> None: ...
