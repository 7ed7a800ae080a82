"""One optimizer for each parameter, which steps in a hook as soon as the gradient is there, and frees it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizers = {p: torch.optim.Adam([p], lr=1e-2) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        x = torch.randn(5, 9)
        loss = F.mse_loss(model(x), x.flip(1))
        loss.backward()
        losses.append(loss.item())
    return model, list(optimizers.values()), losses
