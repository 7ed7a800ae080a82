"""An average of a sharded model's parameters: torchrun --nproc-per-node 2 examples/averages.py"""

import torch
from torch import distributed, nn

import fullshard

distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
for module in (model[0], model[2], model):
    fullshard.fully_shard(module)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
mean = fullshard.average(model, decay=0.98)  # each rank's shards, in float32
torch.manual_seed(distributed.get_rank() + 1)


def loss_of(x):
    return (model(x) - x.roll(1, dims=1)).square().mean()


held_out = torch.randn(512, 16)
for step in range(1, 301):
    loss_of(torch.randn(8, 16)).backward()
    optimizer.step()
    optimizer.zero_grad()
    mean.update()
    if step % 100 == 0:
        with torch.no_grad():
            own = loss_of(held_out)
            with mean.applied():
                averaged = loss_of(held_out)
        if distributed.get_rank() == 0:
            print(f"step {step}  loss {own:.4f}  of the average {averaged:.4f}")
distributed.destroy_process_group()
