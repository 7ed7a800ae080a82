"""transformers' BERT: masked words, a tied decoder with a bias of its own, padding, weight decay by groups."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import BertConfig, BertForMaskedLM


def main():
    config = BertConfig(vocab_size=37, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=32, max_position_embeddings=16)  # fmt: skip
    model = BertForMaskedLM(config)
    for layer in model.bert.encoder.layer:
        fully_shard(layer)
    fully_shard(model)
    no_decay = [p for name, p in model.named_parameters() if "bias" in name or "LayerNorm" in name]
    decay = [p for name, p in model.named_parameters() if "bias" not in name and "LayerNorm" not in name]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": no_decay}], lr=5e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        tokens, kept = torch.randint(4, 37, (3, 10)), torch.ones(3, 10, dtype=torch.long)
        kept[1, 7:] = 0
        masked = torch.rand(3, 10) < 0.3
        masked[:, 0] = True
        loss = model(input_ids=tokens.masked_fill(masked, 3), attention_mask=kept,
                     labels=tokens.masked_fill(~masked, -100)).loss  # fmt: skip
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
