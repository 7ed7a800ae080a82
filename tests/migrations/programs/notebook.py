"""Cells of a notebook, saved as a program: no functions, names that are used again."""
# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

# %% the model
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
policy = ModuleWrapPolicy({nn.Linear})
model = FSDP(model, auto_wrap_policy=policy)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

# %% train
torch.manual_seed(dist.get_rank())
for step in range(2):
    loss = model(torch.randn(4, 4)).square().mean()
    loss.backward()
    norm = model.clip_grad_norm_(1.0); optimizer.step(); optimizer.zero_grad()

# %% look at it
state = model.state_dict()
RESULT = [norm.item(), loss.item(), state]
