"""The messages of one unit: which parameters are gathered straight into their final memory, and which travel in one
message; where gradients are in a reduction's; and the bytes of both.

`direct_gradients` makes the same choice for gradients. Both return plain data: computed once per unit from sizes and
backend, and executed elsewhere.

    direct   one gather per parameter; its output is the padded full parameter; nothing is copied afterwards
    packed   one gather of a contiguous range of the flat local buffer into a staging buffer, then a copy-out

The measured reasons (ADR 0005): NCCL groups gathers into one launch, and gloo ranks can send to each other without a
collective, straight between final memories. Large parameters therefore save the staging bytes and the copy; for small
ones a separate message costs more than a copy. A world of one gathers nothing, so nothing is ever staged there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .shard import FlatLayout, ShardLayout, align_up, require_int

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

    def packed_span(self, pack: FlatLayout) -> range:
        """The range of the flat local buffer that forms the packed message; empty when nothing is packed.

        Raises `ValueError` when the packed segments are not contiguous in the buffer.
        """
        if not self.packed:
            return range(0)
        places = sorted(pack.order.index(index) for index in self.packed)
        if places != list(range(places[0], places[0] + len(places))):
            between = [pack.segments[i].name for i in pack.order[places[0] : places[-1]] if i not in self.packed]
            raise ValueError(
                f"packed: expected one contiguous range of the flat buffer, found {', '.join(between)} "
                f"in between; build the flat layout with first=direct_indices(...)"
            )
        after = places[-1] + 1
        stop = pack.segments[pack.order[after]].offset if after < len(pack.order) else pack.padded_local_numel
        return range(pack.segments[pack.order[places[0]]].offset, stop)

    def staging_numel(self, pack: FlatLayout) -> int:
        """Elements of the rank-major buffer that receives the packed message; 0 when nothing is packed."""
        return pack.world * len(self.packed_span(pack))

    def staged_segment(self, pack: FlatLayout, index: int, rank: int) -> int:
        """First element, in the staging buffer, of the shard of packed parameter `index` from `rank`."""
        if index not in self.packed:
            raise ValueError(f"index: expected one of the packed parameters {self.packed}, found {index!r}")
        span = self.packed_span(pack)
        return pack.gathered_segment(index, rank) - span.start - rank * (pack.padded_local_numel - len(span))


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


# ---- chunks ----------------------------------------------------------------------------------------------------------
# The messages of one gradient reduction: where each part of a gradient goes in the send buffer. Counts are elements.

# Elements at the end of each chunk for the facts that ranks compare: 64 bits, eight per element as a number from 0 to
# 255. Every floating dtype represents these numbers exactly, and their sums are finite.
FACTS_NUMEL = 8


class SendRegion(NamedTuple):
    """A part of one full gradient and its place in the send buffer: a strided grid of equal `sizes`, in elements."""

    sizes: tuple[int, ...]
    full_start: int
    full_strides: tuple[int, ...]
    start: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class ReduceLayout:
    """The chunks of one gradient reduction, (world, chunk_numel), one per receiving rank, and how they travel.

    A chunk has the offsets of the flat layout, followed by one grad-present flag per parameter: 1 if this rank
    produced a gradient for it, else 0. The flags travel inside the message, so the message has the same size
    whichever gradients a rank has, and ranks cannot disagree on it. After the reduction a parameter has a
    gradient on some rank exactly when its flag is not 0 (a sum or an average of zeros and ones, in any
    float dtype). After the flags, every chunk reserves room for a digest that ranks compare on arrival
    (comm/comparison.py).

    Gradients of `direct` parameters are sent from where autograd put them, each as its own message.
    The rest of the chunks, always including the flags, is *the* message; its send buffer is (world, message_numel).

    >>> from fullshard.layout import ShardLayout
    >>> pack = FlatLayout.build([ShardLayout((4, 3), world=2), ShardLayout((3,), world=2)], align_numel=4)
    >>> layout = ReduceLayout(pack)
    >>> layout.grad_present_offset, layout.chunk_numel, layout.numel
    (12, 24, 48)
    >>> ReduceLayout(pack, direct=(0,)).message_start, ReduceLayout(pack, direct=(0,)).numel
    (8, 32)
    """

    # The parameters whose gradients are reduced together: the trainable ones, if some are frozen.
    pack: FlatLayout
    # The first ones of `pack.order`. Each gathers in place, so a rank's part is one run of the full gradient.
    direct: tuple[int, ...] = ()
    # The elements for the facts that ranks compare; 0 where the backend sums messages: no rank sees another's facts.
    facts_numel: int = FACTS_NUMEL

    def __post_init__(self) -> None:
        front = self.pack.order[: len(self.direct)]
        if self.direct != front:
            raise ValueError(
                f"direct: expected the first indices of the order {self.pack.order}, found {self.direct}; "
                f"build the flat layout with first=direct"
            )
        for index in self.direct:
            segment = self.pack.segments[index]
            if not segment.layout.gathers_in_place:
                raise ValueError(
                    f"direct: expected parameters whose shards are contiguous in memory, found {segment.name}, cut "
                    f"along dim {segment.layout.dim} of {segment.layout.shape}; leave it in the message"
                )

    @cached_property
    def grad_present_offset(self) -> int:
        """First grad-present flag in a chunk; aligned, because the flat layout's total is."""
        return self.pack.padded_local_numel

    @cached_property
    def facts_offset(self) -> int:
        """First of the `facts_numel` elements of a chunk that ranks compare."""
        return self.grad_present_offset + len(self.pack.segments)

    @cached_property
    def chunk_numel(self) -> int:
        """Elements that one rank receives: its part of every gradient, flags, and the facts that ranks compare."""
        return align_up(self.facts_offset + self.facts_numel, self.pack.align_numel)

    @cached_property
    def packed(self) -> tuple[int, ...]:
        """The parameters whose gradients are in the message, in buffer order."""
        return self.pack.order[len(self.direct) :]

    @cached_property
    def message_start(self) -> int:
        """First element of a chunk that is in the message."""
        return self.pack.segments[self.packed[0]].offset if self.packed else self.grad_present_offset

    @cached_property
    def message_numel(self) -> int:
        """Elements of the message for one rank."""
        return self.chunk_numel - self.message_start

    @cached_property
    def numel(self) -> int:
        """Elements of the whole send buffer."""
        return self.pack.world * self.message_numel

    def unwritten(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The ranges [start, stop) of a chunk that neither the message nor a direct gradient of `rank` writes: padding.

        >>> from fullshard.layout import ShardLayout
        >>> pack = FlatLayout.build([ShardLayout((4, 3), world=2), ShardLayout((3,), world=2)], align_numel=4)
        >>> ReduceLayout(pack, direct=(0,)).unwritten(0)
        ((6, 8),)
        """
        found = []
        for place, index in enumerate(self.direct):
            segment = self.pack.segments[index]
            start = segment.offset + segment.layout.local_numel(rank)
            after = place + 1
            stop = self.pack.segments[self.direct[after]].offset if after < len(self.direct) else self.message_start
            if start < stop:
                found.append((start, stop))
        return tuple(found)

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """The ranges [start, stop) of every rank's part of the message that, for some rank, neither a gradient nor a
        flag is written to. The facts are among them, because not every message carries any.

        Below: the third row of rank 0, which rank 1 lacks; the alignment of the second parameter, and of the flags.

        >>> from fullshard.layout import ShardLayout
        >>> pack = FlatLayout.build([ShardLayout((5, 3), world=2), ShardLayout((4,), world=2)], align_numel=4)
        >>> ReduceLayout(pack, facts_numel=0).padding
        ((6, 12), (14, 16), (18, 20))
        """
        segments = [self.pack.segments[index] for index in self.packed]
        # The last rank has the fewest elements of each.
        fewest = [(segment.offset, segment.layout.local_numel(self.pack.world - 1)) for segment in segments]
        written = [*fewest, (self.grad_present_offset, len(self.pack.segments))]
        starts = [*(offset for offset, _ in written[1:]), self.chunk_numel]
        pairs = [(offset + numel, start) for (offset, numel), start in zip(written, starts, strict=True)]
        return tuple((a - self.message_start, b - self.message_start) for a, b in pairs if a < b)

    def regions(self, index: int) -> tuple[SendRegion, ...]:
        """The regions of the contiguous gradient of packed parameter `index`, with their places in the send buffer.

        >>> from fullshard.layout import ShardLayout
        >>> pack = FlatLayout.build([ShardLayout((8,), world=4)], align_numel=1)
        >>> ReduceLayout(pack).regions(0)[0][:3]
        ((4, 1, 2), 0, (2, 8, 1))
        """
        offset, chunk = self.pack.segments[index].offset - self.message_start, self.message_numel
        return tuple(
            SendRegion(
                (piece.ranks, piece.outer, piece.block),
                piece.full_start,
                (piece.full_rank_stride, piece.full_outer_stride, 1),
                piece.first_rank * chunk + offset,
                (chunk, piece.block, 1),
            )
            for piece in self.pack.segments[index].layout.pieces
        )

    def segment(self, index: int, rank: int) -> int:
        """First element, in the send buffer, of the gradient of packed parameter `index` that goes to `rank`."""
        if index in self.direct:
            raise ValueError(f"index: expected one of the packed parameters {self.packed}, found {index!r}")
        return self._message(rank) + self.pack.segments[index].offset - self.message_start

    def grad_present(self, index: int, rank: int) -> int:
        """The grad-present flag of parameter `index` in the send buffer, in the message to `rank`."""
        if not 0 <= index < len(self.pack.segments):
            raise ValueError(f"index: expected 0 <= index < {len(self.pack.segments)}, found {index!r}")
        return self._message(rank) + self.grad_present_offset - self.message_start + index

    def _message(self, rank: int) -> int:
        if not 0 <= rank < self.pack.world:
            raise ValueError(f"rank: expected 0 <= rank < {self.pack.world}, found {rank!r}; give a rank of the group")
        return rank * self.message_numel


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
