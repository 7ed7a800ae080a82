"""Sequences cut over ranks for context parallelism: who holds what, who attends to what, and what attention sends.

A sequence is cut into equal chunks. With balanced splits rank r of n holds chunks r and 2n-1-r (zig-zag), so that under
a causal mask all ranks have the same work; otherwise it holds chunk r.

>>> SequenceSplit(2, balanced=True).held(1), SequenceSplit(2, balanced=False).held(1)
((1, 2), (1,))
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Visible(NamedTuple):
    """The pairs of a rank's queries and the keys of one rank under a causal mask: queries from chunk `first_query` of
    those that the rank holds, keys before chunk `end_key`, and whether the pair is causal in itself."""

    first_query: int
    end_key: int
    is_causal: bool


class SequenceSplit(NamedTuple):
    """How a sequence is cut over `degree` ranks."""

    degree: int
    balanced: bool

    @property
    def each(self) -> int:
        """Chunks of one rank."""
        return 2 if self.balanced else 1

    @property
    def chunks(self) -> int:
        """Chunks of the sequence, which divide its length."""
        return self.degree * self.each

    def held(self, rank: int) -> tuple[int, ...]:
        """The chunks of `rank`, in the order in which it holds them."""
        return (rank, self.chunks - 1 - rank) if self.balanced else (rank,)

    @property
    def order(self) -> list[int]:
        """All chunks as the ranks hold them, one rank after the other.

        >>> SequenceSplit(2, balanced=True).order
        [0, 3, 1, 2]
        """
        return [chunk for rank in range(self.degree) for chunk in self.held(rank)]

    def nearest(self, length: int) -> tuple[int, ...]:
        """The legal lengths next to `length`: it alone, or the ones below and above. A rank holds at least two tokens.

        >>> SequenceSplit(2, balanced=True).nearest(10), SequenceSplit(2, balanced=True).nearest(12)
        ((8, 12), (12,))
        """
        least = max(self.chunks, 2 * self.degree)
        below = length // self.chunks * self.chunks
        if below == length and length >= least:
            return (length,)
        return tuple(one for one in (below, max(below + self.chunks, least)) if one >= least)

    def legal_degrees(self, length: int) -> tuple[int, ...]:
        """The numbers of ranks next to this one over which sequences of `length` can be cut: below, and above.

        >>> SequenceSplit(4, balanced=True).legal_degrees(24), SequenceSplit(2, balanced=True).legal_degrees(15)
        ((3, 6), (1,))
        """
        legal = [
            one
            for one in range(1, length // 2 + 1)
            if one == 1 or self._replace(degree=one).nearest(length) == (length,)
        ]
        return *[one for one in legal if one < self.degree][-1:], *[one for one in legal if one > self.degree][:1]

    def visible(self, rank: int, source: int) -> Visible | None:
        """The keys of `source` that the queries of `rank` see under a causal mask; None: they see none.

        >>> split = SequenceSplit(4, balanced=True)
        >>> [split.visible(1, source) for source in (0, 1, 2)] == [(0, 1, False), (0, 2, True), (1, 2, False)]
        True
        """
        if rank == source:
            return Visible(0, self.each, True)
        if not self.balanced:
            return Visible(0, 1, False) if source < rank else None
        # An earlier rank's second chunk comes after both of this one's; a later rank's two are between them.
        return Visible(0, 1, False) if source < rank else Visible(1, 2, False)


# ---- heads -----------------------------------------------------------------------------------------------------------


def repeats(heads: int, kv_heads: int, degree: int) -> int | None:
    """How often each key/value head is repeated, so that both kinds of heads can be dealt to `degree` ranks; None: the
    query heads cannot.

    >>> repeats(8, 8, 4), repeats(8, 2, 4), repeats(8, 2, 8), repeats(6, 2, 4)
    (1, 2, 4, None)
    """
    if heads % degree or heads % kv_heads:
        return None
    return degree // math.gcd(kv_heads, degree)


def nearest_degrees(heads: int, degree: int) -> tuple[int, ...]:
    """The numbers of ranks to which `heads` can be dealt, below and above `degree`.

    >>> nearest_degrees(6, 4), nearest_degrees(6, 8)
    ((3, 6), (6,))
    """
    legal = [one for one in range(1, heads + 1) if heads % one == 0]
    return *[one for one in legal if one < degree][-1:], *[one for one in legal if one > degree][:1]


# ---- messages --------------------------------------------------------------------------------------------------------


class AttentionShape(NamedTuple):
    """One attention over whole sequences. `length`: tokens of the whole sequence; `itemsize`: bytes of an element."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int


class Traffic(NamedTuple):
    """Messages and bytes that one rank sends to others: messages of which it is a part, and the bytes that leave it."""

    forward_messages: int
    forward_nbytes: int
    backward_messages: int
    backward_nbytes: int

    def times(self, forwards: int, backwards: int) -> tuple[int, int]:
        """(messages, bytes) of so many forwards and backwards."""
        return (
            forwards * self.forward_messages + backwards * self.backward_messages,
            forwards * self.forward_nbytes + backwards * self.backward_nbytes,
        )


def ulysses_traffic(shape: AttentionShape, degree: int) -> Traffic:
    """All-to-all over heads: queries, keys and values in one message, the result in another one; backward alike.

    >>> ulysses_traffic(AttentionShape(1, 8, 4, 2, 16, 4), 2)
    Traffic(forward_messages=2, forward_nbytes=1536, backward_messages=2, backward_nbytes=1536)
    """
    times = repeats(shape.heads, shape.kv_heads, degree)
    assert times is not None
    if degree == 1:
        return Traffic(0, 0, 0, 0)
    heads = 2 * shape.heads + 2 * shape.kv_heads * times
    held = shape.batch * shape.length // degree * heads * shape.head_dim * shape.itemsize
    nbytes = held // degree * (degree - 1)
    return Traffic(2, nbytes, 2, nbytes)


def ring_traffic(shape: AttentionShape, degree: int) -> Traffic:
    """A ring: keys and values pass every other rank; in backward again, and their gradients, in float32, pass all.

    >>> ring_traffic(AttentionShape(1, 8, 4, 2, 16, 2), 2)
    Traffic(forward_messages=1, forward_nbytes=512, backward_messages=3, backward_nbytes=2560)
    """
    if degree == 1:
        return Traffic(0, 0, 0, 0)
    numel = 2 * shape.batch * shape.kv_heads * shape.length // degree * shape.head_dim
    once = (degree - 1) * numel * shape.itemsize
    gradients = degree * numel * max(4, shape.itemsize)
    return Traffic(degree - 1, once, 2 * degree - 1, once + gradients)
