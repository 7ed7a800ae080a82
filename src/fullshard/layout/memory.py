"""Expected bytes per rank as sums of named terms, from layouts and a policy alone.

Each function returns the terms at one moment, so a byte-counting test or a report can say *which* term is wrong.
Notation of the comments: P padded elements of a unit, W ranks, c compute itemsize. Not included: activations,
optimizer state, allocator overhead.

Message buffers (staging, reduction) exist while a message is in flight. Where a pool keeps them from step to step (on a
CPU), `buffer_terms` gives the kept bytes and replaces the buffer terms of each moment.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .flat import FACTS_NUMEL, FlatLayout, ReduceLayout, align_up
from .gather import GatherPlan
from .shard import require_int

# Reduced shards that are copied to the host at once, of shards that are there (comm/offload.py).
DOWNLOADS_IN_FLIGHT = 2

# ---- unit memory -----------------------------------------------------------------------------------------------------
# The facts that the bytes of one unit depend on, and its bytes of each kind. `memory` says when they exist.
#
# Notation of the comments: P padded elements of a unit, W ranks, c compute itemsize.


class Term(NamedTuple):
    """One named part of an expected byte count."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """The facts that the memory of one unit depends on. Units are listed in the order in which their forwards begin.

    Its parameters share one storage dtype. Dtypes that differ are expected to differ in bytes per element.
    """

    name: str
    pack: FlatLayout
    plan: GatherPlan
    storage_itemsize: int
    compute_itemsize: int
    # Bytes per element that a reduction sends: those of the gradient, or of the reduce dtype.
    wire_itemsize: int
    # Whether full parameters are freed after forward; the root usually keeps its own.
    reshard: bool = True
    # Whether all later units run inside its forward: the root. Its gradients are expected to be complete last, like
    # those of an embedding; if they come first, it is freed earlier than the terms say.
    outer: bool = False
    # Whether gradients are exchanged (all-to-all) and added here, or reduced by the backend.
    exchanges: bool = True
    # How many ranks hold the same shards, including this one, and bytes per element of the sum over them: those of the
    # sum dtype, or of the reduce dtype where nothing is sharded or the backend reduces.
    replicas: int = 1
    sum_itemsize: int = 4
    # For an integer `reshard_after_forward`: this rank's part between forward and backward (`layout.gather`), over the
    # ranks of its block.
    kept: FlatLayout | None = None
    # Positions of the parameters whose gradients are sent from where autograd left them (layout.direct_gradients).
    direct_gradients: tuple[int, ...] = ()
    # No parameter is trained: there are no gradients, and nothing is sent. With `reshard` off it stays full
    # from step to step (`set_memory_budget(resident=)`).
    frozen: bool = False
    # Bytes per element of the gradients of earlier backwards that the last one of a window adds its own to; 0: none.
    held_itemsize: int = 0
    # Shards and their gradients are on the host.
    offloaded: bool = False
    # The bytes of the full parameters stay between uses (`set_keep_unsharded_storage`).
    stays: bool = False

    def __post_init__(self) -> None:
        if self.kept is not None and not self.reshard:
            raise ValueError(
                f"kept of {self.name!r}: expected None with reshard=False, where full parameters stay after forward, "
                f"found a flat layout; keep a part only of full parameters that are freed"
            )
        for field in ("storage_itemsize", "compute_itemsize", "wire_itemsize", "replicas", "sum_itemsize"):
            require_int(f"{field} of {self.name!r}", getattr(self, field), 1, "use layout.itemsize(dtype)")

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
        return 0 if self.frozen else self.pack.numel * self.held_itemsize

    @property
    def summed_nbytes(self) -> int:
        """The gradients that a reduction is made of: autograd's, or their sum with those of earlier backwards."""
        return self.held_nbytes or self.gradient_nbytes

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
        """Bytes per element of the send buffer. Where nothing is sharded, it is the buffer that the replicas sum."""
        return self.wire_itemsize if self.pack.world > 1 else self.sum_itemsize

    @property
    def _chunk_numel(self) -> int:
        carries = self.exchanges and self.pack.world > 1
        return ReduceLayout(self.pack, facts_numel=FACTS_NUMEL if carries else 0).chunk_numel

    @property
    def send_nbytes(self) -> int:
        """The send buffer of the gradient reduction; a single rank sends nothing."""
        if self.frozen or (self.pack.world == 1 and self.replicas == 1):
            return 0
        # As if the direct parameters were last in the flat layout: the bytes are the same.
        chunk = self._chunk_numel - sum(
            align_up(self.pack.segments[i].padded_numel, self.pack.align_numel) for i in self.direct_gradients
        )
        return self.pack.world * chunk * self.sent_itemsize

    @property
    def leaving_nbytes(self) -> int:
        """Gradients that stay alive while they are sent, because no send buffer holds a copy of them."""
        if self.frozen:
            return 0
        return sum(self.pack.segments[i].layout.numel for i in self.direct_gradients) * self.wire_itemsize

    @property
    def receive_nbytes(self) -> int:
        """The receive buffer: the chunks of all ranks when they are added here, one chunk when the backend adds.

        Where ranks send to each other, this rank's own chunk does not travel."""
        if self.frozen or self.pack.world == 1:
            return 0
        if not self.exchanges:
            return self._chunk_numel * self.sent_itemsize
        if self.direct_gradients:
            return (self.pack.world - 1) * self._chunk_numel * self.wire_itemsize
        return self.send_nbytes

    @property
    def replicating_nbytes(self) -> int:
        """This rank's chunk during the sum over replicas; 0 where nothing is sharded (the send buffer is summed)."""
        if self.frozen or self.pack.world == 1 or self.replicas == 1:
            return 0
        return self._chunk_numel * self.sum_itemsize

    @property
    def reduced_nbytes(self) -> int:
        """The gradient shards in the storage dtype: views of one chunk with its flags. With one rank: its gradients."""
        if self.frozen:
            return 0
        if self.pack.world == 1 and self.replicas == 1:
            return self.pack.numel * self.storage_itemsize
        return self._chunk_numel * self.storage_itemsize


