"""Bytes of one unit: of its shards, its full parameters and its messages, each from its layout and its dtypes; and what
fits into a number of bytes.

When they exist, and how many of them at once, is found by running the rules: `plan.moments`. Notation of the comments:
P padded elements of a unit, W ranks, c compute itemsize.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .flat import FACTS_NUMEL, FlatLayout, ReduceLayout, align_up
from .gather import GatherPlan
from .shard import require_int

# Reduced shards that are copied to the host at once, of shards that are there (comm/offload.py).
DOWNLOADS_IN_FLIGHT = 2


class Term(NamedTuple):
    """One named part of an expected byte count."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """The facts that the bytes of one unit depend on, or those of the part of its parameters that is reduced together.

    Its parameters share one storage dtype. Dtypes that differ are expected to differ in bytes per element.
    """

    name: str
    pack: FlatLayout
    plan: GatherPlan
    storage_itemsize: int
    compute_itemsize: int
    # The bytes per element that a reduction sends: those of the gradient, or of the reduce dtype.
    wire_itemsize: int
    # Whether gradients are exchanged (all-to-all) and added here, or reduced by the backend.
    exchanges: bool = True
    # The number of ranks that hold the same shards, including this one, and bytes per element of the sum: those of the
    # sum dtype, or of the reduce dtype where nothing is sharded or the backend reduces.
    replicas: int = 1
    sum_itemsize: int = 4
    # The part of this rank, for an integer `reshard_after_forward`, between forward and backward (`layout.gather`),
    # over the ranks of its block.
    kept: FlatLayout | None = None
    # The positions of the parameters whose gradients are sent from where autograd left them (layout.direct_gradients).
    direct_gradients: tuple[int, ...] = ()
    # The bytes per element of the gradients of earlier backwards, to which the last of a window adds its own; 0: none.
    held_itemsize: int = 0
    # Whether shards and their gradients are on the host.
    offloaded: bool = False
    # Whether the bytes of the full parameters stay between uses (`set_keep_unsharded_storage`).
    stays: bool = False
    # Whether gradients are exchanged and added here in two levels (`layout.levels`).
    in_levels: bool = False

    def __post_init__(self) -> None:
        for field in ("storage_itemsize", "compute_itemsize", "wire_itemsize", "replicas", "sum_itemsize"):
            require_int(f"{field} of {self.name!r}", getattr(self, field), 1, "use layout.itemsize(dtype)")

    @property
    def sums_here(self) -> bool:
        """Whether gradients are added here, and not by the backend."""
        return self.exchanges or self.in_levels

    @property
    def shard_nbytes(self) -> int:
        """The flat local buffer."""
        return self.pack.padded_local_numel * self.storage_itemsize

    @property
    def full_nbytes(self) -> int:
        """cP: the full parameters. 0 in a world of one whose compute dtype is the storage dtype, without offload."""
        if self.pack.world == 1 and self.compute_itemsize == self.storage_itemsize and not self.offloaded:
            return 0
        return self.pack.full_numel * self.compute_itemsize

    @property
    def arriving_nbytes(self) -> int:
        """Full parameters while their gather is in flight: a direct gather arrives in them, a packed one does not."""
        return self.transient_nbytes if self.pack.world > 1 and self.plan.direct else 0

    @property
    def transient_nbytes(self) -> int:
        """The full parameters, if their bytes are freed after use."""
        return 0 if self.stays else self.full_nbytes

    @property
    def staging_nbytes(self) -> int:
        """The buffer that a packed gather fills and from which it is copied out."""
        return self.plan.staging_numel(self.pack) * self.compute_itemsize

    @property
    def kept_nbytes(self) -> int:
        """cP/k: the part kept between forward and backward, for an integer `reshard_after_forward` of k."""
        return 0 if self.kept is None else self.kept.padded_local_numel * self.compute_itemsize

    @property
    def secondary_staging_nbytes(self) -> int:
        """The staging buffer of an all-gather of secondary shards over a block."""
        return 0 if self.kept is None else self.plan.staging_numel(self.kept) * self.compute_itemsize

    @property
    def gather_nbytes(self) -> int:
        """The memory that a gather takes: full parameters and staging. Casting shards needs no buffer."""
        return self.transient_nbytes + self.staging_nbytes

    @property
    def uploaded_nbytes(self) -> int:
        """The shards on the device while they are gathered, if they are on the host otherwise."""
        return self.shard_nbytes if self.offloaded else 0

    @property
    def held_nbytes(self) -> int:
        """The gradients of earlier backwards, whole: there until the backward that reduces them has ended."""
        return self.pack.numel * self.held_itemsize

    @property
    def gradient_nbytes(self) -> int:
        """The full gradients as autograd makes them: compute dtype, no padding."""
        return self.pack.numel * self.compute_itemsize

    @property
    def sent_itemsize(self) -> int:
        """Bytes per element of the send buffer. Where nothing is sharded, it is the buffer that the replicas sum."""
        return self.wire_itemsize if self.pack.world > 1 else self.sum_itemsize

    @property
    def _chunk_numel(self) -> int:
        carries = self.exchanges and self.pack.world > 1
        return ReduceLayout(self.pack, facts_numel=FACTS_NUMEL if carries else 0).chunk_numel

    @property
    def send_nbytes(self) -> int:
        """The send buffer of the gradient reduction; a single rank sends nothing."""
        if self.pack.world == 1 and self.replicas == 1:
            return 0
        # As if the direct parameters were last in the flat layout: the bytes are the same.
        chunk = self._chunk_numel - sum(
            align_up(self.pack.segments[i].padded_numel, self.pack.align_numel) for i in self.direct_gradients
        )
        return self.pack.world * chunk * self.sent_itemsize

    @property
    def leaving_nbytes(self) -> int:
        """Gradients that stay alive while they are sent, because no send buffer holds a copy of them."""
        return sum(self.pack.segments[i].layout.numel for i in self.direct_gradients) * self.wire_itemsize

    @property
    def receive_nbytes(self) -> int:
        """The receive buffer: the chunks of all ranks when they are added here, one chunk when the backend adds.

        Where ranks send to each other, this rank's own chunk does not travel."""
        if self.pack.world == 1:
            return 0
        if not self.sums_here:
            return self._chunk_numel * self.sent_itemsize
        if self.direct_gradients:
            return (self.pack.world - 1) * self._chunk_numel * self.wire_itemsize
        return self.send_nbytes

    @property
    def replicating_nbytes(self) -> int:
        """This rank's chunk during the sum over replicas; 0 where nothing is sharded (the send buffer is summed)."""
        if self.pack.world == 1 or self.replicas == 1:
            return 0
        return self._chunk_numel * self.sum_itemsize

    @property
    def reduced_nbytes(self) -> int:
        """The gradient shards in the storage dtype: views of one chunk with its flags. With one rank: its gradients."""
        if self.pack.world == 1 and self.replicas == 1:
            return self.pack.numel * self.storage_itemsize
        return self._chunk_numel * self.storage_itemsize


