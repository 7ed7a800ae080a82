"""A masked autoencoder: the encoder sees a quarter of the patches, the decoder all; lengths differ by rank."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class MAE(nn.Module):
    def __init__(self, width=16, small=8):
        super().__init__()
        self.embed, self.positions = nn.Linear(12, width), nn.Parameter(torch.randn(1, 16, width) * 0.02)
        layer = nn.TransformerEncoderLayer
        self.encoder = nn.ModuleList(layer(width, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.bridge, self.mask = nn.Linear(width, small), nn.Parameter(torch.zeros(1, 1, small))
        self.decoder = layer(small, 2, 16, 0.0, batch_first=True)
        self.out = nn.Linear(small, 12)

    def forward(self, patches, kept):
        x = (self.embed(patches) + self.positions)[:, kept]
        for block in self.encoder:
            x = block(x)
        whole = self.mask.expand(len(patches), 16, -1).index_copy(1, kept, self.bridge(x))
        return self.out(self.decoder(whole))


def main():
    model = MAE()
    for block in (*model.encoder, model.decoder):
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        patches, order = torch.randn(3, 16, 12), torch.randperm(16)
        kept, hidden = order[: 4 + dist.get_rank()], order[4 + dist.get_rank() :]
        loss = F.mse_loss(model(patches, kept)[:, hidden], patches[:, hidden])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
