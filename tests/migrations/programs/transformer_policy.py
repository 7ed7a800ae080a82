import functools

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Head(nn.Linear):
    pass


def main():
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(2)], Head(6, 3))
    my_auto_wrap_policy = functools.partial(
        transformer_auto_wrap_policy,
        transformer_layer_cls={Layer, Head},
    )
    model = FSDP(model, auto_wrap_policy=my_auto_wrap_policy, use_orig_params=True)
    opt = torch.optim.AdamW([{"params": list(model.parameters()), "weight_decay": 0.1}], lr=1e-2)
    torch.manual_seed(torch.distributed.get_rank())
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        opt.step(); opt.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()
