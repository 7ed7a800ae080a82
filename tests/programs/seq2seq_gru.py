"""An encoder and a decoder of GRU cells with attention; the decoder runs token by token, teacher forced."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Decoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.cell = nn.GRUCell(2 * width, width)
        self.query = nn.Linear(width, width, bias=False)

    def forward(self, x, state, memory):
        weights = torch.softmax((memory @ self.query(state)[..., None]).squeeze(-1), dim=1)
        context = (weights[..., None] * memory).sum(1)
        return self.cell(torch.cat([x, context], dim=-1), state)


class Translator(nn.Module):
    def __init__(self, vocabulary=23, width=16):
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.encoder = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.decoder = Decoder(width)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, source, target):
        memory, _ = self.encoder(self.source(source))
        state, loss = memory.mean(1), 0.0
        for i in range(target.shape[1] - 1):
            state = self.decoder(self.target(target[:, i]), state, memory)
            loss = loss + F.cross_entropy(self.out(state), target[:, i + 1])
        return loss / (target.shape[1] - 1)


def main():
    model = Translator()
    fully_shard(model.encoder)
    fully_shard(model.decoder)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(3):
        source = torch.randint(0, 23, (3, 5 + step))
        loss = model(source, source.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
