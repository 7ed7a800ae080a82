"""Skip-gram with negative samples: two embeddings and nothing else, of more rows than are ever seen."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class SkipGram(nn.Module):
    def __init__(self, words=101, width=8):
        super().__init__()
        self.inside, self.outside = nn.Embedding(words, width), nn.Embedding(words, width)

    def forward(self, centre, context, others):
        x = self.inside(centre)
        near = (x * self.outside(context)).sum(1)
        far = (self.outside(others) @ x[..., None]).squeeze(-1)
        return -F.logsigmoid(near).mean() - F.logsigmoid(-far).mean()


def main():
    model = fully_shard(SkipGram())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(5):
        loss = model(torch.randint(0, 30, (6,)), torch.randint(0, 30, (6,)), torch.randint(0, 30, (6, 4)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
