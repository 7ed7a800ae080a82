"""A Wasserstein GAN with a penalty on the critic's gradient: a backward through a backward, critic frozen in turn."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def mlp(*sizes):
    layers = [nn.Sequential(nn.Linear(a, b), nn.Softplus()) for a, b in zip(sizes, sizes[1:], strict=False)]
    return nn.Sequential(*layers[:-1], nn.Linear(sizes[-2], sizes[-1]))


def main():
    generator, critic = mlp(4, 24, 24, 10), mlp(10, 24, 24, 1)
    for model in (generator, critic):
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    of_g = torch.optim.RMSprop(generator.parameters(), lr=5e-3)
    of_c = torch.optim.RMSprop(critic.parameters(), lr=5e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        for _ in range(2):
            with torch.no_grad():
                fake = generator(torch.randn(6, 4))
            real, mix = torch.randn(6, 10), torch.rand(6, 1)
            between = (mix * real + (1 - mix) * fake).requires_grad_(True)
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            loss = critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
            of_c.zero_grad()
            loss.backward()
            of_c.step()
            losses.append(loss.item())
        critic.requires_grad_(False)
        loss = -critic(generator(torch.randn(6, 4))).mean()
        of_g.zero_grad()
        loss.backward()
        of_g.step()
        critic.requires_grad_(True)
        losses.append(loss.item())
    return generator, critic, of_g, of_c, losses
