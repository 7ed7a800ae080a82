"""Expected bytes per rank as sums of named terms, from layouts and a policy alone.

Each function returns the terms at one moment, so that a test that counts bytes, or a report, can say
*which* term is wrong. Notation of the comments: P padded elements of a unit, W ranks, c compute itemsize.
What is not here: activations, optimizer state, allocator overhead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .gather import GatherPlan
from .pack import Pack, ReduceLayout
from .shard import require_int


class Term(NamedTuple):
    """One named part of an expected number of bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """What the memory of one unit depends on. Units are given in the order of forward execution."""

    name: str
    pack: Pack
    plan: GatherPlan
    storage_itemsize: int
    compute_itemsize: int
    # Bytes per element of what a reduction sends: those of the gradient, or of the reduce dtype.
    wire_itemsize: int
    # Whether full parameters are freed after forward; the root usually keeps them.
    reshard: bool = True

    def __post_init__(self) -> None:
        for field in ("storage_itemsize", "compute_itemsize", "wire_itemsize"):
            require_int(f"{field} of {self.name!r}", getattr(self, field), 1, "use layout.itemsize(dtype)")

    @property
    def shard_nbytes(self) -> int:
        """The flat local buffer."""
        return self.pack.padded_local_numel * self.storage_itemsize

    @property
    def full_nbytes(self) -> int:
        """cP: the full parameters. Nothing in a world of one whose compute dtype is the storage dtype."""
        if self.pack.world == 1 and self.compute_itemsize == self.storage_itemsize:
            return 0
        return self.pack.full_numel * self.compute_itemsize

    @property
    def staging_nbytes(self) -> int:
        """The buffer that a packed gather fills and from which it is copied out."""
        return self.plan.staging_numel(self.pack) * self.compute_itemsize

    @property
    def gradient_nbytes(self) -> int:
        """The full gradients as autograd makes them: compute dtype, no padding."""
        return self.pack.numel * self.compute_itemsize

    @property
    def send_nbytes(self) -> int:
        """The send buffer of the gradient reduction; a world of one sends nothing."""
        return 0 if self.pack.world == 1 else ReduceLayout(self.pack).numel * self.wire_itemsize

    @property
    def reduced_nbytes(self) -> int:
        """The gradient shards in the storage dtype."""
        return self.pack.padded_local_numel * self.storage_itemsize


def total(terms: Sequence[Term]) -> int:
    """The sum of the terms in bytes."""
    return sum(term.nbytes for term in terms)


def shard_terms(units: Sequence[UnitMemory]) -> list[Term]:
    """The flat buffers that exist all the time: one term per unit."""
    return [Term(f"shards of {unit.name}", unit.shard_nbytes) for unit in units]


def forward_terms(units: Sequence[UnitMemory], current: int, *, prefetch_depth: int = 1) -> list[Term]:
    """While units[current] computes its forward and the next `prefetch_depth` units are being gathered."""
    _check(units, current, prefetch_depth)
    ahead = range(current + 1, min(current + 1 + prefetch_depth, len(units)))
    kept = [Term(f"full {unit.name} (kept)", unit.full_nbytes) for unit in units[:current] if not unit.reshard]
    return [
        *shard_terms(units),
        *kept,
        Term(f"full {units[current].name}", units[current].full_nbytes),
        *_gathering(units, ahead),
    ]


def backward_terms(
    units: Sequence[UnitMemory], current: int, *, prefetch_depth: int = 1, reductions_in_flight: int = 1
) -> list[Term]:
    """When the gradients of units[current] are ready and the reductions of the units behind it are in flight.

    `reductions_in_flight` counts the earlier reductions (units current + 1, ...) whose send buffers still
    exist. Their gradients are gone: they were copied into the send buffer.
    """
    _check(units, current, prefetch_depth)
    require_int("reductions_in_flight", reductions_in_flight, 0, "0 waits for each reduction at once")
    ahead = [i for i in range(current - 1, max(-1, current - 1 - prefetch_depth), -1) if units[i].reshard]
    sending = range(current + 1, min(current + 1 + reductions_in_flight, len(units)))
    kept = [Term(f"full {unit.name} (kept)", unit.full_nbytes) for unit in units[:current] if not unit.reshard]
    return [
        *shard_terms(units),
        *kept,
        Term(f"full {units[current].name}", units[current].full_nbytes),
        *_gathering(units, ahead),
        Term(f"gradients of {units[current].name}", units[current].gradient_nbytes),
        *(Term(f"reduction of {units[i].name}", units[i].send_nbytes) for i in sending),
        *(Term(f"reduced shards of {unit.name}", unit.reduced_nbytes) for unit in units[current + 1 :]),
    ]


def peak(
    units: Sequence[UnitMemory], *, prefetch_depth: int = 1, reductions_in_flight: int = 1
) -> tuple[str, list[Term]]:
    """The largest of all these moments: its name (`forward layers.3`) and its terms; of equals the first."""
    moments = [
        (f"forward {unit.name}", forward_terms(units, i, prefetch_depth=prefetch_depth)) for i, unit in enumerate(units)
    ] + [
        (
            f"backward {units[i].name}",
            backward_terms(units, i, prefetch_depth=prefetch_depth, reductions_in_flight=reductions_in_flight),
        )
        for i in reversed(range(len(units)))
    ]
    if not moments:
        raise ValueError("units: expected at least one, found none; give the units in order of execution")
    return max(moments, key=lambda moment: total(moment[1]))


def _gathering(units: Sequence[UnitMemory], indices: Sequence[int]) -> list[Term]:
    terms = [Term(f"full {units[i].name} (next)", units[i].full_nbytes) for i in indices]
    staging = [Term(f"staging of {units[i].name}", units[i].staging_nbytes) for i in indices]
    return terms + [term for term in staging if term.nbytes]


def _check(units: Sequence[UnitMemory], current: int, prefetch_depth: int) -> None:
    require_int("prefetch_depth", prefetch_depth, 0, "0 gathers each unit when it is needed")
    if not 0 <= current < len(units):
        raise ValueError(f"current: expected 0 <= current < {len(units)}, found {current!r}; give a unit's position")
