"""A character model of two LSTM layers with a hidden state that continues from chunk to chunk (truncated backward)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class CharRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(31, 16)
        self.rnn = nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, 31)

    def forward(self, tokens, state=None):
        out, state = self.rnn(self.embedding(tokens), state)
        return self.head(out), state


def main():
    model = CharRNN()
    fully_shard(model.rnn)
    fully_shard(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    text = torch.randint(0, 31, (3, 41))
    state, losses = None, []
    for start in range(0, 40, 8):
        logits, state = model(text[:, start : start + 8], state)
        state = tuple(s.detach() for s in state)
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, start + 1 : start + 9].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses, state
