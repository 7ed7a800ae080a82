"""transformers' Mamba: state-space blocks without attention, in the plain form that runs anywhere."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import MambaConfig, MambaForCausalLM


def main():
    config = MambaConfig(vocab_size=39, hidden_size=12, state_size=4, num_hidden_layers=2, use_cache=False)
    model = MambaForCausalLM(config)
    model.train()
    for layer in model.backbone.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        tokens = torch.randint(0, 39, (2, 6))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
