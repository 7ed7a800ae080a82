"""Loss scaling, accumulation and clipping together."""
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def main(accumulate=2):
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = ShardedGradScaler(device="cpu", init_scale=64.0)
    torch.manual_seed(torch.distributed.get_rank())
    norms = []
    for _ in range(2):
        for micro in range(accumulate):
            with model.no_sync() if micro < accumulate - 1 else nullcontext():
                scaler.scale(model(torch.randn(4, 5)).square().mean() / accumulate).backward()
        scaler.unscale_(optimizer)
        norms.append(model.clip_grad_norm_(0.5).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return norms, scaler.get_scale(), model.state_dict()
