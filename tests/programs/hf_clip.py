"""transformers' CLIP: two towers and their contrastive loss on the rows of each rank; a temperature without dims."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import CLIPConfig, CLIPModel


def main():
    text = {"vocab_size": 41, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": 12, "eos_token_id": 2, "bos_token_id": 1}  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": 16, "patch_size": 8}  # fmt: skip
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    # A scalar cannot be cut: it becomes a vector of one element, as FSDP2 asks for.
    model.logit_scale = torch.nn.Parameter(model.logit_scale.detach().reshape(1))
    for layer in [m for m in model.modules() if type(m).__name__ == "CLIPEncoderLayer"]:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        tokens = torch.randint(3, 41, (3, 8))
        tokens[:, -1] = 2
        loss = model(input_ids=tokens, pixel_values=torch.randn(3, 3, 16, 16), return_loss=True).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
