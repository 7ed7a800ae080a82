"""DDP with a checkpoint that the first rank writes, every other step."""
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main(every=2):
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    model = DDP(model, find_unused_parameters=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    folder = tempfile.mkdtemp()
    saved = {}
    for step in range(2):
        loss = model(torch.randn(4, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % every == 0 and rank == 0:
            path = f"{folder}/{step}.pt"
            torch.save({"step": step, "model": model.module.state_dict()}, path)
            saved = torch.load(path)
    dist.barrier()
    return saved if rank == 0 else None
