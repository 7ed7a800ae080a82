import functools

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 12), norm(12), nn.Linear(12, 6)

    def forward(self, x):
        return x + self.down(torch.relu(self.norm(self.up(x))))


def build(norm):
    return nn.Sequential(Block(norm), Block(norm), nn.Linear(6, 3)).float()


def train(model):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(torch.distributed.get_rank())
    losses = []
    for _ in range(3):
        loss = model(torch.randn(8, 6).float()).float().square().mean()
        loss.backward()
        opt.step(); opt.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def main():
    torch.manual_seed(0)
    convolutional = FSDP(
        build(nn.BatchNorm1d), auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=bf16, use_orig_params=True
    )
    without_layer_norms = MixedPrecision(torch.bfloat16, torch.float32, _module_classes_to_ignore=(nn.LayerNorm,))
    others = FSDP(
        build(nn.LayerNorm),
        auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=50),
        mixed_precision=without_layer_norms,
        use_orig_params=True,
    )
    # Without a policy FSDP1 leaves no module out.
    whole = FSDP(build(nn.LayerNorm), mixed_precision=without_layer_norms, use_orig_params=True)
    return train(convolutional), train(others), train(whole)
