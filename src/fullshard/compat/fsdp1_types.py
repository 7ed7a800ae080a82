"""The enums, configs and wrap policies of FSDP1, under its names. Source: the signatures of torch 2.13."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class ShardingStrategy(enum.Enum):
    """FSDP1's names of the levels."""

    FULL_SHARD = enum.auto()
    SHARD_GRAD_OP = enum.auto()
    NO_SHARD = enum.auto()
    HYBRID_SHARD = enum.auto()
    _HYBRID_SHARD_ZERO2 = enum.auto()


class BackwardPrefetch(enum.Enum):
    """Has no effect: units are always gathered ahead in backward."""

    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()


class StateDictType(enum.Enum):
    """The forms of state dicts."""

    FULL_STATE_DICT = enum.auto()
    LOCAL_STATE_DICT = enum.auto()
    SHARDED_STATE_DICT = enum.auto()


@dataclass
class MixedPrecision:
    """Dtypes of compute and reduction; the others are taken, and said to have no effect."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: tuple[type[nn.Module], ...] = (
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.BatchNorm3d,
        nn.SyncBatchNorm,
    )


@dataclass
class CPUOffload:
    """Shards, gradients and optimizer state in host memory."""

    offload_params: bool = False


@dataclass
class StateDictConfig:
    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    pass


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    pass


@dataclass
class OptimStateDictConfig:
    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    rank0_only: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    offload_to_cpu: bool = False


# ---- policies --------------------------------------------------------------------------------------------------------


class ModuleWrapPolicy:
    """A unit for each module of these classes."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self.classes = tuple(module_classes)

    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int = 0) -> bool:
        return recurse or isinstance(module, self.classes)


class CustomPolicy:
    """A unit for each module for which the function returns True, or a dict with arguments of `fully_shard`."""

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self.lambda_fn = lambda_fn

    def chosen(self, root: nn.Module) -> dict[nn.Module, dict[str, Any]]:
        answers = {module: self.lambda_fn(module) for module in root.modules() if module is not root}
        return {module: answer if isinstance(answer, dict) else {} for module, answer in answers.items() if answer}


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """A unit for every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """A unit for each module for which `lambda_fn` says so."""
    return recurse or bool(lambda_fn(module))


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Iterable[type[nn.Module]]
) -> bool:
    """A unit for each module of these classes."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """A unit for each module with at least `min_num_params` elements that are in no inner one."""
    leaves = (nn.MultiheadAttention,) if force_leaf_modules is None else tuple(force_leaf_modules)
    excluded = (nn.ModuleList, nn.ModuleDict) if exclude_wrap_modules is None else tuple(exclude_wrap_modules)
    if recurse:
        return nonwrapped_numel >= min_num_params and not isinstance(module, leaves)
    return nonwrapped_numel >= min_num_params and not isinstance(module, excluded)
