"""transformers' ViT: images to classes, head alone trained at first, then all of it."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import ViTConfig, ViTForImageClassification


def main():
    config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                       image_size=16, patch_size=8, num_labels=5)  # fmt: skip
    model = ViTForImageClassification(config)
    for layer in [m for m in model.modules() if type(m).__name__ == "ViTLayer"]:
        fully_shard(layer)
    fully_shard(model)
    model.vit.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(4):
        if step == 2:
            model.vit.requires_grad_(True)
        loss = model(pixel_values=torch.randn(3, 3, 16, 16), labels=torch.randint(0, 5, (3,))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
