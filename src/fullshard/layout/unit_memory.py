"""What the bytes of one unit depend on, and how many there are of each kind. See `memory` for when they are there.

Notation of the comments: P padded elements of a unit, W ranks; c compute itemsize.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .chunks import FACTS_NUMEL, ReduceLayout
from .gather import GatherPlan
from .pack import Pack, align_up
from .shard import require_int


class Term(NamedTuple):
    """One named part of an expected number of bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """What the memory of one unit depends on. Units are given in the order in which their forwards begin.

    Its parameters have one storage dtype. Dtypes that differ are expected to differ in their bytes per element.
    """

    name: str
    pack: Pack
    plan: GatherPlan
    storage_itemsize: int
    compute_itemsize: int
    # Bytes per element of what a reduction sends: those of the gradient, or of the reduce dtype.
    wire_itemsize: int
    # Whether full parameters are freed after forward; the root usually keeps them.
    reshard: bool = True
    # Whether all units behind it run inside its forward: the root. Its gradients are expected to be complete last, as
    # those of an embedding are; where they come first, it is freed earlier than the terms say.
    outer: bool = False
    # Whether gradients are exchanged (all-to-all) and added here, or reduced by the backend.
    exchanges: bool = True
    # How many ranks hold the same shards, this one included, and bytes per element of what they sum: those of the sum
    # dtype, or of the reduce dtype where nothing is cut or the backend reduces.
    replicas: int = 1
    sum_itemsize: int = 4
    # Of an integer `reshard_after_forward`: this rank's part between forward and backward (`layout.narrow`), over the
    # ranks of its block.
    kept: Pack | None = None
    # Positions of the parameters whose gradients are sent from where autograd left them (layout.direct_gradients).
    direct_gradients: tuple[int, ...] = ()
    # Their parts arrive from all ranks, this one too, each in a message of its own (comm/direct.py).
    grouped: bool = False
    # On how many nodes the ranks are, where gradients are reduced in two hops (layout/nodes.py), and bytes per element
    # of what a node sends to others; 1: in one hop.
    nodes: int = 1
    partial_itemsize: int = 4
    # None of its parameters is trained: there are no gradients and nothing is sent. With `reshard` off it stays full
    # from step to step (`set_resident_bytes`).
    frozen: bool = False

    def __post_init__(self) -> None:
        if self.kept is not None and not self.reshard:
            raise ValueError(
                f"kept of {self.name!r}: expected None where full parameters stay after forward (reshard=False), found "
                f"a pack; a part is kept of what is freed"
            )
        for field in ("storage_itemsize", "compute_itemsize", "wire_itemsize", "replicas", "sum_itemsize", "nodes"):
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
    def arriving_nbytes(self) -> int:
        """Full parameters while their gather is under way: a direct gather arrives in them, a packed one does not."""
        return self.full_nbytes if self.pack.world > 1 and self.plan.direct else 0

    @property
    def staging_nbytes(self) -> int:
        """The buffer that a packed gather fills and from which it is copied out."""
        return self.plan.staging_numel(self.pack) * self.compute_itemsize

    @property
    def kept_nbytes(self) -> int:
        """cP/k: the part that is kept between forward and backward, for an integer `reshard_after_forward` of k."""
        return 0 if self.kept is None else self.kept.padded_local_numel * self.compute_itemsize

    @property
    def widening_nbytes(self) -> int:
        """As `staging_nbytes`, of a gather from kept parts over a block."""
        return 0 if self.kept is None else self.plan.staging_numel(self.kept) * self.compute_itemsize

    @property
    def gather_nbytes(self) -> int:
        """All that a gather takes: the full parameters and staging. Shards that are cast need no buffer."""
        return self.full_nbytes + self.staging_nbytes

    @property
    def lasting(self) -> bool:
        """Whether full parameters stay from step to step."""
        return self.frozen and not self.reshard and not self.outer

    @property
    def gradient_nbytes(self) -> int:
        """The full gradients as autograd makes them: compute dtype, no padding."""
        return 0 if self.frozen else self.pack.numel * self.compute_itemsize

    @property
    def sent_itemsize(self) -> int:
        """Bytes per element of the send buffer. Where nothing is cut, it is what the replicas sum."""
        return self.wire_itemsize if self.pack.world > 1 else self.sum_itemsize

    @property
    def _chunk_numel(self) -> int:
        carries = self.exchanges and self.pack.world > 1
        return ReduceLayout(self.pack, facts_numel=FACTS_NUMEL if carries else 0).chunk_numel

    @property
    def send_nbytes(self) -> int:
        """The send buffer of the gradient reduction; one rank in all sends nothing."""
        if self.frozen or (self.pack.world == 1 and self.replicas == 1):
            return 0
        # As if the direct ones were the last of the pack: the same bytes.
        chunk = self._chunk_numel - sum(
            align_up(self.pack.segments[i].padded_numel, self.pack.align_numel) for i in self.direct_gradients
        )
        return self.pack.world * chunk * self.sent_itemsize

    @property
    def leaving_nbytes(self) -> int:
        """Gradients that live on while they are being sent, because no send buffer has a copy of them."""
        if self.frozen:
            return 0
        return sum(self.pack.segments[i].layout.numel for i in self.direct_gradients) * self.wire_itemsize

    @property
    def receive_nbytes(self) -> int:
        """What arrives: the chunks of all ranks when they are added here, one chunk when the backend adds.

        This rank's own chunk does not have to arrive where ranks send to each other."""
        if self.frozen or self.pack.world == 1:
            return 0
        if self.grouped:
            padded = sum(self.pack.segments[i].layout.padded_full_numel for i in self.direct_gradients)
            return self.send_nbytes + padded * self.wire_itemsize
        if self.direct_gradients:
            return (self.pack.world - 1) * self._chunk_numel * self.wire_itemsize
        return self.send_nbytes if self.exchanges else self.send_nbytes // self.pack.world

    @property
    def crossing_nbytes(self) -> int:
        """Both ends of the second hop: a chunk for each node, and one from each."""
        return 2 * self._run_numel * self.partial_itemsize

    @property
    def widest_partial_nbytes(self) -> int:
        """The sums of a node before they are rounded for the second hop; 0 where they are not."""
        return self._run_numel * self.sum_itemsize if self.partial_itemsize < self.sum_itemsize else 0

    @property
    def _run_numel(self) -> int:
        if self.frozen or self.pack.world == 1 or self.nodes == 1:
            return 0
        return self.nodes * self._chunk_numel

    @property
    def replicating_nbytes(self) -> int:
        """This rank's chunk while it is summed over the replicas; where nothing is cut, the send buffer is that."""
        if self.frozen or self.pack.world == 1 or self.replicas == 1:
            return 0
        return self._chunk_numel * self.sum_itemsize

    @property
    def reduced_nbytes(self) -> int:
        """The gradient shards in the storage dtype: views of one chunk, presence included. One rank: its gradients."""
        if self.frozen:
            return 0
        if self.pack.world == 1 and self.replicas == 1:
            return self.pack.numel * self.storage_itemsize
        return self._chunk_numel * self.storage_itemsize
