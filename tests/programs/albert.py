"""ALBERT: one block applied at every depth, a factorised embedding, masked words."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Albert(nn.Module):
    def __init__(self, vocabulary=27, small=6, width=16, depth=4):
        super().__init__()
        self.words, self.up = nn.Embedding(vocabulary, small), nn.Linear(small, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, 0.0, "gelu", batch_first=True)
        self.down, self.bias = nn.Linear(width, small), nn.Parameter(torch.zeros(vocabulary))
        self.depth = depth

    def forward(self, tokens):
        x = self.up(self.words(tokens))
        for _ in range(self.depth):
            x = self.block(x)
        return self.down(x) @ self.words.weight.T + self.bias


def main():
    model = Albert()
    fully_shard(model.block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        tokens = torch.randint(1, 27, (3, 9))
        masked = torch.rand(3, 9) < 0.3
        masked[:, 0] = True
        logits = model(tokens.masked_fill(masked, 0))
        loss = F.cross_entropy(logits[masked], tokens[masked])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
