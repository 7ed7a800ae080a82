"""transformers' Gemma: scaled embeddings tied to the head, norms of (1 + weight), gradients clipped by torch."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import GemmaConfig, GemmaForCausalLM


def main():
    config = GemmaConfig(vocab_size=49, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, head_dim=8)  # fmt: skip
    model = GemmaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        tokens = torch.randint(0, 49, (2, 9))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
