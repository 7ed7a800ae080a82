"""Several models in a list, a loop over them, and a function that takes any of them."""
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType


def weights(network):
    with FSDP.state_dict_type(network, StateDictType.FULL_STATE_DICT):
        return network.state_dict()


def main():
    torch.manual_seed(0)
    models = [FSDP(nn.Linear(4, 4), use_orig_params=True) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    torch.manual_seed(torch.distributed.get_rank())
    norms = []
    for _ in range(2):
        x = torch.randn(4, 4)
        for m in models:
            x = m(x).tanh()
        x.square().mean().backward()
        for m, optimizer in zip(models, optimizers):
            norms.append(float(m.clip_grad_norm_(0.2)))
            optimizer.step()
            optimizer.zero_grad()
    saved = []
    for m in models:
        with FSDP.state_dict_type(m, StateDictType.FULL_STATE_DICT):
            saved.append(m.state_dict())
    return norms, saved, [weights(m) for m in models]
