"""CLIP: two towers, a learned temperature of no dimension, negatives of all ranks through a differentiable gather."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Gather(torch.autograd.Function):
    """(n, d) of each rank -> (ranks * n, d); a row's gradient is the sum of what all ranks found for it."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 10))
        self.text = nn.Sequential(nn.EmbeddingBag(30, 12), nn.Linear(12, 10))
        self.temperature = nn.Parameter(torch.tensor([2.0]))

    def forward(self, images, texts):
        return F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1), self.temperature.exp()


def main():
    model = CLIP()
    fully_shard(model.image)
    fully_shard(model.text)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    losses = []
    for _ in range(4):
        image, text, scale = model(torch.randn(3, 3, 8, 8), torch.randint(0, 30, (3, 6)))
        images = Gather.apply(image)
        texts = Gather.apply(text)
        own = torch.arange(3) + 3 * rank
        loss = (F.cross_entropy(scale * image @ texts.T, own) + F.cross_entropy(scale * text @ images.T, own)) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.temperature.clamp_(0, 4.6)
        losses.append(loss.item())
    return model, optimizer, losses
