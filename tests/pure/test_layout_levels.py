"""Bytes of messages between hosts by each way, against messages that are listed one by one; and which way is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.layout import (
    ONE_LEVEL,
    TWO_LEVELS,
    Levels,
    Rates,
    Share,
    Ways,
    crossing,
    fastest,
    levels_of,
    on_hosts,
    staying,
)

Message = tuple[int, int, Fraction]


def pairs(hosts: Sequence[int]) -> list[Message]:
    """(from, to, part of the unit) of a gather from each rank to each other one."""
    world = len(hosts)
    return [(a, b, Fraction(1, world)) for a in range(world) for b in range(world) if a != b]


def ring(hosts: Sequence[int]) -> list[Message]:
    world = len(hosts)
    return [(a, (a + 1) % world, Fraction(1, world)) for a in range(world) for _ in range(world - 1)]


def in_levels(hosts: Sequence[int]) -> list[Message]:
    """As `gather_in_levels` sends them."""
    levels, world = levels_of(hosts), len(hosts)
    assert isinstance(levels, Levels)
    part, found = Fraction(1, world), list[Message]()
    for rank in range(world):
        found += [(rank, peer, part) for peer in (*levels.counterparts(rank), *levels.neighbours(rank))]
        found += [(rank, peer, part) for _ in levels.counterparts(rank) for peer in levels.neighbours(rank)]
    return found


def busiest(hosts: Sequence[int], messages: Sequence[Message], *, leaving: bool) -> Fraction:
    sums = dict.fromkeys(hosts, Fraction(0))
    for source, to, part in messages:
        if (hosts[source] != hosts[to]) == leaving:
            sums[hosts[source]] += part
    return max(sums.values())


@st.composite
def placed(draw: st.DrawFn) -> list[int]:
    """The hosts of ranks, equally many on each, in any order."""
    count, each = draw(st.integers(2, 5)), draw(st.integers(2, 4))
    return draw(st.permutations([host for host in range(count) for _ in range(each)]))


@given(placed())
def test_bytes_of_each_way_are_those_of_its_messages(hosts: list[int]) -> None:
    ways = [ring(hosts), pairs(hosts), in_levels(hosts)]
    assert crossing([hosts]) == pytest.approx(Share(*(float(busiest(hosts, way, leaving=True)) for way in ways)))
    assert staying([hosts]) == pytest.approx(Share(*(float(busiest(hosts, way, leaving=False)) for way in ways)))


@given(placed(), st.floats(1e6, 1e11), st.floats(1e6, 1e11))
def test_two_levels_are_never_chosen_where_one_is_faster(hosts: list[int], between: float, within: float) -> None:
    """By bytes and rates; with stages of two levels that do not overlap, so at the most that they take."""
    chosen = fastest(crossing([hosts]), staying([hosts]), Rates(between, within))

    def seconds(messages: Sequence[Message], *, one_after_the_other: bool = False) -> float:
        outside, inside = (float(busiest(hosts, messages, leaving=leaving)) for leaving in (True, False))
        parts = outside / between, inside / within
        return sum(parts) if one_after_the_other else max(parts)

    time = {"ring": seconds(ring(hosts)), "pairs": seconds(pairs(hosts))}
    time["levels"] = seconds(in_levels(hosts), one_after_the_other=True)
    assert time[chosen.gather] == pytest.approx(min(time.values()))
    assert time[chosen.reduce] == pytest.approx(min(time["pairs"], time["levels"]))
    # Gloo's reduce-scatter, twice around a ring, is no third way.
    assert time[chosen.reduce] <= 2 * time["ring"] * (1 + 1e-9)


@pytest.mark.parametrize(
    ("count", "each", "between", "within", "ways"),
    [
        # Two hosts on 100 Mbit/s and 1 Gbit/s: what crosses decides.
        (2, 2, 12.5e6, 1.5e9, TWO_LEVELS),
        (2, 2, 125e6, 1.5e9, TWO_LEVELS),
        # A link as fast as memory, and one that is faster.
        (2, 2, 1.5e9, 1.5e9, Ways("ring", "pairs")),
        (2, 2, 12.5e9, 1.5e9, ONE_LEVEL),
        # On many hosts a ring leaves each of them as rarely as two levels, and has one stage less.
        (2, 8, 125e6, 6e9, TWO_LEVELS),
        (128, 8, 125e6, 6e9, Ways("ring", "levels")),
        (128, 8, 12.5e9, 6e9, ONE_LEVEL),
    ],
)
def test_the_choice(count: int, each: int, between: float, within: float, ways: Ways) -> None:
    hosts = on_hosts([[rank // each for rank in range(count * each)]], "gloo")
    assert hosts.fastest(Rates(between, within)) == ways


def test_groups_of_a_mesh_have_levels_in_one_pattern() -> None:
    assert on_hosts(["aabb", "ccdd"], "gloo").levels == Levels(((0, 1), (2, 3)))
    for rows in (["aabb", "cdcd"], ["aabb", "ccce"], ["aaaa", "bbcc"]):
        found = on_hosts(rows, "gloo")
        assert found.levels is None and not found.exchanges, rows
    assert on_hosts(["aabb", "ccdd"], "nccl").levels is None
    assert on_hosts(["abcd"], "gloo").exchanges and on_hosts(["aaaa", "bbbb"], "gloo").exchanges


def test_what_a_host_sends_follows_the_ways() -> None:
    hosts = on_hosts(["aabb"], "gloo")
    found = {
        str(ways): (placed.gathered(100, 0), placed.gathered(0, 100), placed.reduced(100))
        for ways in (TWO_LEVELS, Ways("ring", "levels"), Ways("ring", "pairs"), ONE_LEVEL)
        for placed in [hosts._replace(ways=ways)]
    }
    assert found == {
        "two levels": (50, 50, 50),
        "two levels, gathers around a ring": (75, 75, 50),
        "one level, gathers around a ring": (75, 75, 100),
        "one level": (100, 75, 100),
    }
    assert hosts.gathered(100, 0, block=2) == 0 and on_hosts(["abab"], "gloo").gathered(100, 0, block=2) == 100
    # Unequal numbers of ranks: the backend reduces, gloo by an all-reduce around a ring.
    assert [on_hosts(["aaab"], backend).reduced(100) for backend in ("gloo", "nccl")] == [150, 75]
