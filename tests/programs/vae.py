"""A variational autoencoder: encoder and decoder are units, called by a method of the model; a weight that grows."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 6))
        self.decoder = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 20))
        self.scale = nn.Parameter(torch.zeros(20))

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decode(z), mean, log_variance

    def decode(self, z):
        return self.decoder(z) * self.scale.exp()


def main():
    model = VAE()
    fully_shard(model.encoder)
    fully_shard(model.decoder)
    fully_shard(model)
    register_fsdp_forward_method(model, "decode")
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(4):
        x = torch.randn(6, 20)
        found, mean, log_variance = model(x)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        loss = F.mse_loss(found, x) + 0.1 * step * divergence
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        samples = model.decode(torch.randn(2, 3))
    return model, optimizer, losses, samples
