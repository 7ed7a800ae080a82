"""Gradient clipping over sharded parameters: local norms, one all-reduce per process group, one scaling."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from .._torch import cut_dim, local_of
from ..agree.calls import note_clip, note_unscale
from ..comm import all_reduce_over
from ..engine.stages import Stages, is_copy
from ..engine.state_dict import refuse_replaced
from ..param import NormMesh, PendingGrad
from ..policy.arguments import expect_each, expect_flag, expect_number, expect_tensors

# ---- clip ------------------------------------------------------------------------------------------------------------


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    groups: Sequence[dist.ProcessGroup | DeviceMesh] | None = None,
) -> Tensor:
    """Scale the gradients in place so that their global norm is at most `max_norm`; return the norm before scaling.

    Same result as `torch.nn.utils.clip_grad_norm_`, which pays a DTensor dispatch and a collective per sharded
    parameter; this function pays one all-reduce per process group. Norms are summed in float64 and rounded once, so
    the result does not depend on the number of ranks.

    parameters: sharded parameters, plain ones (assumed equal on every rank and counted once), or both; those without
        `.grad` are skipped. If a parameter's own mesh has fewer ranks than its unit (an expert), the parameters of the
        other ranks count too, so that all ranks scale alike; torch rejects parameters on several meshes.
    norm_type: any p >= 1, or inf. foreach: as in torch; False scales one tensor at a time.
    groups: further process groups, or meshes with all their axes, whose ranks have other parameters of the same model:
        the axis of a pipeline. Their ranks all call, also those without gradients. None: those of the stages that
        `parameters` are of, if torch's pipeline schedules trained them; (): none. A weight that stages of
        `prepare_fully_shard` share counts once; a copy in each of two stages of your own counts twice.
    Returns a plain 0-dim float32 tensor on the gradients' device, equal on every rank.
    Raises `RuntimeError` on every rank when the norm is not finite and `error_if_nonfinite` is set, and when a
    gradient was accumulated but not reduced. Warns if `groups` is None, and the norm lacks stages of a pipeline.
    """
    items = expect_tensors("parameters", parameters)
    norm_type = math.inf if isinstance(norm_type, str) and norm_type == "inf" else norm_type
    expect_number("max_norm", max_norm, lambda norm: norm >= 0, "a number of at least 0")
    expect_number("norm_type", norm_type, lambda p: p > 0, "a number above 0, or inf")
    expect_flag("error_if_nonfinite", error_if_nonfinite)
    expect_flag("foreach", foreach, or_none=True)
    further = further_axes(items, groups, "clip_grad_norm_")
    note_clip(items, max_norm, norm_type)
    device = items[0].device if items else torch.device("cpu")
    items = [p for p in items if p.grad is not None]
    if not items and not further:
        return torch.tensor(0.0)
    norm_type = float(norm_type)
    plain, by_groups = _split([p for p in items if not is_copy(p)])
    parts = [t for by_copies in by_groups.values() for tensors in by_copies.values() for t in tensors]
    of_copies = [p.grad for p in items if p.grad is not None and is_copy(p)]
    copies = [local_of(gradient) if isinstance(gradient, DTensor) else gradient.detach() for gradient in of_copies]
    device = (plain or parts or copies)[0].device if items else device
    # The norm of norms, as in torch: first the gradients that this rank holds whole, then the sharded ones.
    norms = [_norm(plain, norm_type, device)] if plain else []
    maximum = math.isinf(norm_type)
    for own, by_copies in by_groups.items():
        if maximum:
            value = torch.stack([_norm(tensors, norm_type, device) for tensors in by_copies.values()]).amax()
        else:
            powers = [_norm(tensors, norm_type, device).pow(norm_type) / n for n, tensors in by_copies.items()]
            value = torch.stack(powers).sum() if len(powers) > 1 else powers[0]
        # Sharded over several axes: reduce over one axis after the other.
        for group in own:
            all_reduce_over(value, group, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, "clip_grad_norm_")
        norms.append(value if maximum else value.pow(1.0 / norm_type))
    if not norms:
        norms.append(torch.zeros((), dtype=torch.float64, device=device))
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if further:
        total = norm.clone() if maximum else norm.pow(norm_type)
        for group in further:
            all_reduce_over(total, group, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, "clip_grad_norm_")
        norm = total if maximum else total.pow(1.0 / norm_type)
    norm = norm.float()
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is non-finite ({norm.item()}), so it cannot be "
            f"clipped; look for the first parameter with a NaN or inf, or pass error_if_nonfinite=False to scale anyway"
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    locals_ = plain + parts + copies
    if not locals_:
        return norm
    if foreach is False:
        for tensor in locals_:
            tensor.mul_(scale.to(tensor.dtype))
    else:
        torch._foreach_mul_(locals_, scale)
    return norm


def further_axes(
    parameters: Sequence[Tensor], groups: Sequence[dist.ProcessGroup | DeviceMesh] | None, what: str
) -> list[dist.ProcessGroup]:
    """The groups whose ranks have other parameters of the model: those that the caller of `what` named, or those of a
    pipeline that `parameters` are of; warns of stages that are unknown or lacking."""
    return _stage_axes(parameters, what) if groups is None else _expect_groups(groups)


def _expect_groups(groups: object) -> list[dist.ProcessGroup]:
    """The process groups that the caller named, each once."""
    named = expect_each(
        "groups",
        groups,
        lambda item: isinstance(item, (dist.ProcessGroup, DeviceMesh)),
        "a list of process groups or meshes",
    )
    found: dict[dist.ProcessGroup, None] = {}
    for item in named:
        found.update(dict.fromkeys(item.get_all_groups() if isinstance(item, DeviceMesh) else [item]))
    return [group for group in found if group.size() > 1]


def _stage_axes(parameters: Sequence[Tensor], what: str) -> list[dist.ProcessGroup]:
    """The groups of the pipeline stages that `parameters` are of; warns of stages that the norm will lack."""
    stages = Stages(parameters)
    if stages.unknown is not None:
        warnings.warn(
            f"{what}: expected groups= for {type(stages.unknown).__name__}, which is reduced as a stage of a "
            f"pipeline, found none: the norm would be this stage's alone, and each stage would scale by its own; pass "
            f"groups=[the process group of the pipeline's axis], or groups=() if there are no other stages",
            UserWarning,
            stacklevel=4,
        )
    elif stages.lacking:
        whole = stages.count + len(stages.lacking)
        warnings.warn(
            f"{what}: expected the parameters of all {whole} stages of a pipeline that this rank has, found "
            f"{stages.count}: the norm lacks the others; pass the parameters of all of them in one call, or groups=() "
            f"for the norm of these alone",
            UserWarning,
            stacklevel=4,
        )
    return [axis for axis in stages.axes if axis.size() > 1]


# Local gradients by the groups over which their powers are summed, then by the number of ranks in these groups that
# hold the same shard.
_Parts = dict[tuple[dist.ProcessGroup, ...], dict[int, list[Tensor]]]


def _split(parameters: list[Tensor]) -> tuple[list[Tensor], _Parts]:
    """The local gradients: those equal on every rank, and the sharded ones by the groups of their sharding axes."""
    plain: list[Tensor] = []
    by_groups: _Parts = {}
    # Parameters of a unit share mesh and placements, so their list is looked up once.
    lists: dict[tuple[int, int, int], list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor):
            assert gradient is not None
            plain.append(gradient.detach())
            continue
        if isinstance(gradient, PendingGrad):
            gradient.to_local()  # raises, with the reason
        mesh, placements, whole = gradient.device_mesh, gradient.placements, NormMesh.of(parameter)
        alike = id(mesh), id(placements), id(whole)
        tensors = lists.get(alike)
        if tensors is None:
            groups, copies = summed_over(mesh, placements, whole)
            tensors = by_groups.setdefault(groups, {}).setdefault(copies, []) if groups else plain
            lists[alike] = tensors
        tensors.append(local_of(gradient))
    return plain, by_groups


def summed_over(
    mesh: DeviceMesh, placements: tuple[Placement, ...], whole: DeviceMesh | None
) -> tuple[tuple[dist.ProcessGroup, ...], int]:
    """The groups over which the powers of a gradient are summed, and how many of their ranks hold the same shard.

    A replicate axis counts once. `whole`: the mesh of the unit, for a parameter on a submesh of it.
    """
    copies = 1
    groups = []
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            copies *= mesh.size(axis)
            continue
        if cut_dim(placement) is None:
            raise NotImplementedError(
                f"expected gradients that are sharded or replicated, found placements {placements}; redistribute them "
                f"first: the norm of a sum is not that of its summands"
            )
        if mesh.size(axis) > 1:
            groups.append(mesh.get_group(axis))
    if whole is None:
        # Over the shard axes only, where no element occurs twice.
        return tuple(groups), 1
    return tuple(whole.get_group(axis) for axis in range(whole.ndim) if whole.size(axis) > 1), copies


# Each row is summed in at least float32, the row sums in float64. A float32 sum over a large matrix is off by 1e-5 on a
# CPU, and the error depends on the number of ranks; float64 throughout takes five to ten times as long.
# A row is never split between ranks, so its sum does not depend on the number of ranks. On a device all is float64: one
# kernel for all gradients, which reads as many bytes, where rows would be one for each.
_LEAST_ROW_NUMEL, _MOST_ROW_NUMEL = 64, 4096


def _norm(tensors: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm of all elements of `tensors` on this rank; float64, 0-dim."""
    rows: list[Tensor] = []
    precise: list[Tensor] = []
    for tensor in tensors:
        shape = tensor.shape
        numel = tensor.numel()
        if numel == 0:
            continue
        row_numel = numel // shape[0] if len(shape) > 1 else 1
        on_device = tensor.device.type != "cpu"
        if on_device or row_numel < _LEAST_ROW_NUMEL or tensor.dtype.itemsize > 4 or not tensor.is_contiguous():
            precise.append(tensor)
            continue
        if len(shape) > 2:
            tensor = tensor.view(-1, row_numel)
        for part in (tensor,) if row_numel <= _MOST_ROW_NUMEL else tensor.split(_MOST_ROW_NUMEL, dim=1):
            rows.append(torch.linalg.vector_norm(part, norm_type, dim=1, dtype=torch.float32))
    # One kernel if all are on one device, which is nearly always so.
    norms = [torch.cat(some).to(device, torch.float64) for some in _by_device(rows)]
    if precise:
        found = torch._foreach_norm(precise, norm_type, dtype=torch.float64)
        norms += [torch.stack(some).to(device) for some in _by_device(found)]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    norm: Tensor = torch.linalg.vector_norm(torch.cat(norms) if len(norms) > 1 else norms[0], norm_type)
    return norm


