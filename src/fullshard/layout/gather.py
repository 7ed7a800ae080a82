"""Decides which parameters of a unit are gathered straight into their final memory, and which travel in one message;
and the bytes of both.

`direct_gradients` makes the same choice for gradients. Both return plain data: computed once per unit from sizes and
backend, and executed elsewhere.

    direct   one gather per parameter; its output is the padded full parameter; nothing is copied afterwards
    packed   one gather of a contiguous range of the flat local buffer into a staging buffer, then a copy-out

The measured reasons (ADR 0005): NCCL groups gathers into one launch, and gloo ranks can send to each other without a
collective, straight between final memories. Large parameters therefore save the staging bytes and the copy; for small
ones a separate message costs more than a copy. A world of one gathers nothing, so nothing is ever staged there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .flat import FACTS_NUMEL, FlatLayout, ReduceLayout, align_up
from .shard import ShardLayout, require_int

# ---- secondary shards ------------------------------------------------------------------------------------------------
# The part of the full parameters that a rank keeps between forward and backward, for an integer
# `reshard_after_forward`.
#
# Rows of dim 0, as `torch.chunk` splits them over the k ranks of a block. Shape (5, 3) on 4 ranks in blocks of 2:
# shards have 2, 2, 1, 0 rows; ranks 0 and 2 keep rows 0 to 2, ranks 1 and 3 keep rows 3 and 4.
#
# A gather over the block fills the same memory as a gather over all ranks, so full parameters do not move. k padded
# parts never exceed the padded shards of all ranks when both are split along the same dim. So a parameter that is
# sharded along another dim is kept along that dim if the padded rows of dim 0 do not fit.


def secondary_layout(pack: FlatLayout, plan: GatherPlan, world: int) -> FlatLayout:
    """The flat layout of secondary shards over the `world` ranks of a block; its full offsets are those of `pack`.

    >>> pack = FlatLayout.build([ShardLayout((5, 3), world=4)], align_numel=4)
    >>> plan = GatherPlan(direct=(0,), packed=())
    >>> kept = secondary_layout(pack, plan, 2)
    >>> kept.segments[0].layout.local_shape(0), kept.padded_local_numel, kept.full_offsets == pack.full_offsets
    ((3, 3), 12, True)
    """
    layouts = [_kept(segment.layout, world) for segment in pack.segments]
    kept = FlatLayout.build(
        layouts, pack.align_numel, first=plan.direct, names=[segment.name for segment in pack.segments]
    )
    return dataclasses.replace(
        kept, full_offsets=pack.full_offsets, full_align_numel=pack.full_align_numel, full_numel=pack.full_numel
    )


def _kept(shards: ShardLayout, world: int) -> ShardLayout:
    rows = ShardLayout(shards.shape, 0, world)
    return rows if rows.full_memory_numel <= shards.full_memory_numel else ShardLayout(shards.shape, shards.dim, world)


# ---- gather ----------------------------------------------------------------------------------------------------------

# Backends that can launch many gathers as one grouped operation.
GROUPING_BACKENDS = frozenset({"nccl"})
# Backends on which an all-to-all with a sum on arrival is faster than their own reduce-scatter (benchmarks/pairs.py),
# and the test backends that replace gloo. On all others the backend reduces, unless a measurement says otherwise.
EXCHANGING_BACKENDS = frozenset({"gloo", "threaded", "fake"})
# Backends whose ranks send to each other at the cost of a system call (comm/group.py), from the host's memory
# alone: gloo's sends and receives know no other. And the bytes from one rank to another from which this pays off, for a
# parameter and for a gradient (benchmarks/pairs.py).
PAIRWISE_BACKENDS = frozenset({"gloo"})
PAIRWISE_PARAMETER_NBYTES = 128 << 10
PAIRWISE_GRADIENT_NBYTES = 256 << 10


def sends_in_pairs(backend: str, *, on_host: bool) -> bool:
    """Whether ranks send to each other on `backend`, without a collective. `on_host`: from the host's memory."""
    return on_host and backend in PAIRWISE_BACKENDS


def groups_messages(backend: str) -> bool:
    """Whether `backend` launches several gathers as one."""
    return backend in GROUPING_BACKENDS


def exchanges_gradients(backend: str) -> bool:
    """Whether ranks of one node exchange gradients on `backend` by default and sum them on arrival."""
    return backend in EXCHANGING_BACKENDS


