"""What a program needs of Composer's model."""

from torch import nn


class ComposerModel(nn.Module):
    def loss(self, outputs: object, batch: object) -> object: ...
