import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, FullStateDictConfig


def main():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    state = {name: torch.linspace(-1, 1, value.numel()).view_as(value) for name, value in plain.state_dict().items()}
    model = FullyShardedDataParallel(plain, use_orig_params=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        model.load_state_dict(state)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(torch.distributed.get_rank())
    model(torch.randn(4, 5)).square().mean().backward()
    opt.step()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return model.state_dict()