def _by_device(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return list(found.values())


# ---- grad scaler -----------------------------------------------------------------------------------------------------


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for models whose parameters are on more than one mesh, or in host memory.

    When a gradient on any rank has an inf or NaN, every rank must skip the step and halve its scale. torch's scaler
    asks only the ranks of the *first* gradient's mesh. With several meshes (tensor or expert parallelism beside plain
    sharding, or a mesh per parameter) the ranks then diverge silently. This scaler asks the ranks of every mesh axis of
    every parameter of the optimizer: one message of four bytes per process group.

    Arguments, methods and state dict are torch's.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        refuse_replaced(optimizer)  # torch's scaler would only say that it recorded no checks
        # On local gradients: with DTensors each list would cost a message.
        here: Any = SimpleNamespace(param_groups=[{"params": _local_views(optimizer)}])
        per_device: dict[torch.device, Tensor] = super()._unscale_grads_(here, inv_scale, found_inf, allow_fp16)
        settings = {
            "scale": 1.0 / float(inv_scale) if inv_scale.device.type == "cpu" else "on a device",
            "growth_factor": self.get_growth_factor(),
            "backoff_factor": self.get_backoff_factor(),
            "growth_interval": self.get_growth_interval(),
        }
        note_unscale(optimizer, settings)
        # Include parameters without a gradient here: all ranks must send the same messages.
        groups = _groups(parameter for group in optimizer.param_groups for parameter in group["params"])
        for found in per_device.values():
            for group in groups:
                all_reduce_over(found, group, dist.ReduceOp.MAX, "the scaler's look for infs")
        return per_device


def _local_views(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """A tensor over the local memory of each parameter with a gradient, with the local gradient on `.grad`."""
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
    """The process groups of all mesh axes of `parameters` with more than one rank, each once, in order."""
    meshes = dict.fromkeys(parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor))
    groups = [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    return list(dict.fromkeys(groups))
