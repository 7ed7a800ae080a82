"""A GAN: two models and two optimizers in turn; the discriminator's gradients of the generator's step are dropped."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


def make_generator():
    return nn.Sequential(
        nn.ConvTranspose2d(6, 12, 4, 1, 0), nn.BatchNorm2d(12), nn.ReLU(),
        nn.ConvTranspose2d(12, 5, 4, 2, 1), nn.BatchNorm2d(5), nn.ReLU(),
        nn.ConvTranspose2d(5, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def make_discriminator():
    return nn.Sequential(
        nn.Conv2d(1, 6, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(6, 9, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(9 * 16, 1),
    )  # fmt: skip


def main():
    generator, discriminator = make_generator(), make_discriminator()
    for model in (generator, discriminator):
        for layer in model:
            if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
                fully_shard(layer)
        fully_shard(model)
    of_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    of_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    torch.manual_seed(1 + dist.get_rank())
    losses, one, zero = [], torch.ones(4, 1), torch.zeros(4, 1)
    for _ in range(3):
        fake = generator(torch.randn(4, 6, 1, 1))
        loss = F.binary_cross_entropy_with_logits(discriminator(torch.randn(4, 1, 16, 16)), one)
        loss = loss + F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zero)
        of_d.zero_grad()
        loss.backward()
        of_d.step()
        losses.append(loss.item())
        loss = F.binary_cross_entropy_with_logits(discriminator(fake), one)
        of_g.zero_grad()
        loss.backward()
        of_g.step()
        losses.append(loss.item())
    return generator, discriminator, of_g, of_d, losses