class Span(NamedTuple):
    """A range [start, stop) of elements of the flat local buffer."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Positions of parameters in the flat layout's layouts, by how they are gathered; both in buffer order."""

    direct: tuple[int, ...]
    packed: tuple[int, ...]

    def __post_init__(self) -> None:
        both = (*self.direct, *self.packed)
        if len(set(both)) != len(both):
            raise ValueError(
                f"direct, packed: expected each parameter once, found direct {self.direct} and "
                f"packed {self.packed}; use plan_gather"
            )

    def packed_span(self, pack: FlatLayout) -> Span:
        """The range of the flat local buffer that forms the packed message; Span(0, 0) when nothing is packed.

        Raises `ValueError` when the packed segments are not contiguous in the buffer.
        """
        if not self.packed:
            return Span(0, 0)
        places = sorted(pack.order.index(index) for index in self.packed)
        if places != list(range(places[0], places[0] + len(places))):
            between = [pack.segments[i].name for i in pack.order[places[0] : places[-1]] if i not in self.packed]
            raise ValueError(
                f"packed: expected one contiguous range of the flat buffer, found {', '.join(between)} "
                f"in between; build the flat layout with first=direct_indices(...)"
            )
        after = places[-1] + 1
        stop = pack.segments[pack.order[after]].offset if after < len(pack.order) else pack.padded_local_numel
        return Span(pack.segments[pack.order[places[0]]].offset, stop)

    def staging_numel(self, pack: FlatLayout) -> int:
        """Elements of the rank-major buffer that receives the packed message; 0 when nothing is packed."""
        return pack.world * self.packed_span(pack).numel

    def staged_segment(self, pack: FlatLayout, index: int, rank: int) -> int:
        """First element, in the staging buffer, of the shard of packed parameter `index` from `rank`."""
        if index not in self.packed:
            raise ValueError(f"index: expected one of the packed parameters {self.packed}, found {index!r}")
        span = self.packed_span(pack)
        return pack.gathered_segment(index, rank) - span.start - rank * (pack.padded_local_numel - span.numel)


def direct_indices(
    layouts: Sequence[ShardLayout],
    itemsize: int,
    *,
    backend: str,
    direct_threshold_nbytes: int | None,
    on_host: bool = True,
) -> tuple[int, ...]:
    """Positions of the parameters to gather directly; pass them to `FlatLayout.build(first=...)`.

    `itemsize`: bytes per element on the wire (compute dtype). `direct_threshold_nbytes` is compared with the bytes of
    the padded full parameter where the backend groups gathers; None asks for one message. `on_host`: parameters are in
    the host's memory. A parameter that is alone in
    its unit is always direct. One whose gathered chunks are not its memory (`ShardLayout.gathers_in_place`) never is,
    unless nothing is gathered (world 1).

    >>> layouts = [ShardLayout((8,), world=2), ShardLayout((64, 64), world=2)]
    >>> direct_indices(layouts, 4, backend="nccl", direct_threshold_nbytes=4096)
    (1,)
    >>> direct_indices(layouts, 4, backend="gloo", direct_threshold_nbytes=4096)
    ()
    """
    require_int("itemsize", itemsize, 1, "use layout.itemsize(dtype)")
    if direct_threshold_nbytes is not None:
        require_int("direct_threshold_nbytes", direct_threshold_nbytes, 0, "0 gathers everything directly")
    if not backend or any(sign in backend for sign in ":, "):
        raise ValueError(
            f"backend: expected the name of one backend such as 'gloo' or 'nccl', found {backend!r}; "
            f"give the backend of the device that holds the parameters"
        )
    if all(layout.world == 1 for layout in layouts):
        return tuple(range(len(layouts)))

    def pays(layout: ShardLayout) -> bool:
        if len(layouts) == 1:
            return True
        if direct_threshold_nbytes is None:
            return False
        if sends_in_pairs(backend, on_host=on_host):
            return layout.padded_local_numel * itemsize >= PAIRWISE_PARAMETER_NBYTES
        return backend in GROUPING_BACKENDS and layout.padded_full_numel * itemsize >= direct_threshold_nbytes

    return tuple(index for index, layout in enumerate(layouts) if layout.gathers_in_place and pays(layout))


