import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    torch.manual_seed(torch.distributed.get_rank())  # DDP sends rank 0's values
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    ddp_model = DDP(model, find_unused_parameters=True, bucket_cap_mb=25)
    optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = ddp_model(torch.randn(4, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, ddp_model.module.state_dict()