# ---- memory ----------------------------------------------------------------------------------------------------------


def total(terms: Sequence[Term]) -> int:
    """The sum of the terms in bytes."""
    return sum(term.nbytes for term in terms)


def shard_terms(units: Sequence[UnitMemory]) -> list[Term]:
    """What exists all the time: the flat buffers, one term per unit, storages that stay, and gradients that
    earlier backwards left."""
    return [
        *(Term(f"shards of {unit.name}", unit.shard_nbytes) for unit in units if not unit.offloaded),
        *(Term(f"storage of full {unit.name}", unit.full_nbytes) for unit in units if unit.stays),
        *(Term(f"held gradients of {unit.name}", unit.held_nbytes) for unit in units if unit.held_nbytes),
    ]


def forward_terms(
    units: Sequence[UnitMemory], current: int, *, prefetch_depth: int = 1, prefetch_nbytes: int | None = None
) -> list[Term]:
    """While units[current] computes its forward and the next `prefetch_depth` units are being gathered.

    `prefetch_nbytes`: gather as many units as fit into it, instead of `prefetch_depth`.
    """
    _check(units, current)
    require_int("prefetch_depth", prefetch_depth, 0, "0 gathers each unit when it is needed")
    ahead = _ahead(units, range(current + 1, len(units)), prefetch_depth, prefetch_nbytes)
    return [
        *shard_terms(units),
        *_kept(units, current),
        Term(f"full {units[current].name}", units[current].transient_nbytes),
        *_gathering(units, ahead),
    ]


