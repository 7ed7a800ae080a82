"""Gradient clipping over sharded parameters: local norms, one message, one scaling."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch_compat import cut_dim, local_of
from ..comm import all_reduce_over
from ..param import NormMesh, PendingGrad


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients in place so that their global norm is at most `max_norm`; that norm before scaling.

    Same result as `torch.nn.utils.clip_grad_norm_`, whose cost on sharded parameters is a DTensor dispatch and a
    message per parameter; here one message is exchanged per process group. Norms are added in float64 and rounded
    once, so that the result does not depend on how many ranks share the parameters.

    parameters: sharded parameters, plain ones (counted once, as equal on every rank), or both; those without `.grad`
        are skipped. Where one has a mesh of its own with fewer ranks than its unit (an expert), those of the other
        ranks count as well, so that all ranks scale alike; torch refuses parameters of several meshes.
    norm_type: any p >= 1, or inf. foreach: accepted for torch's call shape; False scales one by one.
    Returns a plain 0-dim float32 tensor on the gradients' device, equal on every rank.
    Raises `RuntimeError` on every rank alike when the norm is not finite and `error_if_nonfinite` is set, and when a
    gradient was accumulated but not reduced.
    """
    items = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    items = [p for p in items if p.grad is not None]
    if not items:
        return torch.tensor(0.0)
    norm_type = float(norm_type)
    plain, by_groups = _split(items)
    parts = [t for by_copies in by_groups.values() for tensors in by_copies.values() for t in tensors]
    device = (plain or parts)[0].device
    # The norm of norms, as torch takes it, of what this rank sees whole; then the parts of the others.
    norms = [_norm(plain, norm_type, device)] if plain else []
    maximum = math.isinf(norm_type)
    for groups, by_copies in by_groups.items():
        if maximum:
            value = torch.stack([_norm(tensors, norm_type, device) for tensors in by_copies.values()]).amax()
        else:
            powers = [_norm(tensors, norm_type, device).pow(norm_type) / n for n, tensors in by_copies.items()]
            value = torch.stack(powers).sum() if len(powers) > 1 else powers[0]
        # Sharded over several axes: the sum over one axis, then that over the next.
        for group in groups:
            all_reduce_over(value, group, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM)
        norms.append(value if maximum else value.pow(1.0 / norm_type))
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    norm = norm.float()
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is non-finite ({norm.item()}), so it cannot be "
            f"clipped; look for the first parameter with a NaN or inf, or pass error_if_nonfinite=False to scale anyway"
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    locals_ = plain + parts
    if foreach is False:
        for tensor in locals_:
            tensor.mul_(scale.to(tensor.dtype))
    else:
        torch._foreach_mul_(locals_, scale)
    return norm


# Local gradients by the groups over which their powers are summed, then by the number of ranks in these groups that
# hold the same part.
_Parts = dict[tuple[dist.ProcessGroup, ...], dict[int, list[Tensor]]]


def _split(parameters: list[Tensor]) -> tuple[list[Tensor], _Parts]:
    """The local gradients: those equal on every rank, and those of which each rank holds a part, by the groups of the
    axes over which they are sharded. An axis that replicates counts once."""
    plain: list[Tensor] = []
    by_groups: _Parts = {}
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        if isinstance(gradient, PendingGrad):
            gradient.to_local()  # refuses, with the reason
        if not isinstance(gradient, DTensor):
            plain.append(gradient.detach())
            continue
        mesh, copies = gradient.device_mesh, 1
        groups = []
        for axis, placement in enumerate(gradient.placements):
            if placement.is_replicate():
                copies *= mesh.size(axis)
                continue
            if cut_dim(placement) is None:
                raise NotImplementedError(
                    f"expected gradients that are sharded or replicated, found placements {gradient.placements}; "
                    f"redistribute them first: the norm of a sum is not that of its summands"
                )
            if mesh.size(axis) > 1:
                groups.append(mesh.get_group(axis))
        whole = NormMesh.of(parameter)
        if whole is None:
            # Only over the axes that shard, where nothing is there twice.
            copies = 1
        else:
            groups = [whole.get_group(axis) for axis in range(whole.ndim) if whole.size(axis) > 1]
        if groups:
            by_groups.setdefault(tuple(groups), {}).setdefault(copies, []).append(local_of(gradient))
        else:
            plain.append(local_of(gradient))
    return plain, by_groups


# A row of the parameter is added in at least float32, the rows in float64. A float32 sum over a large matrix is off by
# 1e-5 on a CPU, by another amount on every number of ranks; float64 throughout takes five to ten times as long.
# A row is whole on the rank that owns it, so its sum is the same however many ranks there are.
_LEAST_ROW_NUMEL, _MOST_ROW_NUMEL = 64, 4096


def _norm(tensors: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm of all elements of `tensors` on this rank; float64, 0-dim."""
    norms: list[Tensor] = []
    precise: list[Tensor] = []
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        row_numel = tensor.numel() // tensor.shape[0] if tensor.ndim > 1 else 1
        if row_numel < _LEAST_ROW_NUMEL or tensor.dtype.itemsize > 4 or not tensor.is_contiguous():
            precise.append(tensor)
            continue
        rows = tensor.view(-1, row_numel)
        for part in rows.split(_MOST_ROW_NUMEL, dim=1):
            norms.append(torch.linalg.vector_norm(part, norm_type, dim=1, dtype=torch.float32))
    if precise:
        norms.append(torch.stack([n.to(device) for n in torch._foreach_norm(precise, norm_type, dtype=torch.float64)]))
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    norm: Tensor = torch.linalg.vector_norm(torch.cat([n.to(device, torch.float64) for n in norms]), norm_type)
    return norm
