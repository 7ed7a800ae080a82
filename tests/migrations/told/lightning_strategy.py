"""A strategy of Lightning wraps the model."""
import lightning as L
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

strategy = FSDPStrategy(
    auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}),  # told
    sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,  # told
)
trainer = L.Trainer(strategy=strategy)
