"""Why ranks wait in vain, from their records alone."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.peers import diagnosis
from fullshard.peers.diagnosis import Reader, Record
from fullshard.peers.store import Host, runs


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


def meeting(ranks: Sequence[int], epoch: int = 0) -> dict[str, Any]:
    return dict(kind="meet", scope="s", epoch=epoch, name="", number=0, ranks=runs(ranks), what="the next step")


def torch_call(number: int, ranks: Sequence[int], name: str = "0") -> dict[str, Any]:
    return dict(kind="torch", scope="", epoch=0, name=name, number=number, ranks=runs(ranks), what="barrier")


def stuck(*records: Record) -> list[int]:
    return sorted(diagnosis.stuck({one.rank: one for one in records}))


# ---- proofs, and what is none ----------------------------------------------------------------------------------

BOTH = (0, 1)


def test_ranks_at_other_messages_prove_each_other_stuck() -> None:
    a = record(0, message(1, BOTH, "g"), issued={"g": 1, "h": 0})
    b = record(1, message(1, BOTH, "h"), issued={"g": 0, "h": 1})
    assert stuck(a, b) == [0, 1]


def test_a_message_and_a_question_prove() -> None:
    a = record(0, message(1, BOTH), issued={"g": 1})
    b = record(1, question(0, BOTH), issued={"g": 0}, asked=1)
    assert stuck(a, b) == [0, 1]


def test_ranks_in_one_question_or_meeting_prove_nothing() -> None:
    assert stuck(record(0, question(0, BOTH), asked=1), record(1, question(0, BOTH), asked=1)) == []
    assert stuck(record(0, meeting(BOTH)), record(1, meeting(BOTH))) == []


def test_a_meeting_and_a_question_prove() -> None:
    assert stuck(record(0, meeting(BOTH)), record(1, question(0, BOTH), asked=1)) == [0, 1]


def test_a_rank_that_goes_on_frees_all_that_wait_for_it() -> None:
    a = record(0, message(1, (0, 1)), issued={"g": 1})
    b = record(1, message(1, (1, 2), "h"), issued={"g": 0, "h": 1})
    assert stuck(a, b, record(2, issued={"h": 0})) == []


def test_a_rank_without_a_record_frees() -> None:
    assert stuck(record(0, message(1, BOTH), issued={"g": 1})) == []


def test_a_cycle_takes_along_who_waits_for_it() -> None:
    a = record(0, message(1, BOTH, "g"), issued={"g": 1, "h": 0})
    b = record(1, message(1, BOTH, "h"), issued={"g": 0, "h": 1})
    c = record(2, message(1, (0, 2), "k"), issued={"k": 1})
    assert stuck(a, b, c) == [0, 1, 2]


def test_another_thread_of_a_rank_frees() -> None:
    a = record(0, message(1, BOTH, "g"), issued={"g": 1, "h": 0}, beside=1)
    b = record(1, message(1, BOTH, "h"), issued={"g": 0, "h": 1})
    assert stuck(a, b) == []


def test_a_rank_that_failed_in_this_epoch_will_be_ended_anyway() -> None:
    failed = {"s": {"epoch": 0}}
    a = record(0, message(1, BOTH, "g"), issued={"g": 1, "h": 0}, failed=failed)
    b = record(1, message(1, BOTH, "h"), issued={"g": 0, "h": 1})
    assert stuck(a, b) == []
    # So will those who wait for it.
    assert stuck(record(0, meeting(BOTH), failed=failed), record(1, question(0, BOTH), asked=1)) == []


def test_epochs() -> None:
    # In the next epoch it has come to whatever is asked for in this one, and in the one before it has not.
    assert stuck(record(0, question(0, BOTH), asked=1), record(1, meeting(BOTH, 1), epoch=1)) == []
    old = record(0, question(3, BOTH), asked=4)
    new = record(1, question(0, BOTH, epoch=1), asked=1, epoch=1)
    assert stuck(old, new) == []
    crossed = record(0, torch_call(1, BOTH), torch={"0": 1})
    assert stuck(crossed, record(1, message(1, BOTH, epoch=1), issued={"g": 1}, epoch=1, torch={"0": 0})) == [0, 1]


def test_a_collective_of_torchs() -> None:
    a = record(0, torch_call(4, BOTH), issued={"g": 0}, torch={"0": 4})
    b = record(1, message(1, BOTH), issued={"g": 1}, torch={"0": 3})
    assert stuck(a, b) == [0, 1]
    issued = record(1, message(1, BOTH), issued={"g": 1}, torch={"0": 4})
    assert stuck(a, issued) == []
    unknown = record(1, message(1, BOTH), issued={"g": 1})
    assert stuck(a, unknown) == []


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


# ---- the reader ----------------------------------------------------------------------------------------------


class Seen(Host):
    """`conditions`: by process."""

    def __init__(self) -> None:
        self.conditions: dict[str, tuple[str, int]] = {}

    def condition(self, process: str) -> tuple[str, int]:
        return self.conditions.get(process, ("exists", 0))


def text(of: Record, n: int = 1) -> str:
    return json.dumps(dict(of.said, n=n))


def read(reader: Reader, now: float, *records: Record, n: int = 1) -> dict[int, Record]:
    return reader.read({one.rank: text(one, n) for one in records}, now)


A, B = record(0), record(1)


def test_a_proof_counts_when_it_was_seen_twice() -> None:
    reader = Reader(Seen())
    a = record(0, message(1, BOTH, "g"), issued={"g": 1, "h": 0})
    b = record(1, message(1, BOTH, "h"), issued={"g": 0, "h": 1})
    assert reader.stuck(read(reader, 0.0, a, b)) == {}
    assert sorted(reader.stuck(read(reader, 1.0, a, b))) == [0, 1]
    # Of other waits it is another one.
    again = Record(1, dict(b.said, wait=dict(b.said["wait"], since=9.0)))
    assert reader.stuck(read(reader, 2.0, a, again)) == {}
    assert sorted(reader.stuck(read(reader, 3.0, a, again))) == [0, 1]
    reader.forget()
    assert reader.stuck(read(reader, 4.0, a, again)) == {}


def test_silence() -> None:
    reader = Reader(Seen())
    (a,) = read(reader, 0.0, A).values()
    assert reader.lost(a, 10.0, 9.9) == ""
    assert "gave no sign of life for 10 s: it exists and does nothing" in reader.lost(a, 10.0, 10.1)
    assert reader.lost(a, 0.0, 1e9) == ""  # never
    (a,) = read(reader, 10.0, A, n=2).values()
    assert reader.lost(a, 10.0, 19.9) == ""


def test_a_process_that_computes_is_not_lost() -> None:
    host = Seen()
    reader = Reader(host)
    process = A.said["process"]
    host.conditions[process] = "exists", 100
    (a,) = read(reader, 0.0, A).values()
    host.conditions[process] = "exists", 101
    assert reader.lost(a, 10.0, 11.0) == ""
    assert reader.lost(a, 10.0, 20.0) == ""
    assert "does nothing" in reader.lost(a, 10.0, 21.1)
    host.conditions[process] = "stopped", 200
    assert "it is stopped" in reader.lost(a, 10.0, 21.1)


def test_a_process_of_another_machine() -> None:
    host = Seen()
    reader = Reader(host)
    host.conditions[A.said["process"]] = "unknown", 0
    (a,) = read(reader, 0.0, A).values()
    assert reader.lost(a, 10.0, 9.0) == ""
    assert "killed, stopped or hanging" in reader.lost(a, 10.0, 10.1)


def test_a_process_that_is_gone_is_lost_at_once_unless_it_said_why() -> None:
    host = Seen()
    host.conditions[A.said["process"]] = "gone", 0
    reader = Reader(host)
    (a,) = read(reader, 0.0, A).values()
    assert "since its process has ended" in reader.lost(a, 10.0, 0.1)
    (a,) = read(reader, 0.2, record(0, ended="its process ended")).values()
    assert reader.lost(a, 10.0, 0.3) == ""


def test_who_looks_late_begins_to_count_anew() -> None:
    reader = Reader(Seen())
    read(reader, 0.0, A)
    reader.forget()
    (a,) = read(reader, 100.0, A).values()
    assert reader.lost(a, 10.0, 109.0) == ""
    assert reader.lost(a, 10.0, 111.0) != ""


def test_mail_is_no_record_and_no_sign_of_life() -> None:
    reader = Reader(Seen())
    read(reader, 0.0, A)
    found = reader.read({0: '{"mail":["x"]}', 1: '{"mail":[]}', 2: ""}, 5.0)
    assert list(found) == [0]
    assert reader.lost(found[0], 10.0, 10.1) != ""


# ---- what is told --------------------------------------------------------------------------------------------


def test_late_names_who_did_not_come_and_where_it_is() -> None:
    records = {
        0: record(0, message(1, (0, 1, 2)), issued={"g": 1}),
        1: record(1, question(0, (0, 1, 2)), issued={"g": 0}, at="train.py:7 in step"),
        2: record(2, doing="optimizer.step", at="train.py:9 in main"),
    }
    fault = diagnosis.late(records[0].said["wait"], records, 0, 30.0)
    assert (fault.rank, fault.kind, fault.scope, fault.epoch) == (1, "late", "s", 0)
    assert "for 30 s" in fault.text
    assert "rank 1 in order (train.py:7 in step); nor did rank 2 in optimizer.step (train.py:9 in main)" in fault.text
    assert "has not begun" in diagnosis.late(message(1, (0, 5)), records, 0, 30.0).text


def test_late_where_all_have_come() -> None:
    records = {rank: record(rank, message(1, BOTH), issued={"g": 1}) for rank in BOTH}
    assert diagnosis.late(message(1, BOTH), records, 0, 30.0).rank == 1


def test_published() -> None:
    failed = dict(rank=0, kind="raised", text="ValueError: x", scope="s", epoch=2)
    a = record(0, failed={"s": failed, "other": dict(failed, scope="other")})
    b = record(1, ended="its process ended", issued={"g": 4}, asked=3, epoch=2, step=5)
    raised, ended = diagnosis.published([a, b], "s", 2)
    assert (raised.rank, raised.kind, raised.text) == (0, "raised", "ValueError: x")
    assert (ended.rank, ended.kind, ended.epoch, ended.issued, ended.asked, ended.step) == (
        1,
        "ended",
        2,
        {"g": 4},
        3,
        5,
    )
    assert diagnosis.published([a, b], "s", 3) == []
    # One that ended before it ever was in a scope will not come to it either.
    (never,) = diagnosis.published([b], "elsewhere", 4)
    assert (never.rank, never.kind, never.epoch, never.asked) == (1, "ended", 4, 0)


@pytest.mark.parametrize("explained", [None, "better words"])
def test_disagreement(explained: str | None) -> None:
    a = record(0, message(1, BOTH, "g"), issued={"g": 1, "h": 0})
    b = record(1, message(1, BOTH, "h"), issued={"g": 0, "h": 1})
    found = diagnosis.disagreement({0: a, 1: b}, lambda _: explained)
    assert found == (explained or found)
    if explained is None:
        assert "rank 0 waiting in message 1 of g and rank 1 waiting in message 1 of h" in found


def test_disagreement_of_a_rank_that_is_alone_in_a_collective() -> None:
    a = record(0, torch_call(4, BOTH), torch={"0": 4}, at="train.py:3 in main")
    b = record(1, message(1, BOTH), issued={"g": 1}, torch={"0": 3})
    found = diagnosis.disagreement({0: a, 1: b}, lambda _: None)
    assert "found rank 0 in barrier (train.py:3 in main), which needs ranks 0 and 1" in found
    assert "rank 1 waits in message 1 of g" in found