def resharding_terms(
    units: Sequence[UnitMemory], current: int, *, prefetch_depth: int = 1, prefetch_nbytes: int | None = None
) -> list[Term]:
    """A moment later, for an integer `reshard_after_forward`: units[current] has copied the part that it keeps, and its
    full parameters are not freed yet. An outer unit comes last, after the forwards of all others.

    Raises `ValueError` for a unit that keeps no part.
    """
    terms = forward_terms(units, current, prefetch_depth=prefetch_depth, prefetch_nbytes=prefetch_nbytes)
    unit = units[current]
    if unit.kept is None:
        raise ValueError(f"current: expected a unit that keeps a part, found {unit.name!r}; it has no `kept`")
    if unit.outer:
        others = [*units[:current], *units[current + 1 :]]
        terms = [
            *shard_terms(units),
            *_kept(others, len(others)),
            Term(f"full {unit.name}", unit.transient_nbytes),
        ]
    return [*terms, Term(f"kept part of {unit.name}", unit.kept_nbytes)]


def backward_terms(
    units: Sequence[UnitMemory],
    current: int,
    *,
    reductions_in_flight: int = 2,
    replicating_in_flight: int | None = None,
    prefetch_nbytes: int | None = None,
    gradient_nbytes: int | None = None,
) -> list[Term]:
    """When the gradients of units[current] are ready, before its full parameters are freed and its message is built.

    The unit before it is being gathered, or as many as fit into `prefetch_nbytes`. `reductions_in_flight` counts the
    earlier reductions (units current + 1, ...) whose buffers still exist. Their gradients were copied into the send
    buffer and freed; gradients that are sent from where autograd left them live as long as a send buffer would. On a
    mesh with replicas, `replicating_in_flight` units after these are being summed over the replicas (None: the same
    number). `gradient_nbytes` limits gradients and messages together.
    """
    room = None
    if gradient_nbytes is not None:
        # The room left by its own gradients.
        room = max(0, gradient_nbytes - units[current].gradient_nbytes)
    units_behind = _behind(units, current, reductions_in_flight, room, replicating_in_flight)
    return [
        *shard_terms(units),
        *_kept(units, current),
        Term(f"full {units[current].name}", units[current].transient_nbytes),
        *_gathering(units, _next_in_backward(units, current, prefetch_nbytes), from_secondary=True),
        Term(f"gradients of {units[current].name}", units[current].gradient_nbytes),
        *units_behind,
    ]


def sending_terms(
    units: Sequence[UnitMemory],
    current: int,
    *,
    reductions_in_flight: int = 2,
    replicating_in_flight: int | None = None,
    prefetch_nbytes: int | None = None,
    gradient_nbytes: int | None = None,
) -> list[Term]:
    """A moment later: units[current] has freed its full parameters and copied its gradients into its message."""
    room = None
    if gradient_nbytes is not None:
        room = max(0, gradient_nbytes - 2 * units[current].gradient_nbytes)
    units_behind = _behind(units, current, reductions_in_flight, room, replicating_in_flight)
    unit = units[current]
    made_of = unit.held_itemsize or unit.compute_itemsize
    cast = unit.leaving_nbytes if unit.wire_itemsize != made_of else 0
    if unit.pack.world == unit.replicas == 1 and unit.storage_itemsize != made_of:
        # Nothing is sent: the result is cast from the gradients.
        cast = unit.reduced_nbytes
    return [
        *shard_terms(units),
        *_kept(units, current),
        *_gathering(units, _next_in_backward(units, current, prefetch_nbytes), from_secondary=True),
        Term(f"gradients of {unit.name}", unit.summed_nbytes),
        Term(f"reduction of {unit.name}", unit.send_nbytes + cast + unit.receive_nbytes),
        *units_behind,
    ]


