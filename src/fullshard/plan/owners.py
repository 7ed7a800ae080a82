"""Muon in a plan: matrices are stepped whole by their owners (`fullshard.step_on_owners`), the rest by AdamW.

Counted by the plan that the library itself makes (`layout.owners`), with gradients in the dtype of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..layout import FleetPlan, Matrix, ShardLayout, itemsize, newton_schulz_flops
from .account import OwnersStep
from .description import Parameter
from .strategy import Unit

# As `extras/owners.py` has it.
_CHUNK_NBYTES = 256 << 20


def owners_step(units: Iterable[Unit], ranks: int) -> OwnersStep:
    """The step of the matrices of `units` on the `ranks` that share them."""
    matrices = [
        _matrix(parameter, ranks)
        for parameter in sorted((p for unit in units for p in unit.shape.parameters), key=lambda one: one.place)
        if parameter.is_stepped and parameter.is_matrix
    ]
    if ranks == 1 or not matrices:
        flops = sum(newton_schulz_flops(one.shape) for one in matrices)
        return OwnersStep(flops, 0, 0, 0, max((one.made_nbytes for one in matrices), default=0))
    plan = FleetPlan(matrices, range(ranks), _CHUNK_NBYTES, newton_schulz_flops)
    # The rank of the most work stands for all.
    rank = max(range(ranks), key=lambda one: plan.loads[one])
    made = max((matrix.made_nbytes for matrix, owner in zip(matrices, plan.owners, strict=True) if owner == rank))
    sent = max(sum(plan.sent_nbytes(one)) for one in _some(ranks))
    nbytes = max(plan.transient_nbytes(one) for one in {rank, *_some(ranks)}) + made
    return OwnersStep(plan.loads[rank], plan.messages, plan.chunks, sent, nbytes)


def _some(ranks: int) -> set[int]:
    """Enough ranks to find the one that has the most of a model's matrices: the first ones have all rows of small
    matrices."""
    return set(range(min(ranks, 16)))


def _matrix(parameter: Parameter, ranks: int) -> Matrix:
    layout, size = ShardLayout(parameter.shape, parameter.placed, ranks), itemsize(parameter.dtype)
    parts = tuple(layout.local_numel(rank) for rank in range(ranks))
    return Matrix(parameter.name, None, parameter.shape, parts, (size,) * 3, (size,) * 2)
