"""All seven arguments that seed 000 calls removed."""
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Sequential):
    pass


def main():
    torch.manual_seed(torch.distributed.get_rank())  # other values on each rank
    model = nn.Sequential(*(Block(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        param_init_fn=None,
        device_id=torch.device("cpu"),
        sync_module_states=True,  # rank 0's are taken
        limit_all_gathers=True,
        use_orig_params=True,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        optimizer.step(); optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()
