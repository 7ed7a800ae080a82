"""Sharpness-aware minimization: weights move along their gradient, each parameter by its own norm, for a second one."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class ASAM(torch.optim.Optimizer):
    """Steps of a base optimizer at weights that moved to where the loss is higher (scale-invariant: by |w|)."""

    def __init__(self, parameters, base, rho, **options):
        super().__init__(parameters, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)

    @torch.no_grad()
    def ascend(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    by = group["rho"] * p.abs() * p.grad.sign()
                    p.add_(by)
                    self.base.state[p]["by"] = by
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.base.state[p].pop("by"))
        self.base.step()


def main():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9), nn.ReLU()) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = ASAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(4):
        x = torch.randn(6, 9)
        F.mse_loss(model(x), x.flip(1)).backward()
        optimizer.ascend()
        loss = F.mse_loss(model(x), x.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer.base, losses
