"""Who waits in vain, by records of any program and of ten thousand ranks; each rule by itself: test_diagnosis.py."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fullshard.peers import diagnosis
from fullshard.peers.diagnosis import Record
from fullshard.peers.store import runs


def record(
    rank: int,
    wait: Mapping[str, Any] | None = None,
    *,
    issued: Mapping[str, int] | None = None,
    asked: int = 0,
    epoch: int = 0,
    **more: Any,
) -> Record:
    """As `Watch.record` writes it."""
    far = {"s": {"epoch": epoch, "asked": asked, "issued": dict(issued or {})}}
    said: dict[str, Any] = {"n": 1, "process": f"m {rank} 0", "at": "", "far": far, **more}
    if wait is not None:
        said["wait"] = {"also": "", "since": 1.0, **wait}
    return Record(rank, said)


def message(number: int, ranks: Sequence[int], name: str = "g", epoch: int = 0) -> dict[str, Any]:
    what = f"message {number} of {name}"
    return dict(kind="message", scope="s", epoch=epoch, name=name, number=number, ranks=runs(ranks), what=what)


def question(number: int, ranks: Sequence[int], name: str = "order", epoch: int = 0) -> dict[str, Any]:
    return dict(kind="ask", scope="s", epoch=epoch, name=name, number=number, ranks=runs(ranks), what=name)


def test_ten_thousand_ranks_are_judged_at_once() -> None:
    world = range(10_000)
    wait = message(7, world)
    waiting = {rank: record(rank, wait, issued={"g": 7}) for rank in world if rank}
    assert diagnosis.stuck(waiting | {0: record(0, issued={"g": 6})}) == {}
    asks = record(0, question(0, world), issued={"g": 6}, asked=1)
    assert len(diagnosis.stuck(waiting | {0: asks})) == 10_000


# ---- any program -------------------------------------------------------------------------------------------------

# Of four ranks: groups that messages go over; the last one stands for questions to all.
GROUPS = ((0, 1), (1, 2), (2, 3), (0, 1, 2, 3), (0, 3), (0, 1, 2, 3))
QUESTIONS = len(GROUPS) - 1


class Program:
    """Ranks that take part in collectives, each in an order of its own; `histories`: the record of each rank after
    each thing that it did."""

    def __init__(self, calls: Sequence[Sequence[int]]) -> None:
        self.calls = [[call for call in its if rank in GROUPS[call]] for rank, its in enumerate(calls)]
        self.at = [0] * len(calls)
        self.issued = [[0] * len(GROUPS) for _ in calls]
        self.waits: list[tuple[int, int] | None] = [None] * len(calls)
        self.histories = [[self.record(rank)] for rank in range(len(calls))]

    def can_go_on(self, rank: int) -> bool:
        wait = self.waits[rank]
        if wait is None:
            return self.at[rank] < len(self.calls[rank])
        return all(self.issued[other][wait[0]] >= wait[1] for other in GROUPS[wait[0]])

    def go_on(self, rank: int) -> None:
        if self.waits[rank] is None:
            call = self.calls[rank][self.at[rank]]
            self.issued[rank][call] += 1
            self.waits[rank] = call, self.issued[rank][call]
        else:
            self.waits[rank] = None
            self.at[rank] += 1
        self.histories[rank].append(self.record(rank))

    def record(self, rank: int) -> Record:
        issued = {f"g{group}": self.issued[rank][group] for group in range(QUESTIONS)}
        asked = self.issued[rank][QUESTIONS]
        wait = self.waits[rank]
        told = None
        if wait is not None and wait[0] == QUESTIONS:
            told = question(wait[1] - 1, GROUPS[QUESTIONS])
        elif wait is not None:
            told = message(wait[1], GROUPS[wait[0]], f"g{wait[0]}")
        return record(rank, told, issued=issued, asked=asked)


def by_definition(records: Mapping[int, Record]) -> set[int]:
    """All sets of ranks each of which waits for another one of the set, together."""
    waiting = [rank for rank, one in records.items() if one.wait is not None]
    needs = {rank: set(diagnosis.missing(records[rank].said["wait"], records, rank)) for rank in waiting}
    found: set[int] = set()
    for size in range(1, len(waiting) + 1):
        for chosen in itertools.combinations(waiting, size):
            if all(needs[rank] & set(chosen) for rank in chosen):
                found |= set(chosen)
    return found


@given(
    calls=st.lists(st.lists(st.integers(0, len(GROUPS) - 1), max_size=6), min_size=4, max_size=4),
    order=st.randoms(use_true_random=False),
)
def test_no_false_proof_and_every_cycle_is_found(calls: list[list[int]], order: Any) -> None:
    program = Program(calls)
    while ready := [rank for rank in range(4) if program.can_go_on(rank)]:
        program.go_on(order.choice(ready))
    last = {rank: history[-1] for rank, history in enumerate(program.histories)}
    assert set(diagnosis.stuck(last)) == by_definition(last)
    # Records of any age: whoever is found stuck by them never continues.
    for _ in range(20):
        ages = [order.randrange(len(history)) for history in program.histories]
        seen = {rank: history[ages[rank]] for rank, history in enumerate(program.histories)}
        found = diagnosis.stuck(seen)
        assert set(found) == by_definition(seen)
        for rank in found:
            assert ages[rank] == len(program.histories[rank]) - 1, "it went on"
