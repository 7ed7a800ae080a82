"""Settings in a dataclass, with defaults that a caller may change."""
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType


@dataclass
class ShardingConfig:
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    precision: MixedPrecision | None = None
    checkpoint_type: StateDictType = StateDictType.FULL_STATE_DICT


@dataclass
class Config:
    lr: float = 0.05
    sharding: ShardingConfig = field(default_factory=ShardingConfig)


def main():
    config = Config(sharding=ShardingConfig(ShardingStrategy.SHARD_GRAD_OP, MixedPrecision(reduce_dtype=torch.float32)))
    torch.manual_seed(0)
    model = FSDP(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).float(),
        sharding_strategy=config.sharding.strategy,
        mixed_precision=config.sharding.precision,
        use_orig_params=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(2):
        model(torch.randn(4, 4).float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with FSDP.state_dict_type(model, config.sharding.checkpoint_type):
        return model.state_dict()
