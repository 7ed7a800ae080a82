"""A reward model: the score of the last token that is no padding, pairs of answers in one batch, a log-sigmoid loss."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class RewardModel(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embedding = nn.Embedding(21, width, padding_idx=0)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 24, 0.0, batch_first=True) for _ in range(2))
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, tokens):
        padding = tokens == 0
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        last = (~padding).sum(1) - 1
        return self.score(x[torch.arange(len(x)), last]).squeeze(-1)


def main():
    model = RewardModel()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        tokens = torch.randint(1, 21, (6, 7))
        for row, length in enumerate(torch.randint(3, 8, (6,)).tolist()):
            tokens[row, length:] = 0
        better, worse = model(tokens).chunk(2)
        loss = -F.logsigmoid(better - worse).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
