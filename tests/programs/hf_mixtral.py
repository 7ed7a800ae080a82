"""transformers' Mixtral: experts of which two run for each token, with the loss that balances them."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import MixtralConfig, MixtralForCausalLM


def main():
    config = MixtralConfig(vocab_size=41, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                           num_attention_heads=2, num_key_value_heads=1, num_local_experts=4,
                           output_router_logits=True)  # fmt: skip
    model = MixtralForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        tokens = torch.randint(0, 41, (2, 8))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
