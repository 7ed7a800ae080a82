"""Early exits: a head after every block, losses weighed; an evaluation that leaves where it is sure."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Exits(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 10), nn.ReLU()) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(10, 4) for _ in range(3))

    def forward(self, x, sure=None):
        found = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            found.append(head(x))
            if sure is not None:
                score = found[-1].softmax(-1).max(-1).values.min()
                dist.all_reduce(score, op=dist.ReduceOp.MIN)  # all ranks leave together
                if score > sure:
                    break
        return found


def main():
    model = Exits()
    for block, head in zip(model.blocks, model.heads, strict=True):
        fully_shard([block, head])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(4):
        label = torch.randint(0, 4, (5,))
        found = model(torch.randn(5, 10))
        loss = sum((i + 1) / 6 * F.cross_entropy(logits, label) for i, logits in enumerate(found))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [loss.item(), len(model(torch.randn(2, 10), sure=0.2 + 0.1 * step))]
    return model, optimizer, losses