def buffer_terms(
    units: Sequence[UnitMemory],
    *,
    prefetch_depth: int = 1,
    reductions_in_flight: int = 2,
    prefetch_nbytes: int | None = None,
) -> list[Term]:
    """The message buffers that a keeping pool holds, once the order of forwards is known and gathers run ahead.

    Units of equal layout share buffers: there are as many as were ever in use at once.
    """
    require_int("prefetch_depth", prefetch_depth, 0, "0 gathers each unit when it is needed")
    require_int("reductions_in_flight", reductions_in_flight, 0, "0 waits for each reduction at once")
    gathers = max(1, prefetch_depth)
    if prefetch_nbytes is not None:
        places = range(len(units))
        # From each unit on: a root without parameters gathers ahead too.
        forward = max((len(_ahead(units, places[i:], 0, prefetch_nbytes)) for i in places), default=0)
        gathers = max(1, forward, *(len(_next_in_backward(units, i, prefetch_nbytes)) for i in places))
    backwards = units[::-1]
    # A reduction is issued before the oldest one is waited for.
    reductions = reductions_in_flight + 1
    return [
        *_shared("staging", units, gathers, lambda u: (u.pack, u.plan, u.compute_itemsize), lambda u: u.staging_nbytes),
        # Backward gathers one unit ahead.
        *_shared(
            "staging of kept parts",
            [unit for unit in backwards if unit.kept is not None],
            1,
            lambda u: (u.kept, u.plan, u.compute_itemsize),
            lambda u: u.secondary_staging_nbytes,
        ),
        *_shared("send", backwards, reductions, lambda u: (u.pack, u.sent_itemsize), lambda u: u.send_nbytes),
        *_shared(
            "receive",
            [unit for unit in backwards if unit.exchanges],
            reductions,
            lambda u: (u.pack, u.wire_itemsize),
            lambda u: u.receive_nbytes,
        ),
    ]


def peak(
    units: Sequence[UnitMemory],
    *,
    prefetch_depth: int = 1,
    reductions_in_flight: int = 2,
    send_buffers: int | None = None,
    prefetch_nbytes: int | None = None,
    gradient_nbytes: int | None = None,
) -> tuple[str, list[Term]]:
    """The largest of all these moments: its name (`forward layers.3`) and its terms; the first of equals.

    Buffers are counted as each moment needs them. Where a pool keeps them, `buffer_terms` bounds the excess.
    `send_buffers`: instead of `reductions_in_flight`, so many exist when another message was made.
    """
    indices = range(len(units))
    moments = []
    for i in indices:
        for what, ahead_of in (("forward", forward_terms), ("resharding", resharding_terms)):
            if what == "forward" or units[i].kept is not None:
                terms = ahead_of(units, i, prefetch_depth=prefetch_depth, prefetch_nbytes=prefetch_nbytes)
                moments.append((f"{what} {units[i].name}", terms))
    for i in reversed(indices):
        for what, terms_of in (("backward", backward_terms), ("sending", sending_terms)):
            limit = reductions_in_flight
            if send_buffers is not None:
                limit = send_buffers - (what == "sending")
            terms = terms_of(
                units,
                i,
                reductions_in_flight=limit,
                replicating_in_flight=reductions_in_flight,
                prefetch_nbytes=prefetch_nbytes,
                gradient_nbytes=gradient_nbytes,
            )
            moments.append((f"{what} {units[i].name}", terms))
    if not moments:
        raise ValueError("units: expected at least one, found none; give the units in order of execution")
    return max(moments, key=lambda moment: total(moment[1]))


def _kept(units: Sequence[UnitMemory], current: int) -> list[Term]:
    # Units before this one in forward; in backward, the units that it has not reached yet.
    full = [u for u in units[:current] if u.outer or not u.reshard]
    # Frozen units that stay full are there at any time.
    full += [u for u in units[current + 1 :] if u.lasting]
    # An outer unit keeps its part after all others and is gathered before them: while they run it is full.
    parts = [u for u in units[:current] if u.kept_nbytes and not u.outer]
    return [
        *(Term(f"full {u.name} (kept)", u.transient_nbytes) for u in full),
        *(Term(f"kept part of {u.name}", u.kept_nbytes) for u in parts),
    ]


def _next_in_backward(units: Sequence[UnitMemory], current: int, prefetch_nbytes: int | None) -> list[int]:
    if prefetch_nbytes is not None:
        freed = [i for i in reversed(range(current)) if units[i].reshard and not units[i].outer]
        return _ahead(units, freed, 0, prefetch_nbytes)
    before = current - 1
    return [before] if before >= 0 and units[before].reshard and not units[before].outer else []


