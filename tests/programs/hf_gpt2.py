"""transformers' GPT-2: transposed weights (Conv1D), a tied head, dropout, its own gradient checkpointing."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel


def main():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=53, n_positions=16, n_embd=24, n_layer=3, n_head=2))
    model.activation_checkpointing_enable()
    model.train()
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        tokens = torch.randint(0, 53, (2, 10))
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
