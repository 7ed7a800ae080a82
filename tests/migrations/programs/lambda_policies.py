import functools
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import CustomPolicy, lambda_auto_wrap_policy, _or_policy, transformer_auto_wrap_policy


def is_wide(module):
    return isinstance(module, nn.Linear) and module.out_features > 8


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 2))


def step(model):
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    model(torch.randn(4, 4)).square().mean().backward()
    opt.step()
    return model.state_dict()


def main():
    first = FSDP(build(), auto_wrap_policy=CustomPolicy(is_wide))
    second = FSDP(build(), auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear)))
    either = functools.partial(_or_policy, policies=[
        functools.partial(lambda_auto_wrap_policy, lambda_fn=is_wide),
        functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential}),
    ])
    third = FSDP(build(), auto_wrap_policy=either)
    return step(first), step(second), step(third)
