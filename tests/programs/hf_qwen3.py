"""transformers' Qwen3: norms of queries and keys, a sliding window, bf16 computation with float32 masters."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM


def main():
    config = Qwen3Config(vocab_size=47, hidden_size=16, intermediate_size=32, num_hidden_layers=3, head_dim=8,
                         num_attention_heads=2, num_key_value_heads=2, use_sliding_window=True, sliding_window=4,
                         max_window_layers=1)  # fmt: skip
    model = Qwen3ForCausalLM(config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        tokens = torch.randint(0, 47, (2, 10))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
