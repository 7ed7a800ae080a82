"""transformers' Qwen2: biased projections, a tied head, prompts masked out of the loss, an evaluation by `generate`."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM


def main():
    config = Qwen2Config(vocab_size=47, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
                         bos_token_id=1, eos_token_id=None, pad_token_id=0)  # fmt: skip
    model = Qwen2ForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        tokens = torch.randint(3, 47, (2, 10))
        labels = tokens.clone()
        labels[:, :4] = -100
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    written = model.generate(tokens[:, :4], attention_mask=torch.ones(2, 4, dtype=torch.long), max_new_tokens=5,
                             do_sample=False)  # fmt: skip
    return model, optimizer, losses, written
