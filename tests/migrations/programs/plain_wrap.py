"""FSDP around a whole model."""
import torch, torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5))
    model = FSDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    torch.manual_seed(1 + torch.distributed.get_rank())
    for _ in range(3):
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()
