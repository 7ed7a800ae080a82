"""Activation checkpointing of each block by torch's wrapper, with dropout whose random numbers come again."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, dropout=0.1, batch_first=True)
        self.norm, self.mlp = nn.LayerNorm(12), nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 12))

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + F.dropout(self.mlp(x), 0.2, self.training)


def main():
    model = nn.Sequential(nn.Embedding(19, 12), *(Block() for _ in range(3)), nn.Linear(12, 19))
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda m: checkpoint_wrapper(m, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
        check_fn=lambda m: isinstance(m, Block),
    )
    for block in model[1:4]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        tokens = torch.randint(0, 19, (3, 7))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
