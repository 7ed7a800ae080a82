"""Group relative policy optimization: answers are sampled by the sharded model, token by token, then learned from."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Policy(nn.Module):
    def __init__(self, vocabulary=13, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mix = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.mix:
            x = x + layer(x)[0]
        return self.head(x).log_softmax(-1)


def main():
    model = Policy()
    for layer in model.mix:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        model.eval()
        tokens = torch.randint(0, 13, (1, 2)).repeat(6, 1)
        with torch.no_grad():
            for _ in range(4):
                tokens = torch.cat([tokens, torch.multinomial(model(tokens)[:, -1].exp(), 1)], dim=1)
            before = model(tokens)[:, 1:-1].gather(-1, tokens[:, 2:, None])
        reward = (tokens[:, 2:] % 2 == 0).to(before.dtype).mean(1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
        model.train()
        for _ in range(2):
            chance = model(tokens)[:, 1:-1].gather(-1, tokens[:, 2:, None])
            ratio = (chance - before).exp().squeeze(-1)
            gain = torch.minimum(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None])
            optimizer.zero_grad()
            (-gain.mean()).backward()
            optimizer.step()
        losses.append(reward.mean().item())
    return model, optimizer, losses
