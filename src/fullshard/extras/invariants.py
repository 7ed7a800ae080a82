"""Checks of a training that runs: full parameters are their shards, reduced gradients are the sum of the ranks'.

Two sums of each tensor, in float64, stand for it: of its squares, and of its rows weighted with cos(1), cos(2), ... in
the order of the rows, which notices rows that are lost or in another place. Both may be taken of shards and added. The
weighted sum is linear, so that of a reduced gradient is the sum of those of the ranks' gradients, over the divisor.

A checked step costs two passes over each full parameter and over each gradient, and one all-reduce of 64 bytes for
each parameter over each axis of the mesh, for which the host waits at the end of the backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch import local_of
from ..comm import joining_groups, least_over, sum_over, told_by_one
from ..engine import Root, root_of
from ..engine.names import parameter_names
from ..engine.unit import Unit, module_units
from ..param import ExtensionGroup, ParamGroup, ShardedParam
from ..policy.arguments import expect_module, expect_whole
from ..rounding import sums
from ..schedule import Command

_RANK_BITS = 24
_NOTHING = 1 << 62
# A bound is exceeded by rounding alone in one of this many comparisons, at most: more than the longest run makes.
_COMPARISONS = 10**12


class InvariantBroken(RuntimeError):
    """Raised on every rank by a backward with `check_invariants`; the message names parameter, rank and figures."""


@dataclass
class InvariantChecks:
    """The result of `check_invariants`.

    every: of so many synchronised backwards one is checked.
    checked: how many were.
    skipped: names of sharded modules of which something cannot be checked, and what.
    """

    every: int
    checked: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    _roots: list[_RootChecks] = field(default_factory=list, repr=False)

    def remove(self) -> None:
        """End the checks."""
        while self._roots:
            self._roots.pop().detach()


def check_invariants(model: nn.Module, *, every: int = 1) -> InvariantChecks:
    """Check in each `every`-th step of training that messages brought what was sent.

        fullshard.check_invariants(model, every=100)

    At the end of a backward that reduces gradients it checks, for every floating parameter:

    weights: when full parameters are freed after a forward or backward, they are still what the shards hold now. This
        finds a broken gather, and weights that a step, a load or a user's write made stale.
    gradients: the reduced gradient is the sum of those that the ranks sent, over the divisor, within what rounding in
        the reduce dtype explains.
    presence: where a rank produced a gradient, every rank has a reduced one.

    What is broken raises `InvariantBroken` on all ranks, before any `.grad` of that backward is written. Values that
    are not finite are not compared; `check_gradients` is for them.

    A checked step reads each full parameter and each gradient twice more, waits for the device at the end of its
    backward, and sends 64 bytes for each parameter over each axis of the mesh; others cost a comparison. `fullshard
    verify` compares every element with plain training, but only before a run.

    every: at least 1. All ranks pass the same.
    Raises `ValueError` for a model without sharded parts, or a number below 1. Modules with all-reduce hooks, with a
    step in backward, or with extensions of the all-gather are checked in part: see `skipped` of the result.
    """
    expect_module("model", model)
    every = expect_whole("every", every, 1)
    roots: list[Root] = []
    for unit in module_units(model):
        root = root_of(unit)
        if root not in roots:
            roots.append(root)
    if not roots:
        raise ValueError("model: expected a module with sharded parts, found none; apply fully_shard first")
    checks = InvariantChecks(every)
    checks._roots = [_RootChecks(root, checks) for root in roots]
    return checks


# ---- sums ------------------------------------------------------------------------------------------------------------


def _sums(tensor: Tensor, dim: int, start: int) -> Tensor:
    """(2,) float64: the sum of rows along `dim`, weighted by their number, where the first is row `start`; the sum of
    squares."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    others = [axis for axis in range(tensor.ndim) if axis != dim]
    rows = tensor.sum(others, dtype=torch.float64) if others else tensor.double()
    numbers = torch.arange(start + 1, start + 1 + len(rows), dtype=torch.float64, device=tensor.device)
    squares = torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
    return torch.stack([rows @ numbers.cos_(), squares])


class _Place(NamedTuple):
    """A parameter, and its place in the message of its mesh."""

    unit: Unit
    group: ParamGroup
    param: ShardedParam


class _Figures(NamedTuple):
    """The figures of one parameter, over all ranks. `sent` and `got`: how many ranks have a gradient before and
    after."""

    shard_sum: float
    shard_squares: float
    sent_sum: float
    sent_norms: float
    sent: float
    got_sum: float
    got_squares: float
    got: float


# ---- one root --------------------------------------------------------------------------------------------------------


