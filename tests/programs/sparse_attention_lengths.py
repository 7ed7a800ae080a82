"""Packed sequences: another number of tokens on each rank and step, a loss that is divided by the tokens of all."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Model(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.embedding = nn.Embedding(29, width)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 3, 24, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(width, 29)

    def forward(self, tokens, documents):
        apart = documents[:, None] != documents[None]
        x = self.embedding(tokens)[None]
        for layer in self.layers:
            x = layer(x, src_mask=apart)
        return self.head(x[0])


def main():
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(4):
        lengths = torch.randint(2, 6, (2 + step + dist.get_rank(),))
        documents = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        tokens = torch.randint(0, 29, (len(documents),))
        everywhere = torch.tensor(float(len(tokens)))
        dist.all_reduce(everywhere)
        total = F.cross_entropy(model(tokens, documents), tokens, reduction="sum")
        loss = total * dist.get_world_size() / everywhere  # gradients are averaged over ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
