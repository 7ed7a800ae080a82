"""A model of Composer (a stand-in) that marks its blocks, wrapped by a function of the module."""
import functools

import torch
from composer_standin import ComposerModel
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy


class Classifier(ComposerModel):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.GELU())
        self.body._fsdp_wrap = True
        self.head = nn.Linear(8, 3)

    def forward(self, batch):
        return self.head(self.body(batch))

    def loss(self, outputs, batch):
        return outputs.square().mean()


def marked(module):
    return getattr(module, "_fsdp_wrap", False)


def main():
    torch.manual_seed(0)
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=marked)
    model = FSDP(Classifier(), auto_wrap_policy=policy, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(2):
        batch = torch.randn(4, 4)
        model.module.loss(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()
