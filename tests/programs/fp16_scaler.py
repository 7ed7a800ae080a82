"""float16 with a gradient scaler; one step overflows, on one rank alone, and all skip it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main():
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 12))
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    fully_shard(model[2], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    torch.manual_seed(1 + dist.get_rank())
    losses, scales = [], []
    for step in range(5):
        x = torch.randn(4, 12)
        loss = F.mse_loss(model(x), x.flip(1))
        if step == 2 and dist.get_rank() == 0:
            loss = loss * 1e6
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return model, optimizer, losses, scales
