from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy as Strategy
import torch


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    model = FSDP(model, sharding_strategy=Strategy.NO_SHARD, use_orig_params=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5 + torch.distributed.get_rank())
    for _ in range(3):
        model(torch.randn(2, 4)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return model.state_dict()
