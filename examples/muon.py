"""Muon for matrices, AdamW for the rest: torchrun --nproc-per-node 2 examples/muon.py"""

import torch
from torch import distributed, nn

import fullshard
from fullshard.extras import matrices

distributed.init_process_group("gloo")
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


model = nn.Sequential(nn.Embedding(64, 32), Block(32), Block(32), nn.Linear(32, 64))
for module in (model[1], model[2], model):
    fullshard.fully_shard(module)
muon = torch.optim.Muon(matrices(model), lr=0.02)
adamw = torch.optim.AdamW(matrices(model, rest=True), lr=3e-3)
owners = fullshard.step_on_owners([muon, adamw], model=model)
if distributed.get_rank() == 0:
    print(owners.plan())
schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 100) for one in (muon, adamw)]

torch.manual_seed(distributed.get_rank() + 1)
for step in range(1, 101):
    tokens = torch.randint(64, (8, 16))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (7 * tokens + 3).remainder(64).flatten())
    loss.backward()
    owners.step()
    owners.zero_grad()
    for schedule in schedules:
        schedule.step()
    if step % 50 == 0 and distributed.get_rank() == 0:
        print(f"step {step}  loss {loss:.4f}")
distributed.destroy_process_group()
