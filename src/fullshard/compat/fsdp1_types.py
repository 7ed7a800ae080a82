"""The enums, configs and wrap policies of FSDP1: torch's own, so that other libraries take them too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import BackwardPrefetch as BackwardPrefetch
from torch.distributed.fsdp import CPUOffload as CPUOffload
from torch.distributed.fsdp import FullOptimStateDictConfig as FullOptimStateDictConfig
from torch.distributed.fsdp import FullStateDictConfig as FullStateDictConfig
from torch.distributed.fsdp import LocalOptimStateDictConfig as LocalOptimStateDictConfig
from torch.distributed.fsdp import LocalStateDictConfig as LocalStateDictConfig
from torch.distributed.fsdp import MixedPrecision as MixedPrecision
from torch.distributed.fsdp import OptimStateDictConfig as OptimStateDictConfig
from torch.distributed.fsdp import OptimStateKeyType as OptimStateKeyType
from torch.distributed.fsdp import ShardedOptimStateDictConfig as ShardedOptimStateDictConfig
from torch.distributed.fsdp import ShardedStateDictConfig as ShardedStateDictConfig
from torch.distributed.fsdp import ShardingStrategy as ShardingStrategy
from torch.distributed.fsdp import StateDictConfig as StateDictConfig
from torch.distributed.fsdp import StateDictSettings as StateDictSettings
from torch.distributed.fsdp import StateDictType as StateDictType
from torch.distributed.fsdp.wrap import CustomPolicy as TorchCustomPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as ModuleWrapPolicy
from torch.distributed.fsdp.wrap import always_wrap_policy as always_wrap_policy
from torch.distributed.fsdp.wrap import enable_wrap as enable_wrap
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy as lambda_auto_wrap_policy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy as size_based_auto_wrap_policy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy as transformer_auto_wrap_policy
from torch.distributed.fsdp.wrap import wrap as wrap


class CustomPolicy(TorchCustomPolicy):
    """A unit for each module for which the function returns True, or arguments of FSDP1 or `fully_shard` in a dict."""

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        super().__init__(lambda_fn)
        self.lambda_fn = lambda_fn

    def chosen(self, root: nn.Module) -> dict[nn.Module, dict[str, Any]]:
        answers = {module: self.lambda_fn(module) for module in root.modules() if module is not root}
        return {module: answer if isinstance(answer, dict) else {} for module, answer in answers.items() if answer}
