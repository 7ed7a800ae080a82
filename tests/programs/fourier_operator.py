"""A Fourier neural operator: complex numbers in the middle, real parameters on their two sides."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Spectral(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, modes, 2) / width)
        self.beside, self.modes = nn.Conv1d(width, width, 1), modes

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        kept = torch.einsum("bim,iom->bom", spectrum[..., : self.modes], torch.view_as_complex(self.weight))
        out = torch.zeros_like(spectrum)
        out[..., : self.modes] = kept
        return F.gelu(torch.fft.irfft(out, n=x.shape[-1]) + self.beside(x))


def main():
    model = nn.Sequential(nn.Conv1d(1, 6, 1), *(Spectral(6, 4) for _ in range(3)), nn.Conv1d(6, 1, 1))
    for layer in model[1:4]:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        x = torch.randn(4, 1, 16)
        loss = F.mse_loss(model(x), x.cumsum(-1) / 4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
