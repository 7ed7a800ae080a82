"""The trainings that people come from: the same model under torch's FSDP1 or DDP, read as `subject.Sharded` is."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.parallel import DistributedDataParallel

from fullshard.program import Program, ProgramError

from .setting import Setting, named
from .weights import Weights

_STRATEGIES = {
    (True, False): ShardingStrategy.FULL_SHARD,
    (False, False): ShardingStrategy.SHARD_GRAD_OP,
    (True, True): ShardingStrategy.HYBRID_SHARD,
    (False, True): ShardingStrategy["_HYBRID_SHARD_ZERO2"],  # public in its documentation
}


class Replicated:
    """Trains under DDP. Parameters, gradients and state are whole on every rank."""

    def __init__(self, program: Program, model: nn.Module, setting: Setting, mesh: DeviceMesh) -> None:
        if setting.strategy.dtype is not None or setting.strategy.divides:
            raise ProgramError(f"{setting.strategy}: DDP trains in the dtype of the parameters, without other axes")
        self.weights = Weights()
        # Each rank keeps its buffers, as in the plain model; DDP would send rank 0's.
        self.plain = model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of the argument's other name, which older versions lack
            self.model: Any = DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False)

    @contextmanager
    def window(self, *, last: bool) -> Iterator[None]:
        with nullcontext() if last else self.model.no_sync():
            yield

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().cpu().clone() for name, p in self._named()}

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: None if p.grad is None else p.grad.cpu().clone() for name, p in self._named()}

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        return {name: _copied(optimizer.state[p]) for name, p in self._named() if p in optimizer.state}

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return named(self.plain)


class Fsdp1:
    """Trains under `FullyShardedDataParallel`, with the units that the program shards. Offload has no effect: torch
    refuses it on the CPU."""

    def __init__(self, program: Program, model: nn.Module, setting: Setting, mesh: DeviceMesh) -> None:
        strategy, self.weights = setting.strategy, Weights()
        if strategy.norms:
            raise ProgramError(f"{strategy}: FSDP1 keeps BatchNorms in float32, and no other norms; leave norms out")
        if strategy.divides or not isinstance(strategy.reshard, bool):
            raise ProgramError(f"{strategy}: FSDP1 has neither numbers of ranks to keep nor tensor parallelism")
        units: list[nn.Module] = []
        program.shard(model, lambda module, **_: units.append(module))
        if not all(isinstance(unit, nn.Module) for unit in units):
            raise ProgramError("FSDP1 has no units of several modules; shard each by itself to compare with it")
        policy = None
        if strategy.dtype is not None:
            policy = MixedPrecision(param_dtype=strategy.dtype, reduce_dtype=strategy.reduce_dtype)
        on_cpu = setting.device == "cpu"  # where FSDP1 trains only if it is set to
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is FSDP1, and that it would rather have frozen parameters apart
            self.model: Any = FullyShardedDataParallel(
                model,
                sharding_strategy=_STRATEGIES[strategy.reshard, strategy.replicas > 1],
                device_mesh=mesh,
                auto_wrap_policy=CustomPolicy(lambda module: module is not model and any(module is u for u in units)),
                mixed_precision=policy,
                backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
                device_id=torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator(),
                use_orig_params=True,
            )
            self.plain = self.model
            FullyShardedDataParallel.set_state_dict_type(
                self.model,
                StateDictType.FULL_STATE_DICT,
                FullStateDictConfig(rank0_only=False),
                FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False),
            )

    @contextmanager
    def window(self, *, last: bool) -> Iterator[None]:
        with nullcontext() if last else self.model.no_sync():
            yield

    def parameters(self) -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            return {name: p.detach().cpu().clone() for name, p in named(self.model)}

    def gradients(self) -> dict[str, Tensor | None]:
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False, with_grads=True):
            # A frozen parameter has a part of the flat gradient, which is zero and which no optimizer sees.
            return {
                name: None if p.grad is None or not p.requires_grad else p.grad.detach().cpu().clone()
                for name, p in named(self.model)
            }

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            found = FullyShardedDataParallel.optim_state_dict(self.model, optimizer)["state"]
        return {name: _copied(values) for name, values in found.items()}


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {key: v.detach().cpu().clone() if isinstance(v, Tensor) else v for key, v in values.items()}
