"""One decision of all ranks on NaN and inf, before an optimizer writes them into parameters and state.

Each rank checks its own loss and its own rows of every gradient, and finds the first value that is not finite. The
minimum over the ranks is the result, the same on all of them. That takes one message of eight bytes per axis of the
mesh, and a second one with the name only if something was found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from .._torch import local_of, settled
from ..comm import joining_groups, least_over, told_by_one
from ..engine.names import clean_name
from ..engine.unit import module_units
from ..param import NormMesh, PendingGrad
from ..policy.arguments import expect, expect_group, expect_tensors

OnNonfinite = Literal["raise", "skip", "count"]

_RANK_BITS = 24
# Greater than every (position, rank).
_NOTHING = 1 << 62


@dataclass(frozen=True)
class GradientCheck:
    """The result of `check_gradients`, the same on every rank.

    ok: loss and gradients were finite on all ranks.
    bad_steps: how many calls for this model found something since the process began, including this one.
    name: the first that is not finite: "loss", or the dotted name of a parameter; None when `ok`. The loss comes
        before all parameters, and these in model order; among several ranks the lowest.
    rank: the rank (in the default group) on which it was found: the owner of the loss, or of the rows of the gradient.
        A NaN from one rank's batch is in the reduced gradients of all; only the loss shows whose batch it was.
    what: how many elements of that rank's part are NaN or inf, and where the first one is.
    """

    ok: bool
    bad_steps: int
    name: str | None = None
    rank: int | None = None
    what: str | None = None

    def __str__(self) -> str:
        if self.ok:
            return "loss and gradients are finite"
        of = "the loss" if self.name == "loss" else f"the gradient of {self.name}"
        return f"{of} is not finite on rank {self.rank}: {self.what}"


class NonFiniteError(FloatingPointError):
    """Raised by `check_gradients` on every rank; `check` is the result."""

    def __init__(self, check: GradientCheck) -> None:
        super().__init__(
            f"expected a finite loss and finite gradients, found that {check}; nothing was updated. Look at that "
            f"rank's batch and loss, lower the learning rate, or skip such steps with on_nonfinite='skip'"
        )
        self.check = check


def check_gradients(
    model: nn.Module | Iterable[Tensor],
    loss: Tensor | float | None = None,
    *,
    on_nonfinite: OnNonfinite = "raise",
    process_group: dist.ProcessGroup | None = None,
) -> GradientCheck:
    """Look for NaN and inf in the gradients, and in `loss`, on all ranks, and decide alike on all of them.

        loss.backward()
        fullshard.check_gradients(model, loss)      # after a scaler's unscale_(), before or after clipping
        optimizer.step()

    model: a module, sharded or not, or its parameters. Every `.grad` is checked: of sharded, ignored and other plain
        parameters, in every dtype. Parameters without one are skipped. A module finds and names its sharded parameters
        even while full parameters are on it; for a list of parameters the report gives positions.
    loss: this rank's, any shape, or the sum over its micro-batches. It shows whose batch was bad. It may be passed
        before backward, and has to be if `step_in_backward` takes the gradients.
    on_nonfinite: "raise": `NonFiniteError` (a `FloatingPointError`) on all ranks. "skip": all gradients are set to
        None, so that the following `optimizer.step()` changes no parameter and no state. "count": only the result; the
        gradients stay as they are.
    process_group: all ranks that have to decide alike. By default those of the meshes of the parameters; without a
        sharded parameter, the default group if there is one. Pipeline stages, whose ranks share no mesh, pass one.
    Collective: every one of these ranks calls it, in each step. It waits for the gradients on a device.
    Also raises `ValueError` for an unknown `on_nonfinite`, and `RuntimeError` for a gradient that was accumulated but
    not reduced, or taken by a step in backward."""
    tensors = model if isinstance(model, nn.Module) else expect_tensors("model", model)
    expect(
        "loss",
        loss is None or isinstance(loss, (Tensor, Real)),
        "a tensor, a number or None",
        loss,
        "leave it out for none",
    )
    expect_group("process_group", process_group)
    if on_nonfinite not in get_args(OnNonfinite):
        expected = ", ".join(map(repr, get_args(OnNonfinite)))
        raise ValueError(f"on_nonfinite: expected one of {expected}, found {on_nonfinite!r}")
    named = named_gradients(tensors) if isinstance(tensors, nn.Module) else _numbered(tensors)
    owner = model if isinstance(model, nn.Module) else next(iter(named), (None, None))[1]
    groups, device = asked(named, process_group)
    looked_at = _looked_at(named, loss)
    rank = dist.get_rank() if dist.is_initialized() else 0
    with torch.no_grad():
        first = _first(looked_at, device, rank)
    own = int(least_over(groups, first).item()) if groups else int(first.item())
    if own == _NOTHING:
        return GradientCheck(True, _bad_steps(owner))
    position, bad_rank = own >> _RANK_BITS, own & ((1 << _RANK_BITS) - 1)
    here = next((item for item in looked_at if item.position == position), None) if bad_rank == rank else None
    text = None if here is None else f"{here.name}\n{_described(here.local)}"
    name, _, what = told_by_one(groups, text, device).partition("\n")
    check = GradientCheck(False, _bad_steps(owner, 1), name, bad_rank, what)
    if on_nonfinite == "raise":
        raise NonFiniteError(check)
    if on_nonfinite == "skip":
        for _, parameter in named:
            parameter.grad = None
    return check


# ---- the values to check -------------------------------------------------------------------------------------


class _LookedAt(NamedTuple):
    # A number: 0 for the loss, 1 and on for parameters: the same on all ranks that share them.
    position: int
    name: str
    local: Tensor


def named_gradients(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters that have gradients after a backward, with their names, in model order.

    Not `named_parameters()`: full parameters may be on the modules (`full_params`, `set_reshard_after_backward`).
    """
    sharded = {
        (id(slot.module), slot.name): param.sharded
        for unit in module_units(model)
        for param in unit.params
        for slot in param.slots
    }
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in model.named_modules():
        for name, standing in module.named_parameters(recurse=False, remove_duplicate=False):
            parameter = sharded.get((id(module), name), standing)
            found.setdefault(id(parameter), (clean_name(f"{prefix}.{name}" if prefix else name), parameter))
    return list(found.values())


