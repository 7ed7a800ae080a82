"""The laws of benchmarks/scale.py at small numbers of ranks: a request, a connection or a message more for each rank
changes the table, which is to be made anew then."""

from __future__ import annotations

import pytest

from benchmarks.scale import Law, law_of, slow_hosts, store_requests, tree
from fullshard.peers import Watch


def test_requests_to_the_store() -> None:
    counts = {world: store_requests(world) for world in (8, 64, 256)}
    assert law_of({world: found[0] for world, found in counts.items()}) == Law(5)
    assert law_of({world: found[1] for world, found in counts.items()}) == Law(2)


def test_one_more_request_of_each_rank_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Watch.scope

    def scope(self: Watch, ranks: tuple[int, ...]) -> object:
        self.records.store.add("one more", 1)
        return original(self, ranks)

    monkeypatch.setattr(Watch, "scope", scope)
    assert law_of({world: store_requests(world)[0] for world in (8, 16, 64)}) == Law(6)


def test_counts_that_follow_no_law_are_refused() -> None:
    with pytest.raises(ValueError, match="a W \\+ b"):
        law_of({2: 4, 4: 16, 8: 64})
    with pytest.raises(ValueError, match="three numbers"):
        law_of({2: 4, 4: 8})
    assert [Law(3, 12).reaches(limit) for limit in (1023, 1024, 1026, 1027)] == [338, 338, 339, 339]


def test_a_barrier() -> None:
    assert law_of({world: tree(world)[0] for world in (8, 64, 1024)}) == Law(1, -1)
    assert [tree(world)[1:] for world in (8, 64, 1024)] == [(1, 7), (2, 8), (3, 10)]


def test_slow_hosts() -> None:
    found = slow_hosts(64)  # raises where the draws are far from the probability
    assert found.hosts == 8 and 0 < found.two <= found.waits < 0.2
    assert slow_hosts(1024, draws=40).waits > 0.4
