import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def main():
    torch.manual_seed(0)
    model = FSDP(nn.Linear(5, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=2)
    torch.manual_seed(torch.distributed.get_rank())
    for step in range(4):
        loss = model(torch.randn(4, 5)).square().mean()
        if step == 1 and torch.distributed.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return scaler.get_scale(), model.state_dict()
