"""Sequences cut over ranks: each chunk once, what is seen under a causal mask, legal lengths, heads, bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.layout import (
    AttentionShape,
    SequenceSplit,
    nearest_degrees,
    repeats,
    ring_traffic,
    ulysses_traffic,
)

SPLITS = [SequenceSplit(degree, balanced) for degree in (1, 2, 3, 4, 8) for balanced in (True, False)]


@pytest.mark.parametrize("split", SPLITS)
def test_each_chunk_is_held_once(split: SequenceSplit) -> None:
    assert sorted(split.order) == list(range(split.chunks))
    assert [chunk for rank in range(split.degree) for chunk in split.held(rank)] == split.order
    assert all(list(split.held(rank)) == sorted(split.held(rank)) for rank in range(split.degree))


@pytest.mark.parametrize("split", SPLITS)
def test_what_is_seen_of_each_rank(split: SequenceSplit) -> None:
    """Chunk by chunk: computed are all pairs that are seen, and none that is not, but for those on the diagonal."""
    for rank in range(split.degree):
        work = 0
        for source in range(split.degree):
            queries, keys = split.held(rank), split.held(source)
            seen = {(query, key) for query in queries for key in keys if query >= key}
            pair = split.visible(rank, source)
            computed = set()
            if pair is not None:
                computed = {(q, k) for q in queries[pair.first_query :] for k in keys[: pair.end_key]}
                assert pair.is_causal is (rank == source)
                if pair.is_causal:
                    computed = {(q, k) for q, k in computed if q >= k}
            assert computed == seen
            work += len(seen)
        if split.balanced:
            assert work == 2 * split.degree + 1, "all ranks have the same work"


@given(st.sampled_from(SPLITS), st.integers(1, 200))
def test_the_nearest_lengths(split: SequenceSplit, length: int) -> None:
    def legal(one: int) -> bool:
        return one % split.chunks == 0 and one >= 2 * split.degree

    below = next((one for one in range(length, 0, -1) if legal(one)), None)
    above = next(one for one in range(length, 10_000) if legal(one))
    assert split.nearest(length) == tuple(dict.fromkeys(one for one in (below, above) if one is not None))


@given(st.integers(1, 24), st.integers(1, 24), st.integers(1, 16))
def test_repeats_are_the_fewest_that_can_be_dealt(heads: int, kv_heads: int, degree: int) -> None:
    found = repeats(heads, kv_heads, degree)
    if heads % degree or heads % kv_heads:
        assert found is None
        return
    assert found is not None
    assert kv_heads * found % degree == 0 and heads % (kv_heads * found) == 0
    assert not any(kv_heads * times % degree == 0 and heads % (kv_heads * times) == 0 for times in range(1, found))
    # The query heads of one rank have exactly the key/value heads of that rank.
    held, group = kv_heads * found // degree, heads // kv_heads
    for rank in range(degree):
        queries = range(rank * heads // degree, (rank + 1) * heads // degree)
        for place, query in enumerate(queries):
            local = place // (len(queries) // held)
            assert (rank * held + local) // found == query // group


@given(st.integers(1, 64), st.integers(1, 64))
def test_the_nearest_degrees_divide(heads: int, degree: int) -> None:
    found = nearest_degrees(heads, degree)
    assert all(heads % one == 0 and one != degree for one in found)


def test_bytes_fall_with_the_degree_or_do_not() -> None:
    """Of one rank: an all-to-all sends ever less, a ring as much whatever the number of ranks is."""
    shape = AttentionShape(1, 4096, 16, 16, 64, 2)
    ulysses = [ulysses_traffic(shape, degree).forward_nbytes for degree in (2, 4, 8)]
    around = [ring_traffic(shape, degree).forward_nbytes for degree in (2, 4, 8)]
    assert ulysses[0] > ulysses[1] > ulysses[2] and around[0] < around[1] < around[2] < 2 * around[0]
    assert ulysses_traffic(shape, 1) == ring_traffic(shape, 1) == (0, 0, 0, 0)
    assert ring_traffic(shape, 4).times(2, 1) == (2 * 3 + 7, 2 * around[1] + ring_traffic(shape, 4).backward_nbytes)
