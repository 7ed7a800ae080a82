"""A gradient scaler for parameters on several meshes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..comm import all_reduce_over
from ..runtime.step_facts import note_unscale


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for models whose parameters are on more than one mesh, or on host memory.

    When a gradient on any rank has an inf or NaN, every rank has to skip the step and halve its scale. torch's scaler
    asks the ranks of the mesh of the *first* gradient. That is enough where all parameters are on one mesh; with tensor
    or expert parallelism beside plain sharding, or a mesh per parameter, ranks go apart without a word. This one asks
    the ranks of every axis of every parameter of the optimizer, one message of four bytes for each process group.

    Arguments, methods and state dict are torch's.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # Of the local gradients: DTensors would send a message for each list of them.
        here: Any = SimpleNamespace(param_groups=[{"params": _local_views(optimizer)}])
        per_device: dict[torch.device, Tensor] = super()._unscale_grads_(here, inv_scale, found_inf, allow_fp16)
        settings = {
            "scale": 1.0 / float(inv_scale) if inv_scale.device.type == "cpu" else "on a device",
            "growth_factor": self.get_growth_factor(),
            "backoff_factor": self.get_backoff_factor(),
            "growth_interval": self.get_growth_interval(),
        }
        note_unscale(optimizer, settings)
        # Of all parameters, also those without a gradient here: ranks have to agree on the messages.
        groups = _groups(parameter for group in optimizer.param_groups for parameter in group["params"])
        for found in per_device.values():
            for group in groups:
                all_reduce_over(found, group, dist.ReduceOp.MAX, "the scaler's look for infs")
        return per_device


def _local_views(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Of each parameter with a gradient, a tensor over the same memory, whose gradient is the local one."""
    views = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        view, gradient = parameter.detach(), parameter.grad
        if isinstance(view, DTensor):
            view, gradient = view.to_local(), gradient.to_local()
        view = view.detach()
        view.grad = gradient.detach()
        views.append(view)
    return views


def _groups(parameters: Any) -> list[dist.ProcessGroup]:
    """The process groups of all mesh axes of `parameters` that have several ranks, each once, in order."""
    meshes = dict.fromkeys(parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor))
    groups = [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    return list(dict.fromkeys(groups))
