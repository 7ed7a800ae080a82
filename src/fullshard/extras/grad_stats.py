"""Figures of whole gradients, equal on every rank. A DTensor's norm that is read as a number is this rank's part of it.

Each rank sums over its own rows; for each mesh one message adds the sums of all parameters and one finds their maxima.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..api.clip import further_axes, summed_over
from ..comm import all_reduce_over
from ..engine import unit_of
from ..engine.names import clean_name
from ..engine.stages import is_copy
from ..param import NormMesh, PendingGrad
from ..policy.arguments import expect_module
from .check_gradients import named_gradients, values_here


@dataclass(frozen=True)
class GradientFigures:
    """The figures of the gradient of one parameter, or of all of them in a unit or a model.

    norm: the Euclidean one. mean: of the elements. max: the largest absolute value. All three as of one tensor in
        float64: NaN or inf where an element is.
    nonfinite: the share of elements that are NaN or inf, from 0 to 1.
    numel: how many elements there are. Without any, the others are 0.
    """

    norm: float
    mean: float
    max: float
    nonfinite: float
    numel: int


@dataclass(frozen=True)
class GradientStats:
    """The result of `grad_stats`, the same on every rank.

    model: of all gradients. With `groups`, of those of all stages.
    units: by the name of the unit, as `fullshard.report` gives it ("" is the root); "in no unit" for plain parameters.
    parameters: by dotted name, in model order; a tied parameter once.
    without: the names of parameters that have no gradient, and are in none of the above.
    """

    model: GradientFigures
    units: dict[str, GradientFigures]
    parameters: dict[str, GradientFigures]
    without: tuple[str, ...]


def grad_stats(model: nn.Module, *, groups: Sequence[dist.ProcessGroup | DeviceMesh] | None = None) -> GradientStats:
    """Norm, mean, largest absolute value and share of NaN and inf of the gradients: by parameter, by unit, and of all.

        loss.backward()
        stats = fullshard.grad_stats(model)         # after a scaler's unscale_(); before clipping, or after it
        print(stats.model.norm, stats.parameters["head.weight"].max)
        if stats.model.nonfinite:                   # all ranks go one way

    `float(p.grad.norm())`, `p.grad.abs().max().item()` and `if p.grad.isnan().any()` read this rank's rows alone: with
    equal shards the norm is too small by the root of the number of ranks, and ranks part at the `if`.

    model: a module, sharded or not. Every `.grad` counts: on any mesh, in host memory, in any dtype, and of plain
        parameters, which are taken to be equal on all ranks. Sums are in float64, and gradients stay as they are. Each
        rank's part of an expert on a submesh counts, as in clipping: the figures are of all experts of that name.
    groups: further process groups or meshes, whose ranks have other parameters of the model, as in `clip_grad_norm_`;
        they count in `model` alone.
    Collective: the ranks of all meshes call it. One sum of 48 bytes and one maximum of 8 bytes for each parameter, in
    one message each for each mesh axis that shards, whatever the number of parameters. It waits for the gradients on
    a device, and reads them four times: for a log, not for each of many micro-batches.
    Raises `RuntimeError` for a gradient that was accumulated but not reduced, and on all ranks for one that only some
    of them have; `NotImplementedError` for one that is a sum not yet taken (`Partial`).
    """
    expect_module("model", model)
    named = named_gradients(model)
    further = further_axes([parameter for _, parameter in named], groups, "grad_stats")
    sums = _over_ranks(named)
    units = _units_of_parameters(model)
    by_unit: dict[str, list[_Sums]] = {name: [] for name in units.values()}
    parameters, without, found = {}, [], []
    for (name, parameter), sum_ in zip(named, sums, strict=True):
        if not sum_.ranks:
            without.append(name)
            continue
        if not is_copy(parameter):  # a stage before counts it
            found.append(sum_)
        parameters[name] = sum_.figures()
        by_unit.setdefault(units.get(id(parameter), "in no unit"), []).append(sum_)
    whole = _added(found)
    for group in further:
        whole = _summed([whole], [group], torch.device("cpu"))[0]
    return GradientStats(
        whole.figures(),
        {name: _added(own).figures() for name, own in by_unit.items() if own},
        parameters,
        tuple(without),
    )


def _units_of_parameters(model: nn.Module) -> dict[int, str]:
    """The name of the unit of each sharded parameter, by id."""
    found: dict[int, str] = {}
    for name, module in model.named_modules():
        unit = unit_of(module)
        for param in unit.params if unit is not None else ():
            found.setdefault(id(param.sharded), clean_name(name))
    return found


# ---- sums ------------------------------------------------------------------------------------------------------------


class _Sums(NamedTuple):
    """The sums of the elements of one gradient on some ranks. `ranks`: how many have it. `largest`: inf for a NaN
    too."""

    squares: float = 0.0
    total: float = 0.0
    nans: float = 0.0
    infs: float = 0.0
    numel: float = 0.0
    ranks: float = 0.0
    largest: float = 0.0

    def figures(self) -> GradientFigures:
        if not self.numel:
            return GradientFigures(0.0, 0.0, 0.0, 0.0, 0)
        return GradientFigures(
            norm=math.sqrt(self.squares),
            mean=self.total / self.numel,
            max=math.nan if self.nans else self.largest,
            nonfinite=(self.nans + self.infs) / self.numel,
            numel=round(self.numel),
        )

    def shared_by(self, copies: int) -> _Sums:
        """The part of one of `copies` ranks that have the same elements."""
        squares, total, nans, infs, numel, *kept = self
        return _Sums._make([*(x / copies for x in (squares, total, nans, infs, numel)), *kept])


def _added(sums: Sequence[_Sums]) -> _Sums:
    if not sums:
        return _Sums()
    *columns, largest = zip(*sums, strict=True)
    return _Sums._make([*map(sum, columns), max(largest)])


def _over_ranks(named: Sequence[tuple[str, Tensor]]) -> list[_Sums]:
    """Returns for each parameter the sums over all of its ranks."""
    here = _here([_gradient(parameter) for _, parameter in named])
    # Parameters without a gradient here take part: ranks have to agree on the messages.
    alike: dict[tuple[dist.ProcessGroup, ...], list[tuple[int, int, bool]]] = {}
    for i, (_, parameter) in enumerate(named):
        sharded = parameter.grad if isinstance(parameter.grad, DTensor) else parameter
        if isinstance(sharded, DTensor):
            whole = NormMesh.of(parameter)
            over, copies = summed_over(sharded.device_mesh, tuple(sharded.placements), whole)
            if over:
                alike.setdefault(over, []).append((i, copies, whole is not None))
                device = torch.device(sharded.device_mesh.device_type)
    for over, places in alike.items():
        mine = [here[i].shared_by(copies) for i, copies, _ in places]
        ranks = math.prod(group.size() for group in over)
        for (i, _, is_expert), sums in zip(places, _summed(mine, over, device), strict=True):
            if 0 < sums.ranks < ranks and not is_expert:
                raise RuntimeError(
                    f"grad_stats: expected a gradient of {named[i][0]} on all {ranks} ranks that share it or on none, "
                    f"found one on {round(sums.ranks)}; set .grad to None on all of them, or leave it"
                )
            here[i] = sums
    return here


def _summed(sums: Sequence[_Sums], groups: Sequence[dist.ProcessGroup], device: torch.device) -> list[_Sums]:
    """The sums over the ranks of `groups`, one axis after the other."""
    table = torch.tensor([one[:-1] for one in sums], dtype=torch.float64, device=device)
    largest = torch.tensor([one.largest for one in sums], dtype=torch.float64, device=device)
    for group in groups:
        all_reduce_over(table, group, dist.ReduceOp.SUM, "grad_stats")
        all_reduce_over(largest, group, dist.ReduceOp.MAX, "grad_stats")
    return [_Sums._make([*row, most]) for row, most in zip(table.tolist(), largest.tolist(), strict=True)]


def _gradient(parameter: Tensor) -> tuple[Tensor, int] | None:
    """This rank's values, and how many elements they are of (a sparse gradient has fewer values)."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if isinstance(gradient, PendingGrad):
        gradient.to_local()  # raises, with the reason
    values = values_here(gradient).detach()
    return values, gradient.numel() if gradient.is_sparse else values.numel()


