"""transformers' BART: encoder and decoder with one embedding and a scaled head, label smoothing of one's own."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from transformers import BartConfig, BartForConditionalGeneration


def main():
    config = BartConfig(vocab_size=45, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
                        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
                        max_position_embeddings=20)  # fmt: skip
    model = BartForConditionalGeneration(config)
    for layer in [*model.model.encoder.layers, *model.model.decoder.layers]:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        source, target = torch.randint(4, 45, (2, 9)), torch.randint(4, 45, (2, 7))
        logits = model(input_ids=source, decoder_input_ids=target[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
