"""Mixed precision if a flag says so."""
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision

def train(args):
    torch.manual_seed(0)
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if args.bf16 else None
    model = FSDP(nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 3)).float(), mixed_precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(torch.distributed.get_rank())
    losses = []
    for _ in range(2):
        loss = model(torch.randn(8, 6).float()).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()

def main():
    return train(SimpleNamespace(bf16=True)), train(SimpleNamespace(bf16=False))
