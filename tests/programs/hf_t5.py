"""transformers' T5: one embedding of encoder, decoder and head, relative positions that the first blocks pass on."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import T5Config, T5ForConditionalGeneration


def main():
    config = T5Config(vocab_size=43, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.1,
                      decoder_start_token_id=0)  # fmt: skip
    model = T5ForConditionalGeneration(config)
    for block in [*model.encoder.block, *model.decoder.block]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        source, target = torch.randint(2, 43, (2, 9)), torch.randint(2, 43, (2, 6))
        loss = model(input_ids=source, attention_mask=torch.ones_like(source), labels=target).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
