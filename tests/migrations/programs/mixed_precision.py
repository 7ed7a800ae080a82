import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision

bf16 = MixedPrecision(
    param_dtype=torch.bfloat16,
    # gradients are averaged in full precision
    reduce_dtype=torch.float32,
)


def main(use_bf16=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = FSDP(model, mixed_precision=bf16 if use_bf16 else None, use_orig_params=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).float().square().mean()
        loss.backward()
        opt.step(); opt.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()
