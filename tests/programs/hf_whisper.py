"""transformers' Whisper: spectrograms to text, an encoder with fixed positions, layer drop switched off."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import WhisperConfig, WhisperForConditionalGeneration


def main():
    config = WhisperConfig(vocab_size=51, num_mel_bins=8, d_model=16, encoder_layers=2, decoder_layers=2,
                           encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
                           decoder_ffn_dim=32, max_source_positions=20, max_target_positions=16, pad_token_id=0,
                           bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    for layer in [*model.model.encoder.layers, *model.model.decoder.layers]:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        loss = model(input_features=torch.randn(2, 8, 40), labels=torch.randint(3, 51, (2, 6))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
