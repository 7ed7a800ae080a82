"""Plans what each rank sends to each other one when tensors go from one layout to another one, cut into messages.

    Held     who holds which part of a tensor
    Route    what goes from one rank to another one: pieces in the order in which they travel
    TransferPlan    the routes of all ranks, and what they cost

A part that several ranks hold is sent by one of them, and not at all to a rank that holds it already. Pieces of the
widest dtypes travel first, so every piece is aligned in the bytes of its route. A message is a range of those bytes:
all are of `limit_nbytes`, but for the last one of a route.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from .boxes import Box, local_box, positions
from .boxes import Cut as Cut
from .names import Link
from .shard import itemsize

# Of messages: a multiple of every itemsize.
ALIGNMENT = 16


class Portion(NamedTuple):
    """A part of a tensor, and the ranks that hold it."""

    box: Box
    ranks: tuple[int, ...]


class Parts:
    """The different parts of a tensor. One object for all tensors of equal layout and shape: compared by identity."""

    def __init__(self, parts: Iterable[Portion]) -> None:
        self.parts = tuple(part for part in parts if part.box.numel)
        self.by_rank = {rank: number for number, part in enumerate(self.parts) for rank in part.ranks}

    def box(self, rank: int) -> Box | None:
        """The part of `rank`; None if it holds no element."""
        number = self.by_rank.get(rank)
        return None if number is None else self.parts[number].box


class Held(NamedTuple):
    """A tensor. `dtype`: torch's name without `torch.`. `same_as`: the first of the names that share its memory."""

    shape: tuple[int, ...]
    dtype: str
    parts: Parts
    same_as: str = ""


def spread(
    shape: Sequence[int], mesh: Sequence[int], ranks: Sequence[int], cuts: Sequence[Cut | None]
) -> list[Portion]:
    """The parts of a tensor on a mesh of sizes `mesh` with `ranks`, in row-major order.

    >>> spread((3,), (2, 2), (0, 1, 2, 3), [None, Cut(0)])[1]
    Portion(box=Box(offsets=(2,), lengths=(1,)), ranks=(1, 3))
    """
    found: dict[Box, list[int]] = {}
    for rank, coordinate in zip(ranks, positions(mesh), strict=True):
        found.setdefault(local_box(shape, mesh, coordinate, cuts), []).append(rank)
    return [Portion(box, tuple(held)) for box, held in found.items()]


class RoutePiece(NamedTuple):
    """A box of a link, in its coordinates, as elements of `dtype`."""

    link: Link
    box: Box
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.box.numel * itemsize(self.dtype)


class Cutting(NamedTuple):
    """Elements [start, stop) of a piece, at byte `at` of a message."""

    piece: RoutePiece
    start: int
    stop: int
    at: int