class _RootChecks:
    """The checks of one root: listens to its commands, and observes its gradients."""

    def __init__(self, root: Root, checks: InvariantChecks) -> None:
        self._root, self._checks = root, checks
        self._names = parameter_names(root.units[0].module, root.units)
        self._backwards = 0
        # The sums of full parameters since the last check: their own, those of this rank's shards, and how often.
        self._weights: dict[ShardedParam, tuple[Tensor, Tensor, int]] = {}
        # The weighted sum and norm, and the number, of gradients that this rank sent and of which no result came yet.
        self._sent: dict[ShardedParam, tuple[Tensor, int]] = {}
        self._is_active = not any(unit.gradients.partial_open for unit in root.units)
        root.executor.listeners.append(self._command)
        root.executor.gradient_observers.append(self)

    def detach(self) -> None:
        """Stop listening."""
        self._root.executor.listeners.remove(self._command)
        self._root.executor.gradient_observers.remove(self)

    # ---- what is noted -------------------------------------------------------------------------------------

    def _command(self, command: Command) -> None:
        if self._is_active and command.kind in ("reshard", "reshard_secondary"):
            unit = self._root.executor.units[command.unit.index]
            for group in unit.groups:
                if not group.shares_memory and group.memory.live_nbytes and not self._skips_weights(unit, group):
                    self._note_weights(group)

    def _skips_weights(self, unit: Unit, group: ParamGroup) -> bool:
        if not isinstance(group, ExtensionGroup):
            return False
        self._checks.skipped[unit.record.name] = "weights: an extension makes them of what was gathered"
        return True

    @torch.no_grad()
    def _note_weights(self, group: ParamGroup) -> None:
        for param in group.params:
            if not _is_checked(param):
                continue
            dim = param.layout.dim
            full = local_of(param.full) if isinstance(param.full, DTensor) else param.full.detach()
            shard = param.local.to(full.dtype)
            of_shard = _sums(shard, dim, param.layout.start(group.placing.rank))
            before = self._weights.get(param)
            own = _sums(full, dim, 0)
            if before is not None:
                own, of_shard = own + before[0], of_shard + before[1]
            self._weights[param] = own, of_shard, 1 + (0 if before is None else before[2])

    @torch.no_grad()
    def sends(self, unit: Unit, group: ParamGroup, gradients: Sequence[Tensor | None]) -> None:
        """Does its part of `engine.executor.GradientObserver`."""
        if not self._is_active or self._skips_gradients(unit):
            return
        for position, gradient in zip(group.trainable, gradients, strict=True):
            param = group.params[position]
            if gradient is not None and _is_checked(param):
                weighted, squares = _sums(gradient, param.layout.dim, 0)
                noted, count = torch.stack([weighted, squares.sqrt()]), 1
                if param in self._sent:
                    noted, count = noted + self._sent[param][0], count + self._sent[param][1]
                self._sent[param] = noted, count

    def _skips_gradients(self, unit: Unit) -> bool:
        if unit.gradients.stepper is not None:
            self._checks.skipped[unit.record.name] = "gradients: they are stepped with in backward"
        elif unit.settings.controls.hook is not None:
            self._checks.skipped[unit.record.name] = "gradients: an all-reduce hook may change them"
        else:
            return False
        return True

    # ---- the comparison ------------------------------------------------------------------------------------

    @torch.no_grad()
    def receives(self) -> None:
        """Does its part of `engine.executor.GradientObserver`."""
        synchronised = [unit for unit in self._root.units if unit.record.plan.sync and unit.settings.all_reduces]
        if not synchronised:
            return
        if self._is_active:
            try:
                self._compare(synchronised)
            finally:
                self._weights.clear()
                self._sent.clear()
            self._checks.checked += 1
        self._backwards += 1
        # Partial sums that other modules still hold would arrive with a later result.
        others = any(unit.gradients.partial_open for unit in self._root.units if unit not in synchronised)
        self._is_active = self._backwards % self._checks.every == 0 and not others

    def discards(self) -> None:
        """Does its part of `engine.executor.GradientObserver`."""
        self._weights.clear()
        self._sent.clear()

    def _compare(self, units: Sequence[Unit]) -> None:
        by_mesh: dict[DeviceMesh, list[_Place]] = {}
        for unit in units:
            for group in unit.groups:
                for param in filter(_is_checked, group.params):
                    by_mesh.setdefault(group.placing.mesh, []).append(_Place(unit, group, param))
        if not by_mesh:
            return
        first, what = _NOTHING, ""
        rank = dist.get_rank() if dist.is_initialized() else 0
        for number, (mesh, places) in enumerate(by_mesh.items()):
            device = torch.device(mesh.device_type)
            message = torch.stack([self._message(place).to(device) for place in places])
            total = sum_over(mesh, message, "check_invariants").tolist()
            for position, (place, figures) in enumerate(zip(places, total, strict=True)):
                found = self._broken(place, _Figures(*figures))
                if found and first == _NOTHING:
                    first, what = (number << 20 | position) << _RANK_BITS | rank, f"{self._names[place.param]}: {found}"
        groups = joining_groups(by_mesh)
        device = torch.device(next(iter(by_mesh)).device_type)
        least = int(least_over(groups, torch.tensor(first, device=device)).item())
        if least != _NOTHING:
            own = least == first and least & ((1 << _RANK_BITS) - 1) == rank
            text = told_by_one(groups, what if own else None, device)
            raise InvariantBroken(f"{text}; no gradient of this backward was written")

    def _message(self, place: _Place) -> Tensor:
        """`_Figures` of this rank, in float64."""
        param = place.param
        found = torch.zeros(8, dtype=torch.float64)
        if param in self._weights:
            found[0:2] = self._weights[param][1]
        if param in self._sent:
            found[2:4], found[4] = self._sent[param]
        if param.gradients.reduced is not None and not self._skips_gradients(place.unit):
            found[5:7] = _sums(param.gradients.reduced, param.layout.dim, param.layout.start(place.group.placing.rank))
            found[7] = 1
        return found

    def _broken(self, place: _Place, figures: _Figures) -> str:
        """Says what does not hold, or ""."""
        ranks = place.group.placing.mesh.size()
        return self._broken_weights(place, figures, ranks) or self._broken_gradient(place, figures, ranks)

    def _broken_weights(self, place: _Place, figures: _Figures, ranks: int) -> str:
        if place.param not in self._weights:
            return ""
        own, _, times = self._weights[place.param]
        # Replicas hold the same shards.
        copies = ranks // place.group.placing.world
        wanted = figures.shard_sum / copies, figures.shard_squares / copies
        if not all(map(math.isfinite, wanted)):
            return ""
        terms = times * math.prod(place.param.layout.shape)
        error = sums(torch.float64, terms, _COMPARISONS)
        found = own.tolist()
        allowed = error * math.sqrt(terms * wanted[1]), error * wanted[1]
        if all(abs(f - w) <= a for f, w, a in zip(found, wanted, allowed, strict=True)):
            return ""
        return (
            f"expected the full parameter of rank {dist.get_rank() if dist.is_initialized() else 0} to be what the "
            f"shards hold when it is freed, found {found[0]:.9g} as the weighted sum of its rows where theirs is "
            f"{wanted[0]:.9g}, and {found[1]:.9g} as the sum of squares where theirs is {wanted[1]:.9g}: the gather "
            f"failed, or shards or full parameters were written in between"
        )

    def _broken_gradient(self, place: _Place, figures: _Figures, ranks: int) -> str:
        param = place.param
        if self._skips_gradients(place.unit) or not math.isfinite(figures.sent_sum):
            return ""
        if bool(figures.sent) != bool(figures.got) or figures.got not in (0, ranks):
            return (
                f"expected a reduced gradient on all of {ranks} ranks where one of them produced one, and else on "
                f"none, found {figures.sent:.0f} gradients that were sent and {figures.got:.0f} that arrived"
            )
        divisor = place.unit.settings.controls.divide_factor or ranks
        copies = ranks // place.group.placing.world
        wanted, found = figures.sent_sum / divisor, figures.got_sum / copies
        # Each element is a sum over the ranks in the reduce dtype, then rounded to the dtype of the shard.
        reduced = sums(param.precision.reduce, ranks + 2, _COMPARISONS)
        stored = sums(param.sharded.dtype, 1, _COMPARISONS)
        # Below, numbers of the reduce dtype have fewer digits.
        tiny = torch.finfo(param.precision.reduce).tiny * math.prod(param.layout.shape)
        norm = math.sqrt(figures.got_squares / copies) if figures.got_squares >= 0 else math.nan
        allowed = reduced * figures.sent_norms / divisor + stored * norm + tiny
        if abs(found - wanted) <= allowed:
            return ""
        return (
            f"expected the reduced gradient to be the sum of what {ranks} ranks sent, over {divisor:g}, found "
            f"{found:.9g} as the weighted sum of its rows where that of the ranks' gradients is {wanted:.9g}, and "
            f"rounding explains {allowed:.2g}: the reduction lost, repeated or misplaced a part"
        )


def _is_checked(param: ShardedParam) -> bool:
    dtype = param.sharded.dtype
    return (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1 and len(param.layout.shape) > 0
