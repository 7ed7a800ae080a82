"""The smallest sharded training: torchrun --nproc-per-node 2 examples/quickstart.py"""

import os

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import fully_shard

world = int(os.environ["WORLD_SIZE"])  # torchrun says how many processes it started
device = "cuda" if torch.cuda.device_count() >= world else "cpu"  # one for each process, or the processor for all
distributed.init_process_group("nccl" if device == "cuda" else "gloo")
mesh = init_device_mesh(device, (world,))
torch.manual_seed(0)  # the same initial values on every rank
model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(2)))
for module in (*model, model):  # each block is a unit of its own, then the root
    fully_shard(module, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # over shards, so its state is sharded too
torch.manual_seed(distributed.get_rank() + 1)  # from here on every rank has data of its own
for step in range(1, 201):
    x = torch.randn(64, 32, device=device)
    loss = (model(x) - x.roll(1, dims=1)).square().mean()
    loss.backward()  # gradients are averaged over the ranks; each keeps its rows
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0 and distributed.get_rank() == 0:
        print(f"step {step}  loss {loss.item():.4f}")
distributed.destroy_process_group()
