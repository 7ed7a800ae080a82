"""transformers' Llama: grouped queries, accumulation of two micro-batches, its own cosine schedule."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup


def main():
    config = LlamaConfig(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, 4)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            tokens = torch.randint(0, 61, (2, 9))
            loss = model(input_ids=tokens, labels=tokens).loss / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model, optimizer, losses