def total(terms: Sequence[Term]) -> int:
    """The sum of the terms in bytes."""
    return sum(term.nbytes for term in terms)


# ---- budget ----------------------------------------------------------------------------------------------------------
# What fits into a budget of bytes: gathers that run ahead, and units that stay full after forward.


def leading_within(costs: Iterable[int], nbytes: int) -> int:
    """How many of the first `costs` fit into `nbytes` together. Everything after the first misfit has to wait.

    >>> leading_within([4, 4, 1], 8), leading_within([9, 1], 8), leading_within([0, 0, 1], 0)
    (2, 0, 2)
    """
    count = used = 0
    for cost in costs:
        used += cost
        if used > nbytes:
            break
        count += 1
    return count


class Candidate(NamedTuple):
    """A unit that could stay full: the bytes of its full parameters, and whether none of them is trained."""

    name: str
    nbytes: int
    frozen: bool


def choose_resident(candidates: Sequence[Candidate], nbytes: int) -> tuple[int, ...]:
    """Positions of the candidates that stay full within `nbytes`, ascending. Candidates are in definition order.

    Frozen units come first: nothing writes them, so they stay from step to step, and the same bytes save the gathers of
    both forward and backward. Among equals the last comes first, because its time between forward and backward is
    short. A unit that does not fit is skipped; smaller ones after it may still fit. A unit without its own memory is
    never chosen.

    >>> units = [Candidate("a", 4, False), Candidate("b", 4, True), Candidate("c", 6, False), Candidate("d", 3, False)]
    >>> [units[i].name for i in choose_resident(units, 8)], [units[i].name for i in choose_resident(units, 3)]
    (['b', 'd'], ['d'])
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
        raise ValueError(f"nbytes: expected an int >= 0, found {nbytes!r}; 0 keeps no unit")
    chosen, left = [], nbytes
    for i in sorted(range(len(candidates)), key=lambda i: (not candidates[i].frozen, -i)):
        if 0 < candidates[i].nbytes <= left:
            chosen.append(i)
            left -= candidates[i].nbytes
    return tuple(sorted(chosen))