def _numbered(parameters: Iterable[Tensor]) -> list[tuple[str, Tensor]]:
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    return [(f"parameter {i} of shape {tuple(p.shape)}", p) for i, p in enumerate(parameters)]


def _looked_at(named: Sequence[tuple[str, Tensor]], loss: Tensor | float | None) -> list[_LookedAt]:
    found = []
    if loss is not None:
        value = loss if isinstance(loss, Tensor) else torch.tensor(float(loss), dtype=torch.float64)
        found.append(_LookedAt(0, "loss", values_here(value)))
    for i, (name, parameter) in enumerate(named):
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, PendingGrad):
            gradient.to_local()  # raises, with the reason
        found.append(_LookedAt(1 + i, name, values_here(gradient)))
    return found


def values_here(tensor: Tensor) -> Tensor:
    """This rank's values, as a plain dense tensor."""
    if isinstance(tensor, DTensor):
        tensor = settled(local_of(tensor))  # without detach before: that costs a DTensor dispatch for each
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def asked(
    named: Sequence[tuple[str, Tensor]], process_group: dist.ProcessGroup | None
) -> tuple[list[dist.ProcessGroup], torch.device]:
    """The groups over which the result is found, and the device of the message: of one type on every rank."""
    # From all parameters, also those without a gradient here: ranks have to agree on the messages.
    meshes = {}
    for _, parameter in named:
        if isinstance(parameter, DTensor):
            for mesh in (parameter.device_mesh, NormMesh.of(parameter)):
                if mesh is not None:
                    meshes[id(mesh)] = mesh
    device = torch.device(next(iter(meshes.values())).device_type if meshes else "cpu")
    if process_group is None and meshes:
        return joining_groups(meshes.values()), device
    if process_group is None and dist.is_initialized():
        process_group = dist.group.WORLD
    return [] if process_group is None else [process_group], device


# ---- the first that is not finite ----------------------------------------------------------------------------


def _first(looked_at: Sequence[_LookedAt], device: torch.device, rank: int) -> Tensor:
    """(position, rank) of the first non-finite value here, as one number, int64 on `device`; `_NOTHING` without one.

    Does not synchronise with a device.
    """
    least = [torch.tensor(_NOTHING, device=device)]
    by_kind: dict[tuple[torch.device, torch.dtype], list[_LookedAt]] = {}
    for item in looked_at:
        if item.local.numel():
            by_kind.setdefault((item.local.device, item.local.dtype), []).append(item)
    for (where, _), items in by_kind.items():
        keys = torch.tensor([item.position << _RANK_BITS | rank for item in items], device=where)
        finite = _are_finite([item.local for item in items])
        least.append(torch.where(finite, _NOTHING, keys).amin().to(device))
    return torch.stack(least).amin()


def _are_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Returns for each of `tensors` (one device, one dtype, none empty) whether all elements are finite; bool."""
    tensors = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(list(tensors), math.inf)).isfinite()
    # On a CPU the maximum takes ten times as long as the sum of squares, which may overflow for finite values.
    finite = torch.stack(torch._foreach_norm(list(tensors), 2)).isfinite()
    for i in torch.nonzero(~finite).flatten().tolist():
        finite[i] = tensors[i].isfinite().all()
    return finite


def _described(local: Tensor) -> str:
    bad = ~local.isfinite()
    index = tuple(torch.nonzero(bad)[0].tolist())
    value = local[index].item()
    if local.ndim == 0:
        return f"it is {value}"
    return f"{int(bad.sum())} of {local.numel()} elements of its part, the first at {index}: {value}"


# ---- counting ------------------------------------------------------------------------------------------------

# By identity: tensors compare elementwise.
_bad = WeakIdKeyDictionary()


def _bad_steps(owner: object, more: int = 0) -> int:
    if owner is None:
        return more
    if more:
        _bad[owner] = _bad.get(owner, 0) + more
    return int(_bad.get(owner, 0))