def _ahead(units: Sequence[UnitMemory], following: Sequence[int], depth: int, nbytes: int | None) -> list[int]:
    """Which of the `following` units are being gathered: `depth` of them, or as many as fit into `nbytes`."""
    if nbytes is None:
        return [i for i in following[:depth] if not units[i].lasting]
    require_int("prefetch_nbytes", nbytes, 0, "0 gathers each unit when it is needed")
    missing = [i for i in following if not units[i].lasting]
    return missing[: leading_within((units[i].gather_nbytes for i in missing), nbytes)]


def _behind(
    units: Sequence[UnitMemory],
    current: int,
    reductions_in_flight: int,
    room: int | None = None,
    replicating_in_flight: int | None = None,
) -> list[Term]:
    """Terms of the units whose backward is over. `room`: bytes that messages in flight may take."""
    at_once = reductions_in_flight if replicating_in_flight is None else replicating_in_flight
    _check(units, current)
    require_int("reductions_in_flight", reductions_in_flight, 0, "0 waits for each reduction at once")
    behind = units[current + 1 :]
    sending = [u for u in behind[:reductions_in_flight] if u.send_nbytes]
    # Then those that are summed over the replicas, in memory that becomes the reduced shards where dtypes are equal.
    replicating = [
        unit
        for place, unit in enumerate(behind)
        if unit.replicating_nbytes and 0 <= place - reductions_in_flight < at_once
    ]
    under_way: dict[str, int] = {}
    left = room
    for unit in sending:
        nbytes = unit.send_nbytes + unit.leaving_nbytes + unit.receive_nbytes
        if left is not None:
            nbytes = nbytes * (nbytes <= left)
            left -= nbytes
        under_way[unit.name] = nbytes
    sending = [u for u in sending if under_way[u.name]]
    arrived = [u for u in behind if u not in sending and u not in replicating]
    return [
        *(Term(f"reduction of {name}", nbytes) for name, nbytes in under_way.items() if nbytes),
        *(Term(f"all-reduce of {u.name}", u.replicating_nbytes) for u in replicating),
        *(Term(f"reduced shards of {u.name}", u.reduced_nbytes) for u in _on_device(arrived) if not u.frozen),
    ]


def _on_device(arrived: Sequence[UnitMemory]) -> list[UnitMemory]:
    """Those whose reduced shards are on the device: on their way to the host the latest two alone."""
    downloading = [unit for unit in arrived if unit.offloaded][:DOWNLOADS_IN_FLIGHT]
    return [unit for unit in arrived if not unit.offloaded or unit in downloading]


def _gathering(units: Sequence[UnitMemory], indices: Sequence[int], *, from_secondary: bool = False) -> list[Term]:
    """`from_secondary`: in backward, gather from the secondary shard where there is one."""
    terms = []
    for unit in (units[i] for i in indices):
        staging = unit.secondary_staging_nbytes if from_secondary and unit.kept is not None else unit.staging_nbytes
        terms += [
            Term(f"full {unit.name} (next)", unit.arriving_nbytes),
            Term(f"uploaded shards of {unit.name}", unit.uploaded_nbytes),
            Term(f"staging of {unit.name}", staging),
        ]
    return [term for term in terms if term.nbytes]


def _shared(
    what: str,
    units: Sequence[UnitMemory],
    at_once: int,
    key: Callable[[UnitMemory], Hashable],
    nbytes: Callable[[UnitMemory], int],
) -> list[Term]:
    """For each key: the most buffers that any `at_once` consecutive units need."""
    keys = [key(unit) for unit in units]
    terms = []
    for first, found in dict(zip(reversed(keys), reversed(units), strict=True)).items():
        needed = max(keys[i : i + at_once].count(first) for i in range(len(keys)))
        terms.append(Term(f"{needed} {what} as of {found.name}", needed * nbytes(found)))
    return [term for term in reversed(terms) if term.nbytes]


def _check(units: Sequence[UnitMemory], current: int) -> None:
    if not 0 <= current < len(units):
        raise ValueError(f"current: expected 0 <= current < {len(units)}, found {current!r}; give a unit's position")


# ---- budget ----------------------------------------------------------------------------------------------------------
# What fits into a byte budget: which gathers may run ahead, and which units stay full between forward and backward.


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
