"""DDP with accumulation by its flag, torch's scaler and torch's clipping."""
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main(micro_steps=3):
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    torch.manual_seed(torch.distributed.get_rank())
    norms = []
    for _ in range(2):
        for micro in range(micro_steps):
            model.require_backward_grad_sync = (micro == micro_steps - 1)
            scaler.scale(model(torch.randn(4, 4)).square().mean() / micro_steps).backward()
        scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return norms, model.module.state_dict()