_FIGURES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda values: torch.linalg.vector_norm(values, dtype=torch.float64),
    lambda values: values.sum(dtype=torch.float64),
    lambda values: torch.linalg.vector_norm(values, math.inf).double(),
)


@torch.no_grad()
def _here(gradients: Sequence[tuple[Tensor, int] | None]) -> list[_Sums]:
    """Returns the figures of this rank's values alone. The host waits once for each device."""
    sums = [_Sums() if found is None else _Sums(numel=found[1], ranks=1) for found in gradients]
    by_device: dict[torch.device, list[int]] = {}
    for i, found in enumerate(gradients):
        if found is not None and found[0].numel():
            by_device.setdefault(found[0].device, []).append(i)
    for places in by_device.values():
        values = [_real(found[0]) for i in places if (found := gradients[i]) is not None]
        table = torch.stack([torch.stack([figure(one) for figure in _FIGURES]) for one in values]).tolist()
        for i, one, (norm, total, largest) in zip(places, values, table, strict=True):
            nans = infs = 0
            if not math.isfinite(largest):
                nans, infs = int(one.isnan().sum()), int(one.isinf().sum())
            sums[i] = _Sums(norm**2, total, nans, infs, sums[i].numel, 1, math.inf if nans else largest)
    return sums


def _real(values: Tensor) -> Tensor:
    return torch.view_as_real(values) if values.is_complex() else values
