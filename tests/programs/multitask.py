"""Two tasks in turn through one trunk: each step uses another head, and the optimizer gets the new one as a group."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 12))
        self.heads = nn.ModuleDict({"classify": nn.Linear(12, 5), "regress": nn.Linear(12, 2)})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x).relu())


def main():
    model = Tasks()
    fully_shard(model.trunk)
    for head in model.heads.values():
        fully_shard(head)
    fully_shard(model)
    optimizer = torch.optim.AdamW([*model.trunk.parameters(), *model.heads["classify"].parameters()], lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(6):
        x = torch.randn(6, 8)
        if step == 2:
            optimizer.add_param_group({"params": list(model.heads["regress"].parameters()), "lr": 3e-2})
        if step >= 2 and step % 2:
            loss = F.mse_loss(model(x, "regress"), x[:, :2])
        else:
            loss = F.cross_entropy(model(x, "classify"), torch.randint(0, 5, (6,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses
