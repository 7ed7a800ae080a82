"""The rules by which the rank that reads tells waits in vain from slow peers. Each of them alone keeps a right program
from an error. tests/procs/test_elsewhere.py and tests/procs/test_meshes_apart.py have such programs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fullshard.peers import diagnosis
from fullshard.peers.diagnosis import Reader, Record, disagreement, late, missing, published, stuck
from fullshard.peers.store import runs

SCOPE = "5c0be1"
OTHER = "07be12"


def wait(kind: str, *ranks: int, **more: Any) -> dict[str, Any]:
    """What a rank waits for, and of whom."""
    told = {"kind": kind, "scope": SCOPE, "epoch": 2, "name": "data 0.1", "number": 5, "what": f"the {kind}"}
    return told | {"ranks": runs(ranks), "also": "", "since": 1.0} | more


def far(issued: int = 4, asked: int = 7, epoch: int = 2) -> dict[str, Any]:
    return {"epoch": epoch, "asked": asked, "issued": {"data 0.1": issued}}


def record(rank: int, waits: dict[str, Any] | None = None, **more: Any) -> Record:
    said: dict[str, Any] = {"n": 1, "process": f"machine {rank} 1", "at": f"train.py:{rank} in step"}
    said |= {"far": {SCOPE: far()}, "torch": {}}
    if waits is not None:
        said["wait"] = waits
    return Record(rank, said | more)


def world(*records: Record) -> dict[int, Record]:
    return {one.rank: one for one in records}


# ---- who has come ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waits", "more", "come"),
    [
        (wait("message", 0, 1), {"far": {SCOPE: far(issued=4)}}, False),
        (wait("message", 0, 1), {"far": {SCOPE: far(issued=5)}}, True),
        (wait("message", 0, 1, name="small 0.1", number=1), {}, False),  # it has not opened that group
        (wait("message", 0, 1), {"far": {SCOPE: far(issued=9, epoch=1)}}, False),  # before the last meeting
        (wait("message", 0, 1), {"far": {SCOPE: far(issued=0, epoch=3)}}, True),  # after the next one
        (wait("message", 0, 1), {"far": {}}, False),
        (wait("message", 0, 1), {"far": {OTHER: far(issued=9)}}, False),
        (wait("ask", 0, 1, number=7), {"far": {SCOPE: far(asked=7)}}, False),
        (wait("ask", 0, 1, number=7), {"far": {SCOPE: far(asked=8)}}, True),
        (wait("meet", 0, 1), {}, False),
        (wait("meet", 0, 1), {"wait": wait("meet", 0, 1)}, True),
        (wait("meet", 0, 1), {"wait": wait("meet", 0, 1, scope=OTHER)}, False),
        (wait("meet", 0, 1), {"wait": wait("ask", 0, 1)}, False),
        (wait("connect", 0, 1, name="reduce 0.1"), {}, False),
        (wait("connect", 0, 1, name="reduce 0.1"), {"wait": wait("connect", 0, 1, name="reduce 0.1")}, True),
        (wait("connect", 0, 1), {}, True),  # it has them
        (wait("torch", 0, 1, name="0"), {"torch": {"0": 4}}, False),
        (wait("torch", 0, 1, name="0"), {"torch": {"0": 5}}, True),
        (wait("torch", 0, 1, name="0"), {}, True),  # nobody knows
    ],
)
def test_who_has_come(waits: dict[str, Any], more: dict[str, Any], come: bool) -> None:
    assert record(1, **more).has_come(waits) is come
    assert missing(waits, world(record(0, waits), record(1, **more)), 0) == ([] if come else [1])


def test_who_has_no_record_has_not_come() -> None:
    assert missing(wait("ask", 0, 1, 2), world(record(0)), 0) == [1, 2]


# ---- proofs ----------------------------------------------------------------------------------------------------------


def test_two_that_wait_for_each_other_are_stuck() -> None:
    waiting = record(0, wait("message", 0, 1)), record(1, wait("ask", 0, 1, number=7))
    assert sorted(stuck(world(*waiting))) == [0, 1]
    text = disagreement(stuck(world(*waiting)), lambda found: None)
    assert text == (
        "expected all ranks to do the same, found rank 0 waiting in the message and rank 1 waiting in the ask: none of "
        "them can continue; make all ranks take the same calls in the same order"
    )


def test_who_asks_why_a_connection_closed_is_about_to_go_on() -> None:
    asks = record(0, wait("message", 0, 1, also="closed"))
    assert stuck(world(asks, record(1, wait("ask", 0, 1, number=7)))) == {}


def test_a_ring_is_stuck_whatever_the_meshes() -> None:
    ring = [record(rank, wait("ask", rank, (rank + 1) % 4, scope=f"{rank}", number=0)) for rank in range(4)]
    assert sorted(stuck(world(*ring))) == [0, 1, 2, 3]
    # One that continues frees all of them.
    assert stuck(world(*ring[:3], record(3))) == {}


def test_ranks_that_follow_a_stuck_one_are_stuck_with_it() -> None:
    two = record(0, wait("message", 0, 1)), record(1, wait("ask", 0, 1, number=7))
    follows = record(2, wait("message", 1, 2, name="data 0.2", number=1))
    assert sorted(stuck(world(*two, follows))) == [0, 1, 2]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(record(1), id="it computes"),
        pytest.param(record(1, wait("ask", 0, 1, number=6)), id="its answer is there"),
        pytest.param(record(1, wait("message", 0, 1), far={SCOPE: far(issued=5)}), id="it has sent what is waited for"),
        pytest.param(record(1, wait("ask", 1, 2, number=7)), id="it needs another rank"),
        pytest.param(record(1, wait("ask", 0, 1, number=7), beside=1), id="another thread of it sends"),
        pytest.param(
            record(1, wait("ask", 0, 1, number=7), failed={SCOPE: {"epoch": 2}}), id="its wait is about to end"
        ),
    ],
)
def test_who_may_go_on_is_not_stuck(other: Record) -> None:
    mine = record(0, wait("message", 0, 1), far={SCOPE: far(asked=7 if other.wait else 0)})
    if other.wait is not None and other.wait["number"] == 6:
        assert missing(other.wait, world(mine, other), 1) == []
    assert stuck(world(mine, other, record(2))) == {}
    assert stuck(world(mine)) == {}, "who has no record may go on"


def test_who_meets_after_its_failure_is_stuck_with_one_in_torch() -> None:
    meets = record(0, wait("meet", 0, 1), failed={SCOPE: {"epoch": 2}}, torch={"0": 3})
    follows = record(2, wait("ask", 0, 1, 2, number=7))
    assert stuck(world(meets, follows)) == {}, "it hears of the failure"
    alone = record(1, wait("torch", 0, 1, name="0", number=4, scope="", epoch=0))
    assert sorted(stuck(world(meets, alone))) == [0, 1]
    assert disagreement(stuck(world(meets, alone)), lambda found: None) == (
        "expected all ranks to take the same calls, found rank 1 in the torch (train.py:1 in step), which needs ranks "
        "0 and 1, while rank 0 waits in the meet: neither can continue; let ranks 0 and 1 make that call at the same "
        "place, or none of them (not under `if rank == ...`)"
    )


def test_several_in_one_collective_of_torch_s_are_named_together() -> None:
    waits = wait("torch", 0, 1, 2, name="0", number=4)
    found = world(record(0, wait("message", 0, 1), torch={"0": 3}), record(1, waits), record(2, waits))
    assert sorted(stuck(found)) == [0, 1, 2]
    assert "found ranks 1 and 2 in the torch (train.py:1 in step)" in disagreement(found, lambda found: None)


def device(**more: Any) -> dict[str, Any]:
    """A message under way on a device: the host continues."""
    return wait("message", 0, 1, **more) | {"also": "device"}


def test_a_message_on_a_device_is_proof_against_those_who_are_past_it_alone() -> None:
    """Rank 0 has sent the fifth message of its scope, and then continues. Rank 1 asks in that scope before it sends the
    fifth: they do different things. But rank 0 may come to what rank 1 waits for anywhere else."""
    for waits in (wait("ask", 0, 1, number=7), wait("message", 0, 1, name="reduce 0.1", number=1), device(number=6)):
        assert sorted(stuck(world(record(0, device()), record(1, waits)))) == [0, 1]
    for waits in (wait("ask", 0, 1, number=7, scope=OTHER), wait("torch", 0, 1, name="0", number=4)):
        assert stuck(world(record(0, device(), torch={"0": 3}), record(1, waits))) == {}
    # Rank 1 has the answer of rank 0, and waits for that of rank 2, which waits for rank 0 elsewhere.
    asked = {SCOPE: far(issued=5, asked=8)}
    third = record(2, wait("ask", 0, 2, scope=OTHER, number=0))
    one = record(1, wait("ask", 0, 1, 2, number=7))
    assert stuck(world(record(0, device(), far=asked), one, third)) == {}


# ---- what one has seen of the others ---------------------------------------------------------------------------------


class Host:
    """Processes as they are said to be."""

    def __init__(self) -> None:
        self.is_, self.used = "exists", 10

    def condition(self, process: str) -> tuple[str, int]:
        return self.is_, self.used


@pytest.fixture
def host() -> Host:
    return Host()


def text(one: Record) -> str:
    return json.dumps(one.said)


def test_a_proof_counts_when_it_is_seen_twice(host: Host) -> None:
    reader = Reader(host)  # type: ignore[arg-type]
    found = world(record(0, wait("message", 0, 1)), record(1, wait("ask", 0, 1, number=7)))
    assert reader.stuck(found) == {} and sorted(reader.stuck(found)) == [0, 1]
    later = world(record(0, wait("message", 0, 1, since=2.0)), record(1, wait("ask", 0, 1, number=7)))
    assert reader.stuck(later) == {}, "another wait"
    assert reader.stuck(world(record(0))) == {} and reader.stuck(later) == {}
    reader.forget()
    assert reader.stuck(later) == {}, "who was late himself begins anew"


def test_mail_in_the_place_of_a_record_changes_nothing(host: Host) -> None:
    reader = Reader(host)  # type: ignore[arg-type]
    assert reader.read({1: '{"mail":[]}', 2: ""}, 0.0) == {}
    assert reader.read({1: text(record(1))}, 1.0)[1].said["n"] == 1
    found = reader.read({1: '{"mail":["{}"]}'}, 2.0)[1]
    assert found.said["n"] == 1
    assert reader.lost(found, 3.0, 3.5) == "" and "for 3 s" in reader.lost(found, 3.0, 4.5)


@pytest.mark.parametrize(
    ("is_", "says"),
    [("stopped", "it is stopped"), ("exists", "it exists and does nothing"), ("unknown", "killed, stopped or hanging")],
)
def test_silence(host: Host, is_: str, says: str) -> None:
    host.is_ = is_
    reader = Reader(host)  # type: ignore[arg-type]
    found = reader.read({1: text(record(1))}, 0.0)[1]
    assert reader.lost(found, 10.0, 9.0) == ""
    assert reader.lost(found, 0.0, 1000.0) == "", "never"
    said = reader.lost(found, 10.0, 11.0)
    assert said == f"gave no sign of life for 10 s: {says} (train.py:1 in step)"
    found = reader.read({1: json.dumps(found.said | {"n": 2})}, 11.0)[1]
    assert reader.lost(found, 10.0, 20.9) == "" and reader.lost(found, 10.0, 21.1)
    reader.forget()
    found = reader.read({1: text(found)}, 100.0)[1]
    assert reader.lost(found, 10.0, 109.0) == "" and reader.lost(found, 10.0, 111.0), "who looks late begins anew"


def test_a_process_that_computes_holds_the_interpreter(host: Host) -> None:
    reader = Reader(host)  # type: ignore[arg-type]
    found = reader.read({1: text(record(1))}, 0.0)[1]
    host.used += 1
    assert reader.lost(found, 10.0, 11.0) == ""
    assert reader.lost(found, 10.0, 20.0) == ""
    assert "it exists and does nothing" in reader.lost(found, 10.0, 21.5)
    host.is_, host.used = "stopped", 200
    assert "it is stopped" in reader.lost(found, 10.0, 21.5)


def test_a_process_that_is_gone_is_lost_at_once_unless_it_said_why(host: Host) -> None:
    reader = Reader(host)  # type: ignore[arg-type]
    host.is_ = "gone"
    for said, expected in (({}, "gave no sign of life since its process has ended"), ({"ended": "it ended"}, "")):
        found = reader.read({1: text(record(1, **said))}, 0.0)[1]  # type: ignore[arg-type]
        assert reader.lost(found, 10.0, 0.1) == expected


# ---- what is told ----------------------------------------------------------------------------------------------------


def test_who_is_late_is_named_with_where_it_is() -> None:
    waits = wait("ask", 0, 1, 2, 3, number=7, what="the order of messages")
    here = world(record(0, waits), record(1, doing="the all-gather of layers.3"), record(2, wait("torch", 2, 3)))
    fault = late(waits, here, 0, 30.2)
    assert (fault.rank, fault.kind, fault.scope, fault.epoch) == (1, "late", SCOPE, 2) and fault.is_found
    assert fault.message == (
        "rank 1 did not come to the order of messages for 30 s, the time limit of the process group: it is rank 1 in "
        "the all-gather of layers.3 (train.py:1 in step); nor did rank 2 in the torch (train.py:2 in step), rank 3, "
        "which has not begun to train"
    )
    assert "it is rank 1 in no call of fullshard's" in late(waits, world(record(0, waits), record(1)), 0, 30.2).text
    come = world(record(0, waits), *(record(rank, far={SCOPE: far(asked=8)}) for rank in (1, 2, 3)))
    assert late(waits, come, 0, 30.0).rank == 1, "all have come"


def test_what_ranks_say_of_themselves() -> None:
    failed = {"rank": 1, "kind": "raised", "text": "ValueError: a bad token", "scope": SCOPE, "epoch": 2}
    ended = record(2, ended="its process ended", step=7, doing="the all-gather of layers.3")
    old = failed | {"epoch": 1}
    found = published([record(0), record(1, failed={SCOPE: failed}), record(3, failed={SCOPE: old}), ended], SCOPE, 2)
    assert [(one.rank, one.kind, one.step) for one in found] == [(1, "raised", -1), (2, "ended", 7)]
    assert found[1].withholds("data 0.1", 5) and not found[1].withholds("data 0.1", 4)
    (never_there,) = published([ended], OTHER, 0)
    assert (never_there.rank, never_there.kind, never_there.asked) == (2, "ended", 0), "it will not come either"


def test_the_words_of_a_question_are_taken_where_it_has_some() -> None:
    found = world(record(0, wait("message", 0, 1)), record(1, wait("ask", 0, 1, number=7)))
    assert disagreement(found, lambda given: f"{len(given)} ranks at other places") == "2 ranks at other places"
    assert diagnosis.disagreement(found, lambda given: None).startswith("expected all ranks to do the same")


def test_a_proof_ends_the_meetings_that_are_in_it_and_no_later_ones() -> None:
    found = world(record(0, wait("meet", 0, 1, since=7.25)), record(1, wait("torch", 0, 1)), record(2, wait("ask", 0)))
    assert diagnosis.meetings(found, SCOPE) == {"0": 7.25} and diagnosis.meetings(found, OTHER) == {}
