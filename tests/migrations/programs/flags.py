"""A strategy and a unit size from flags, as a launcher script takes them."""
import argparse
import functools

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


def parse(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"], default="FULL_SHARD")
    parser.add_argument("--min-params", type=int, default=20)
    parser.add_argument("--prefetch", action="store_true")
    return parser.parse_args(argv)


def build(args):
    torch.manual_seed(0)
    return FSDP(
        nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 4)),
        auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=args.min_params),
        sharding_strategy=ShardingStrategy[args.strategy],
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE if args.prefetch else None,
        use_orig_params=True,
    )


def main(argv=("--strategy", "SHARD_GRAD_OP", "--prefetch")):
    args = parse(list(argv))
    model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(2):
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()
