"""transformers' wav2vec 2.0: a convolutional front that is frozen, a weight-normed position convolution, a CTC loss."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC


def main():
    config = Wav2Vec2Config(vocab_size=12, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                            intermediate_size=32, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3),
                            num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, layerdrop=0.0,
                            mask_time_prob=0.0, pad_token_id=0, feat_extract_norm="layer")  # fmt: skip
    model = Wav2Vec2ForCTC(config)
    model.freeze_feature_encoder()
    for layer in model.wav2vec2.encoder.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        loss = model(torch.randn(2, 200), labels=torch.randint(1, 12, (2, 5))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
