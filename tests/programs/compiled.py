"""Each block is compiled before it is sharded, as torchtitan does; the model around them is not."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 30), nn.Linear(30, 12)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main():
    model = nn.Sequential(*(Block() for _ in range(2)), nn.Linear(12, 4))
    for block in model[:2]:
        block.compile(backend="aot_eager")
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(torch.randn(5, 12)), torch.randint(0, 4, (5,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