class Route(NamedTuple):
    """Returns what `source` sends to `target`."""

    source: int
    target: int
    pieces: tuple[RoutePiece, ...]
    limit_nbytes: int

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def messages(self) -> int:
        return -(-self.nbytes // self.limit_nbytes)

    def cut(self) -> Iterator[tuple[int, list[Cutting]]]:
        """Each message: its bytes, and what is in it."""
        now, used = list[Cutting](), 0
        for piece in self.pieces:
            size, start = itemsize(piece.dtype), 0
            while start < piece.box.numel:
                stop = min(piece.box.numel, start + (self.limit_nbytes - used) // size)
                now.append(Cutting(piece, start, stop, used))
                used += (stop - start) * size
                start = stop
                if used == self.limit_nbytes:
                    yield used, now
                    now, used = [], 0
        if now:
            yield used, now


class TransferPlan:
    """The transfer of `links` between `sources` and `targets`. Nothing here sends: `str(plan)` describes it.

    `ranks`: all that take part. `limit_nbytes`: of a message, which is all that a rank holds besides its tensors.
    """

    def __init__(
        self,
        links: Sequence[Link],
        sources: Mapping[str, Held],
        targets: Mapping[str, Held],
        ranks: Sequence[int],
        limit_nbytes: int,
        dtype: str | None = None,
        exact: frozenset[str] = frozenset(),
    ) -> None:
        """`dtype`: in which floating-point elements travel, but for the sources in `exact`."""
        self.links, self.sources, self.targets = tuple(links), sources, targets
        self.ranks, self.limit_nbytes = tuple(ranks), limit_nbytes
        self._dtype, self._exact = dtype, exact
        # The parts of the source that have something for parts of the target, by layouts and geometry.
        self._known: dict[tuple[object, ...], _Common] = {}
        self._of_rank: dict[int, tuple[dict[int, Route], dict[int, Route], list[RoutePiece]]] = {}

    def sends(self, rank: int) -> dict[int, Route]:
        """The routes of `rank` to others, by target."""
        return self._routes(rank)[0]

    def receives(self, rank: int) -> dict[int, Route]:
        """The routes of others to `rank`, by source."""
        return self._routes(rank)[1]

    def copies(self, rank: int) -> list[RoutePiece]:
        """Returns what `rank` copies from its own part of the source into its own part of the target."""
        return self._routes(rank)[2]

    def wire_dtype(self, link: Link) -> str:
        """The dtype in which a link's elements travel: the narrower one of both ends, or the caller's."""
        source, target = self.sources[link.source].dtype, self.targets[link.target].dtype
        if self._dtype is not None and _is_float(source) and link.source not in self._exact:
            return self._dtype
        return target if itemsize(target) < itemsize(source) else source

    @cached_property
    def sending(self) -> list[int]:
        """The ranks that hold something of the source."""
        return sorted({rank for held in self.sources.values() for rank in held.parts.by_rank})

    @cached_property
    def receiving(self) -> list[int]:
        """The ranks that hold something of the target."""
        return sorted({rank for held in self.targets.values() for rank in held.parts.by_rank})

    def routes(self) -> list[Route]:
        """All of them; as many as pairs of ranks that have something for each other."""
        return [route for rank in self.sending for _, route in sorted(self.sends(rank).items())]

    def _routes(self, rank: int) -> tuple[dict[int, Route], dict[int, Route], list[RoutePiece]]:
        if rank not in self._of_rank:
            leaving, arriving = dict[int, list[RoutePiece]](), dict[int, list[RoutePiece]]()
            own: list[RoutePiece] = []
            for turn, link in enumerate(self.links):
                source, target = self.sources[link.source].parts, self.targets[link.target].parts
                mine_there, mine_here = source.by_rank.get(rank), target.by_rank.get(rank)
                if mine_there is None and mine_here is None:
                    continue
                dtype = self.wire_dtype(link)
                common = self._common(link, source, target)
                for number, box in common.of_target.get(mine_here, ()):
                    sender = _sender(source.parts[number], number + turn, rank)
                    kept = own if sender == rank else arriving.setdefault(sender, [])
                    kept.append(RoutePiece(link, box, dtype))
                for number, box in common.of_source.get(mine_there, ()):
                    assert mine_there is not None
                    for receiver in target.parts[number].ranks:
                        part = source.parts[mine_there]
                        if receiver != rank and _sender(part, mine_there + turn, receiver) == rank:
                            leaving.setdefault(receiver, []).append(RoutePiece(link, box, dtype))
            self._of_rank[rank] = (
                {peer: Route(rank, peer, _widest_first(found), self.limit_nbytes) for peer, found in leaving.items()},
                {peer: Route(peer, rank, _widest_first(found), self.limit_nbytes) for peer, found in arriving.items()},
                own,
            )
        return self._of_rank[rank]

    def _common(self, link: Link, source: Parts, target: Parts) -> _Common:
        key = (id(source), id(target), *link[2:])
        if key not in self._known:
            self._known[key] = _Common(link, source, target)
        return self._known[key]

    def __str__(self) -> str:
        """Says which rank sends what to which; of more than 64 pairs the first ones."""
        nbytes = sum(math.prod(link.lengths) * itemsize(self.targets[link.target].dtype) for link in self.links)
        lines = [
            f"{len(self.links)} tensors, {_mib(nbytes)}, from {len(self.sending)} rank(s) to {len(self.receiving)}; "
            f"messages of {_mib(self.limit_nbytes)}"
        ]
        routes = self.routes()
        for route in routes[:64]:
            lines.append(
                f"  rank {route.source} -> rank {route.target}: {_mib(route.nbytes)} in {route.messages} message(s)"
            )
        if len(routes) > 64:
            lines.append(f"  and {len(routes) - 64} more pairs")
        sent = sum(route.nbytes for route in routes)
        kept = sum(piece.nbytes for rank in self.receiving for piece in self.copies(rank))
        lines.append(f"  {_mib(sent)} sent, {_mib(kept)} copied in place, {sum(r.messages for r in routes)} messages")
        return "\n".join(lines)


class _Common:
    """The boxes that the parts of a link's two tensors have in common. `of_source`, `of_target`: by the number of a
    part, the numbers of the other side's parts, each with its box in coordinates of the link."""

    def __init__(self, link: Link, source: Parts, target: Parts) -> None:
        self.of_source: dict[int | None, list[tuple[int, Box]]] = {}
        self.of_target: dict[int | None, list[tuple[int, Box]]] = {}
        # By where they begin in the first dim, so that thousands of parts are compared with their neighbours alone.
        wanted = sorted((_range(link.of_target(part.box)), j, part.box) for j, part in enumerate(target.parts))
        starts = [start for (start, _), *_ in wanted]
        longest = max((length for (_, length), *_ in wanted), default=0)
        for i, part in enumerate(source.parts):
            start, length = _range(link.of_source(part.box))
            for _, j, box in wanted[bisect_right(starts, start - longest) : bisect_left(starts, start + length)]:
                common = link.common(part.box, box)
                if common is not None:
                    self.of_source.setdefault(i, []).append((j, common))
                    self.of_target.setdefault(j, []).append((i, common))


def _range(box: Box) -> tuple[int, int]:
    return (box.offsets[0], box.lengths[0]) if box.offsets else (0, 1)


def _sender(part: Portion, number: int, receiver: int) -> int:
    """Returns the rank, of those that hold `part`, that sends it to `receiver`. `number`: of part and tensor."""
    # Receivers, parts and tensors are spread over the replicas.
    return receiver if receiver in part.ranks else part.ranks[(receiver + number) % len(part.ranks)]


def _widest_first(pieces: list[RoutePiece]) -> tuple[RoutePiece, ...]:
    return tuple(sorted(pieces, key=lambda piece: -itemsize(piece.dtype)))


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 1 << 17 else f"{nbytes} bytes"