def direct_gradients(
    layouts: Sequence[ShardLayout], itemsize: int, *, backend: str, on_host: bool = True
) -> tuple[int, ...]:
    """Positions of the parameters whose gradients are sent from where autograd left them, without a send buffer.

    `itemsize`: bytes per element on the wire (wire dtype). `on_host`: they are in the host's memory. Pass the result to
    `FlatLayout.build(first=...)`.

    >>> direct_gradients([ShardLayout((8,), world=2), ShardLayout((512, 512), world=2)], 4, backend="gloo")
    (1,)
    """
    require_int("itemsize", itemsize, 1, "use layout.itemsize(dtype)")
    if not sends_in_pairs(backend, on_host=on_host):
        return ()
    return tuple(
        index
        for index, layout in enumerate(layouts)
        if layout.world > 1
        and layout.gathers_in_place
        and layout.padded_local_numel * itemsize >= PAIRWISE_GRADIENT_NBYTES
    )


def plan_gather(
    pack: FlatLayout, itemsize: int, *, backend: str, direct_threshold_nbytes: int | None, on_host: bool = True
) -> GatherPlan:
    """The plan for `pack`; arguments as in `direct_indices`.

    Raises `ValueError` when the packed parameters are not contiguous: build with `first=direct_indices(...)`.
    """
    layouts = [segment.layout for segment in pack.segments]
    options = {"backend": backend, "direct_threshold_nbytes": direct_threshold_nbytes, "on_host": on_host}
    direct = frozenset(direct_indices(layouts, itemsize, **options))  # type: ignore[arg-type]
    plan = GatherPlan(
        direct=tuple(index for index in pack.order if index in direct),
        packed=tuple(index for index in pack.order if index not in direct),
    )
    plan.packed_span(pack)  # raises unless the packed parameters form one message
    return plan


# ---- bytes -----------------------------------------------------------------------------------------------------------
# Bytes of one unit: of its shards, its full parameters and its messages, each from its layout and its dtypes; and what
# fits into a number of bytes.
#
# When they exist, and how many of them at once, is found by running the rules: `plan.moments`. Notation: P padded
# elements of a unit, W ranks, c compute itemsize.

# Reduced shards that are copied to the host at once, of shards that are there (comm/offload.py).
DOWNLOADS_IN_FLIGHT = 2


class Term(NamedTuple):
    """One named part of an expected byte count."""

    name: str
    nbytes: int


@dataclass(frozen=True)
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

    @cached_property
    def shard_nbytes(self) -> int:
        """The flat local buffer."""
        return self.pack.padded_local_numel * self.storage_itemsize

    @cached_property
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

    @cached_property
    def staging_nbytes(self) -> int:
        """The buffer that a packed gather fills and from which it is copied out."""
        return self.plan.staging_numel(self.pack) * self.compute_itemsize

    @cached_property
    def kept_nbytes(self) -> int:
        """cP/k: the part kept between forward and backward, for an integer `reshard_after_forward` of k."""
        return 0 if self.kept is None else self.kept.padded_local_numel * self.compute_itemsize

    @cached_property
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

    @cached_property
    def held_nbytes(self) -> int:
        """The gradients of earlier backwards, whole: there until the backward that reduces them has ended."""
        return self.pack.numel * self.held_itemsize

    @cached_property
    def gradient_nbytes(self) -> int:
        """The full gradients as autograd makes them: compute dtype, no padding."""
        return self.pack.numel * self.compute_itemsize

    @property
    def sent_itemsize(self) -> int:
        """Bytes per element of the send buffer. Where nothing is sharded, it is the buffer that the replicas sum."""
        return self.wire_itemsize if self.pack.world > 1 else self.sum_itemsize

    @cached_property
    def _chunk_numel(self) -> int:
        carries = self.exchanges and self.pack.world > 1
        return ReduceLayout(self.pack, facts_numel=FACTS_NUMEL if carries else 0).chunk_numel

    @cached_property
    def send_nbytes(self) -> int:
        """The send buffer of the gradient reduction; a single rank sends nothing."""
        if self.pack.world == 1 and self.replicas == 1:
            return 0
        # As if the direct parameters were last in the flat layout: the bytes are the same.
        chunk = self._chunk_numel - sum(
            align_up(self.pack.segments[i].padded_numel, self.pack.align_numel) for i in self.direct_gradients
        )
        return self.pack.world * chunk * self.sent_itemsize

    @cached_property
    def leaving_nbytes(self) -> int:
        """Gradients that stay alive while they are sent, because no send buffer holds a copy of them."""
        return sum(self.pack.segments[i].layout.numel for i in self.direct_gradients) * self.wire_itemsize

    @cached_property
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

    @cached_property
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
