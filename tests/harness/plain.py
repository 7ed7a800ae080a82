"""Plain data parallelism under the names of `torch.distributed.fsdp`: the oracle of the programs in tests/programs.

Every rank keeps whole parameters. When a backward is over, the gradients that it brought are averaged: added in the
order of ranks, then divided. A parameter that no rank used keeps `grad=None`. What FSDP2 has beside `fully_shard` acts
where a program can see it (gradients held back between micro-batches) and does nothing where it moves bytes alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "fully_shard",
    "register_fsdp_forward_method",
]


class FSDPModule:
    """What `fully_shard` makes of a module's class."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        for module in self.modules() if recurse else [self]:  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                vars(module)["_averager"].sync = requires_gradient_sync

    def unshard(self, async_op: bool = False) -> None:
        pass

    reshard = unshard

    def _moves_bytes_alone(self, *args: Any, **options: Any) -> None:
        pass

    set_is_last_backward = set_reshard_after_forward = set_reshard_after_backward = _moves_bytes_alone
    set_modules_to_forward_prefetch = set_modules_to_backward_prefetch = _moves_bytes_alone


class _Averager:
    """The parameters of one unit, by the module and the name that they are registered at: `to_empty` and
    `load_state_dict(assign=True)` put others there. `held`: gradients that are still to be averaged."""

    def __init__(self, places: list[tuple[nn.Module, str]], group: dist.ProcessGroup | None) -> None:
        self.places, self.group, self.sync = places, group, True
        self.held: dict[int, Tensor] = {}
        self.hooked: dict[int, nn.Parameter] = {}
        self.queued = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [module.get_parameter(name) for module, name in self.places]

    def watch(self, *_: Any) -> None:
        """Before each forward: parameters may be others, and require a gradient, since the last one."""
        for i, p in enumerate(self.parameters):
            if p.requires_grad and self.hooked.get(i) is not p:
                self.hooked[i] = p
                p.register_hook(lambda gradient, i=i: self.hold(i, gradient))

    def hold(self, i: int, gradient: Tensor) -> Tensor:
        """Autograd adds zeros to `.grad`; the average is added at the end of the backward."""
        held = self.held.get(i)
        self.held[i] = gradient.detach().clone() if held is None else held + gradient.detach()
        if not self.queued:
            self.queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.average)
        return torch.zeros_like(gradient)

    def average(self) -> None:
        self.queued = False
        if not self.sync:
            return
        world = dist.get_world_size(self.group)
        with torch.no_grad():
            for i, p in enumerate(self.parameters):
                if not p.requires_grad:
                    continue
                found = torch.tensor([i in self.held])
                everywhere = [torch.empty_like(found) for _ in range(world)]
                dist.all_gather(everywhere, found, self.group)
                if not any(everywhere):
                    continue
                mine = self.held.get(i)
                mine = torch.zeros_like(_local(p)) if mine is None else _local(mine).contiguous()
                gradients = [torch.empty_like(mine) for _ in range(world)]
                dist.all_gather(gradients, mine, self.group)
                total = gradients[0]
                for gradient in gradients[1:]:
                    total = total + gradient
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                _local(p.grad).add_(total / world)
        self.held.clear()


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def fully_shard(module: Any, *, mesh: DeviceMesh | None = None, ignored_params: Iterable[Any] = (), **_: Any) -> Any:
    """Average the gradients of what no inner call has taken, at the end of each backward."""
    modules = module if isinstance(module, (list, tuple)) else [module]
    taken = {id(p) for p in ignored_params}
    taken |= {id(p) for each in modules for m in each.modules() if "_averager" in vars(m) for p in _taken(m)}
    own: dict[int, tuple[nn.Module, str]] = {}
    for each in modules:
        for inner in each.modules():
            for name, p in inner.named_parameters(recurse=False):
                if id(p) not in taken:
                    own.setdefault(id(p), (inner, name))
    group = None if mesh is None else (mesh._flatten() if mesh.ndim > 1 else mesh).get_group()
    averager = _Averager(list(own.values()), group)
    for each in modules:
        vars(each)["_averager"] = averager
        each.register_forward_pre_hook(averager.watch)
        each.__class__ = type(f"Plain{type(each).__name__}", (FSDPModule, type(each)), {})
    return module


def _taken(module: nn.Module) -> list[nn.Parameter]:
    averager: _Averager = vars(module)["_averager"]
    return averager.parameters


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Every method may be called: parameters are whole."""
