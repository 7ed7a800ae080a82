"""The plan of owners: which rank steps which whole matrix, and what that sends. A rule of shapes,
the same on every rank.

    assign    the costliest matrix first, each to the rank with the least work; one that a rank holds whole stays there
    chunks    matrices of one rank that travel and are stepped together; as many for all ranks
    there     of a chunk: its holders send the parts of each matrix, of its gradient and of its state to its owner
    back      the owner sends the parts of each new matrix and of its state to their holders

A message of a chunk is one all-to-all of bytes. A segment, from one rank to another one, begins with a head: on the way
there one byte for each matrix (whether its gradient is there), on the way back one for the owner (whether it stepped).
Each part begins at a multiple of 16 bytes. Nothing of what a rank owns itself is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .shard import align_up

# A rank keeps a matrix that it holds whole if its work is then at most this much above the mean.
_AT_HOME = 1.05
_PART_NBYTES = 16

Cost = Callable[[tuple[int, ...]], float]


def newton_schulz_flops(shape: tuple[int, ...], steps: int = 5) -> float:
    """Operations of `steps` Newton-Schulz iterations on a matrix: for m rows and n columns, m the smaller of both, each
    multiplies (m, n) by (n, m), (m, m) by (m, m) and (m, m) by (m, n). Of more than two dims the first one counts as
    rows.

    >>> newton_schulz_flops((2, 3), steps=1)
    64.0
    """
    rows = shape[0] if len(shape) > 1 else 1
    columns = math.prod(shape) // max(rows, 1)
    m, n = min(rows, columns), max(rows, columns)
    return float(steps * (4 * m * m * n + 2 * m**3))


class Matrix(NamedTuple):
    """A matrix that one owner has whole: a parameter, or matrix `number` of a stack. `parts`: how many of its elements
    each rank holds; `there`, `back`: bytes per element of each tensor of its shape that travels, the gradient first on
    the way there, then the parameter, then the state."""

    name: str
    number: int | None
    shape: tuple[int, ...]
    parts: tuple[int, ...]
    there: tuple[int, ...]
    back: tuple[int, ...]

    @property
    def title(self) -> str:
        """The name, with the number in a stack."""
        return self.name if self.number is None else f"{self.name}[{self.number}]"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def home(self) -> int | None:
        """The rank that holds all of it, if there is one."""
        return next((rank for rank, numel in enumerate(self.parts) if numel == self.numel), None)

    @property
    def made_nbytes(self) -> int:
        """The bytes that Muon makes for its step at most: the update, three of it in bfloat16, and two products of it
        with itself."""
        rows = self.shape[0] if len(self.shape) > 1 else 1
        m = min(rows, self.numel // max(rows, 1))
        return self.numel * (self.there[0] + 3 * 2) + 2 * m * m * 2

    def nbytes(self, itemsizes: Sequence[int], rank: int) -> int:
        """The bytes of the part of `rank` in a message."""
        return sum(align_up(self.parts[rank] * size, _PART_NBYTES) for size in itemsizes)


def assign(matrices: Sequence[Matrix], world: int, cost: Cost, fixed: Mapping[int, int]) -> list[int]:
    """The owner of each matrix. `fixed`: those that have one already, by position."""
    costs = [cost(matrix.shape) for matrix in matrices]
    mean = sum(costs) / world
    loads, owners = [0.0] * world, [-1] * len(matrices)
    for position, owner in fixed.items():
        owners[position] = owner
        loads[owner] += costs[position]
    for position in sorted(range(len(matrices)), key=lambda i: (-costs[i], i)):
        if owners[position] >= 0:
            continue
        home = matrices[position].home
        if home is None or loads[home] + costs[position] > _AT_HOME * mean:
            home = min(range(world), key=lambda rank: (loads[rank], rank))
        owners[position] = home
        loads[home] += costs[position]
    return owners


class OwnerSegment(NamedTuple):
    """The bytes of a message between two ranks. `matrices`: positions in the plan, in order."""

    head_nbytes: int
    matrices: tuple[int, ...]
    nbytes: int


class FleetPlan:
    """The plan of the matrices whose parts are on the same `ranks` (of the default group): owners, chunks, bytes."""

    def __init__(
        self,
        matrices: Sequence[Matrix],
        ranks: Sequence[int],
        chunk_nbytes: int,
        cost: Cost,
        fixed: Mapping[int, int] | None = None,
    ) -> None:
        self.matrices, self.ranks = tuple(matrices), tuple(ranks)
        self.owners = assign(matrices, len(ranks), cost, fixed or {})
        self.costs = [cost(matrix.shape) for matrix in matrices]
        # The positions of matrices, by chunk and owner.
        self._chunks: list[dict[int, tuple[int, ...]]] = []
        filled: dict[int, list[list[int]]] = {}
        used: dict[int, int] = {}
        for position, (matrix, owner) in enumerate(zip(matrices, self.owners, strict=True)):
            nbytes, chunks = matrix.numel * sum(matrix.there), filled.setdefault(owner, [])
            if not chunks or used[owner] + nbytes > chunk_nbytes:
                chunks.append([])
                used[owner] = 0
            chunks[-1].append(position)
            used[owner] += nbytes
        for number in range(max(map(len, filled.values()), default=0)):
            self._chunks.append({o: tuple(chunks[number]) for o, chunks in filled.items() if number < len(chunks)})

    @property
    def chunks(self) -> int:
        """How many parts the work of a step has. Each is two messages, if there is more than one rank."""
        return len(self._chunks)

    @property
    def messages(self) -> int:
        """All-to-alls of a step."""
        return 2 * self.chunks if len(self.ranks) > 1 else 0

    def owned(self, chunk: int, owner: int) -> tuple[int, ...]:
        """Positions of the matrices that `owner` steps in `chunk`."""
        return self._chunks[chunk].get(owner, ())

    def there(self, chunk: int, source: int, owner: int) -> OwnerSegment:
        """Returns what the rank at `source` sends to `owner` before its step."""
        owned = self.owned(chunk, owner)
        if source == owner or not owned:
            return OwnerSegment(0, owned, 0)
        head = align_up(len(owned), _PART_NBYTES)
        matrices = [self.matrices[i] for i in owned]
        return OwnerSegment(head, owned, head + sum(one.nbytes(one.there, source) for one in matrices))

    def back(self, chunk: int, owner: int, target: int) -> OwnerSegment:
        """Returns what `owner` sends to the rank at `target` after its step."""
        owned = self.owned(chunk, owner)
        if target == owner:
            return OwnerSegment(0, owned, 0)
        matrices = [self.matrices[i] for i in owned]
        return OwnerSegment(_PART_NBYTES, owned, _PART_NBYTES + sum(one.nbytes(one.back, target) for one in matrices))

    def sent_nbytes(self, rank: int) -> tuple[int, int]:
        """The bytes that the rank at `rank` sends in a step, there and back."""
        world = range(len(self.ranks))
        there = sum(self.there(chunk, rank, other).nbytes for chunk in range(self.chunks) for other in world)
        back = sum(self.back(chunk, rank, other).nbytes for chunk in range(self.chunks) for other in world)
        return there, back

    def whole_nbytes(self, rank: int) -> int:
        """The bytes of whole tensors that the rank at `rank` has at most: those of one chunk."""
        return max(
            (
                sum(self.matrices[i].numel * sum(self.matrices[i].there) for i in self.owned(chunk, rank))
                for chunk in range(self.chunks)
            ),
            default=0,
        )

    def transient_nbytes(self, rank: int) -> int:
        """The most bytes that a step of the rank at `rank` has beside the shards, without what the optimizer makes: in
        chunk c the whole tensors of c, those that were stepped in c - 1, and the messages there of c and c + 1 and back
        of c and c - 1, both ways."""
        world, most = range(len(self.ranks)), 0
        there, back, whole, kept = [0], [0], [0], [0]
        for chunk in range(self.chunks):
            there.append(sum(self.there(chunk, rank, o).nbytes + self.there(chunk, o, rank).nbytes for o in world))
            back.append(sum(self.back(chunk, rank, o).nbytes + self.back(chunk, o, rank).nbytes for o in world))
            owned = [self.matrices[i] for i in self.owned(chunk, rank)]
            whole.append(sum(one.numel * sum(one.there) for one in owned))
            kept.append(sum(one.numel * sum(one.back) for one in owned))
        there.append(0)
        for c in range(1, self.chunks + 1):
            most = max(most, whole[c] + kept[c - 1] + there[c] + there[c + 1] + back[c] + back[c - 1])
        return most

    @property
    def loads(self) -> list[float]:
        """The cost of what each rank owns."""
        found = [0.0] * len(self.ranks)
        for owner, cost in zip(self.owners, self.costs, strict=True):
            found[owner] += cost
        return found

    @property
    def imbalance(self) -> float:
        """The most work of a rank over the mean of all."""
        return max(self.loads) * len(self.ranks) / sum(self.costs) if sum(self.costs) else 1.0

    @property
    def bound(self) -> float:
        """The least `imbalance` that there can be, whoever owns what. Of the k * world + 1 costliest matrices some rank
        has k + 1, each at least as costly as the last of them."""
        mean, world = sum(self.costs) / len(self.ranks), len(self.ranks)
        most = sorted(self.costs, reverse=True)
        least = ((k + 1) * most[k * world] for k in range((len(most) - 1) // world + 1))
        return max(1.0, max(least) / mean) if mean else 1.0


class OwnersPlan:
    """The owners of all matrices, and what their steps send; nothing here sends. `str(plan)` is a table of matrices.

    `fleets`: one for each set of ranks. `kept`: parameters that no owner has, by name, with the rule that says so.
    """

    def __init__(self, fleets: Sequence[FleetPlan], kept: Mapping[str, str], cost: str) -> None:
        self.fleets, self.kept, self.cost = tuple(fleets), dict(kept), cost

    @property
    def messages(self) -> int:
        """All-to-alls of a step that one rank takes part in, if it is in all fleets."""
        return sum(fleet.messages for fleet in self.fleets)

    def sent_nbytes(self, rank: int) -> tuple[int, int]:
        """The bytes that `rank` of the default group sends in a step, there and back."""
        found = [fleet.sent_nbytes(fleet.ranks.index(rank)) for fleet in self.fleets if rank in fleet.ranks]
        return sum(there for there, _ in found), sum(back for _, back in found)

    def owner(self, title: str) -> int:
        """The rank of the default group that owns the matrix of this name, `name[number]` in a stack. `KeyError`."""
        for fleet in self.fleets:
            for matrix, owner in zip(fleet.matrices, fleet.owners, strict=True):
                if matrix.title == title:
                    return fleet.ranks[owner]
        raise KeyError(title)

    def rows(self) -> Iterator[tuple[str, tuple[int, ...], int, float, int]]:
        """Yields of each matrix: name, shape, owner (in the default group), cost, bytes sent there and back."""
        for fleet in self.fleets:
            for matrix, owner, cost in zip(fleet.matrices, fleet.owners, fleet.costs, strict=True):
                others = [rank for rank in range(len(fleet.ranks)) if rank != owner]
                nbytes = sum(matrix.nbytes(sizes, rank) for sizes in (matrix.there, matrix.back) for rank in others)
                yield matrix.title, matrix.shape, fleet.ranks[owner], cost, nbytes

    def __str__(self) -> str:
        rows = [
            (title, "x".join(map(str, shape)), str(owner), f"{cost:.3g}", str(nbytes))
            for title, shape, owner, cost, nbytes in self.rows()
        ]
        table = [("matrix", "shape", "owner", "cost", "bytes"), *rows]
        widths = [max(len(row[column]) for row in table) for column in range(5)]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
        for fleet in self.fleets:
            sent = [sum(fleet.sent_nbytes(rank)) for rank in range(len(fleet.ranks))]
            lines.append(
                f"ranks {', '.join(map(str, fleet.ranks))}: {len(fleet.matrices)} matrices in {fleet.chunks} chunk(s), "
                f"{fleet.messages} messages, at most {max(sent, default=0)} bytes sent by a rank and "
                f"{max(map(fleet.whole_nbytes, range(len(fleet.ranks))), default=0)} whole on one; most work "
                f"{fleet.imbalance:.2f} of the mean, at least {fleet.bound:.2f} whoever owns what"
            )
        lines.append(f"cost: {self.cost}")
        lines += [f"not owned: {name} ({why})" for name, why in self.kept.items()]
        return "\n".join(lines)
