"""Prompt tuning: a few vectors before the input are all that is trained, in the root of a frozen model."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Prompted(nn.Module):
    def __init__(self, prompts=5, width=12):
        super().__init__()
        self.embedding = nn.Embedding(23, width)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 24, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(width, 23)
        self.requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(prompts, width))

    def forward(self, tokens):
        x = torch.cat([self.prompt.expand(len(tokens), -1, -1), self.embedding(tokens)], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, len(self.prompt) :])


def main():
    model = Prompted()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW([model.prompt], lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        tokens = torch.randint(0, 23, (3, 6))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
