"""The small parts of the guard: how often ranks ask, what ends a wait, records in the store, what users choose."""

from __future__ import annotations

import itertools
import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulated_ranks import Store
from fullshard.peers import Fault, PeerFailed, RanksDisagree, Settings, Wait
from fullshard.peers.store import Records, ranks_of, runs
from fullshard.peers.wait import (
    GRACE_SECONDS,
    SETTLING_SECONDS,
    STORE_WAIT_LOOKS,
    STORE_WAIT_POSTS,
    Failures,
    pace,
    pauses,
)

# ---- pace ------------------------------------------------------------------------------------------------------


@given(st.integers(2, 100_000))
def test_all_ranks_together_ask_no_more_than_the_store_answers(ranks: int) -> None:
    assert ranks / pace(ranks) <= 2000 + 1e-6
    if ranks >= 64:
        assert pace(ranks) >= 1.0
    # The record and the looks of one that waits for something in the store.
    assert 1 / (STORE_WAIT_POSTS * pace(ranks)) + 1 / (STORE_WAIT_LOOKS * pace(ranks)) <= 1 / pace(ranks) + 1e-9


@pytest.mark.parametrize("ranks", [1, 2, 8, 9, 64, 65, 1000, 10_000])
def test_pauses_grow(ranks: int) -> None:
    found = list(itertools.islice(pauses(ranks), 60))
    assert found == sorted(found)
    assert found[-1] == (pace(ranks) if ranks <= 8 else STORE_WAIT_LOOKS * pace(ranks))
    assert (found[0] == 0) == (ranks <= 64)
    # In a wait of ten seconds so many looks.
    looks = sum(1 for total in itertools.accumulate(found) if total <= 10)
    assert looks <= (90 if ranks <= 8 else 20 if ranks < 64 else 12)


# ---- what ends a wait ------------------------------------------------------------------------------------------


class Of:
    """As much of a scope as a wait looks at."""

    name, epoch, ranks, rank = "s", 0, (0, 1, 2), 0

    def __init__(self, attempts: int = 0) -> None:
        self.failures = Failures(attempts=attempts)

    class watch:  # noqa: N801
        class host:  # noqa: N801
            now = staticmethod(lambda: 0.0)
            event = staticmethod(lambda: None)


def wait(kind: str, number: int = 5, attempts: int = 0) -> Wait:
    scope: Any = Of(attempts)
    return Wait(kind, scope, "it", name="g", number=number, ranks=(0, 1) if kind == "message" else ())


def fault(kind: str = "raised", rank: int = 1, **more: Any) -> Fault:
    return Fault(rank, kind, "why", "s", 0, **more)


@pytest.mark.parametrize("kind", ["message", "ask", "meet", "connect"])
def test_what_ends_every_wait(kind: str) -> None:
    since = {"0": wait(kind).since}
    for found in ("lost", "late", "disagree"):
        assert wait(kind).is_ended_by(fault(found, meets=since), 0)
        # Of a meeting that one which was waited for then: who was lost may come back.
        assert wait(kind).is_ended_by(fault(found, meets={"0": -1.0, "1": since["0"]}), 0) == (kind != "meet")
    assert wait(kind).is_ended_by(fault("lost", gone=True), 0)
    assert wait(kind).is_ended_by(fault("ended"), 0) or kind == "message"


@pytest.mark.parametrize(
    ("kind", "found", "since", "ends"),
    [
        ("message", fault(issued={"g": 4}), SETTLING_SECONDS, True),
        ("message", fault(issued={"g": 4}), SETTLING_SECONDS - 0.01, False),  # where all raised, it may continue
        ("message", fault(issued={"g": 4}, attempts=1), 0, True),  # of a guarded block: nobody continues
        ("message", fault(issued={"g": 5}), SETTLING_SECONDS, False),
        ("message", fault(issued={"g": 5}), GRACE_SECONDS + 0.1, True),
        ("message", fault(issued={}), SETTLING_SECONDS, False),  # it never had that group: it will make it
        ("message", fault(rank=2, issued={"g": 4}), 0, False),  # none of its ranks
        ("message", fault("disagree"), 0, True),
        ("ask", fault("late", asked=6), 0, True),  # it asked this, and is lost all the same
        ("message", fault("ended", issued={"g": 5}), 0, False),  # it sent before it ended
        ("ask", fault(asked=5), SETTLING_SECONDS, True),
        ("ask", fault(asked=5), 0, False),
        ("ask", fault(asked=6), SETTLING_SECONDS, False),
        ("ask", fault(asked=6), GRACE_SECONDS + 0.1, True),
        ("meet", fault(), 0, False),
        ("meet", fault(), 1e9, False),  # it comes, too
        ("meet", fault("disagree"), 1e9, False),
        ("meet", fault(attempts=1), 0, True),
        ("connect", fault(), SETTLING_SECONDS, True),
    ],
)
def test_what_ends_a_wait(kind: str, found: Fault, since: float, ends: bool) -> None:
    assert wait(kind).is_ended_by(found, since) is ends


def test_the_end_of_its_epoch_is_the_end_of_a_wait() -> None:
    """An exception may come before the watch is told that a wait ended; it looks after none of an epoch before."""
    left = wait("ask")
    assert not left.is_over
    scope: Any = left.scope
    scope.epoch = 1
    assert left.is_over


def test_a_failure_of_the_attempt_before_ends_no_meeting() -> None:
    assert not wait("meet", attempts=1).is_ended_by(fault(attempts=1), 0)
    assert wait("meet", attempts=1).is_ended_by(fault(attempts=2), 0)


def test_faults_travel_as_text() -> None:
    one = fault(issued={"g": 3}, asked=2, step=7, doing="the gather", attempts=1, meets={"3": 1.25})
    assert Fault.loads(one.dumps(3)) == one
    assert Fault.loads(one.dumps()) == Fault.loads(one.dumps(4)) == replace(one, meets={})
    error = one.error("the all-gather of layers.1")
    assert isinstance(error, PeerFailed) and (error.rank, error.step, error.unit) == (1, 7, "the gather")
    assert "rank 1 raised at step 7 in the gather: why" in str(error)
    assert isinstance(fault("disagree").error(), RanksDisagree)


def test_errors_go_from_process_to_process() -> None:
    """As a launcher's queue sends them, with all that they say."""
    failed = pickle.loads(pickle.dumps(PeerFailed("it failed", rank=3, step=7, unit="the gather", text="why")))
    assert (str(failed), failed.rank, failed.step, failed.unit, failed.text) == ("it failed", 3, 7, "the gather", "why")
    other = pickle.loads(pickle.dumps(RanksDisagree("they differ", what="order", by_rank={0: "a", 1: "b"})))
    assert (str(other), other.what, other.by_rank) == ("they differ", "order", {0: "a", 1: "b"})


# ---- records -----------------------------------------------------------------------------------------------------


class Without(Store):
    """As a FileStore."""

    def has_extended_api(self) -> bool:
        return False

    def append(self, key: str, value: str) -> None:
        raise RuntimeError

    multi_get = multi_set = append  # type: ignore[assignment]


@pytest.fixture(params=[Store, Without])
def store(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_mail_is_found_by_the_next_record(store: Any) -> None:
    a, b, c = (Records(store, store, rank) for rank in range(3))
    for one in (a, b, c):
        assert one.post('{"n": 1}') == []
        one.join("m")
    assert a.joined() == {0, 1, 2} and a.is_one_machine()
    a.tell([0, 1, 2], ["x", "y"])
    assert a.of([0, 1, 2])[1] == '{"mail":["x", "y"]}'
    assert a.of([0])[0] == '{"n": 1}'  # nobody tells himself
    assert b.post('{"n": 2}') == ["x", "y"]
    assert b.post('{"n": 3}') == []
    # Of two that tell one rank at the same time the second one is read.
    a.tell([1], ["first"])
    c.tell([1], ["second"])
    assert b.post('{"n": 4}') == ["second"]
    assert a.of([1])[1] == '{"n": 4}'


def test_ranks_of_several_machines_are_known(store: Any) -> None:
    a, b = Records(store, store, 0), Records(store, store, 1)
    a.join("m")
    assert a.is_one_machine()
    b.join("n")
    assert not a.is_one_machine() and not b.is_one_machine()


def test_each_rank_gets_what_is_meant_for_it(store: Any) -> None:
    a, b, c = (Records(store, store, rank) for rank in range(3))
    a.tell([1, 2], ["for all"], {2: ["for one"]})
    assert (b.post("{}"), c.post("{}")) == (["for all"], ["for one"])


def test_mail_that_comes_while_mail_is_read(store: Any) -> None:
    a = Records(store, store, 0)
    b = Records(store, store, 1)
    b.post('{"n": 1}')
    exchange = store.compare_set
    left = ["three", "two", "one"]

    def interrupted(key: str, expected: str, desired: str) -> Any:
        if left and key == b.key(1):
            a.tell([1], [left.pop()])
        return exchange(key, expected, desired)

    store.compare_set = interrupted
    assert b.post('{"n": 2}') == ["one", "two", "three"]
    assert a.of([1])[1] == '{"n": 2}'


def test_a_record_whose_answer_did_not_arrive(store: Any) -> None:
    b = Records(store, store, 1)
    b.post('{"n": 1}')
    exchange = store.compare_set

    def interrupted(key: str, expected: str, desired: str) -> Any:
        exchange(key, expected, desired)
        raise KeyboardInterrupt

    store.compare_set = interrupted
    with pytest.raises(KeyboardInterrupt):
        b.post('{"n": 2}')
    store.compare_set = exchange
    assert b.post('{"n": 3}') == []
    assert b.of([1])[1] == '{"n": 3}'


def test_one_holds_a_claim(store: Any) -> None:
    a, b = Records(store, store, 0), Records(store, store, 1)
    assert a.claim("k") == "0" and b.claim("k") == "0" and a.claim("k") == "0"
    assert b.claim("k", "0") == "1"  # of one that is gone
    b.release("k")
    assert a.claim("k") == "0"


def test_a_store_is_used_by_one_process_group_after_the_other(store: Any) -> None:
    first, second = Records(store, store, 0), Records(store, store, 0)
    assert first.prefix != second.prefix
    assert Records(store, store, 1).prefix == first.prefix


@given(st.lists(st.integers(0, 300), unique=True).map(sorted))
def test_runs_of_ranks(ranks: list[int]) -> None:
    found = runs(ranks)
    assert ranks_of(found) == ranks
    assert ranks_of(json.loads(json.dumps(found))) == ranks


@pytest.mark.parametrize("ranks", [range(10_000), range(3, 10_000, 8), [*range(8), *range(64, 72)]])
def test_runs_of_meshes_are_short(ranks: Any) -> None:
    assert len(runs(list(ranks))) <= 2


# ---- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "environ", "expected"),
    [
        (1800.0, {}, ("full", 60.0)),
        (60.0, {}, ("full", 20.0)),
        (60.0, {"FULLSHARD_GUARD": "structure"}, ("structure", 20.0)),
        (60.0, {"FULLSHARD_GUARD": "off", "FULLSHARD_SILENCE": "7.5"}, ("off", 7.5)),
        (60.0, {"FULLSHARD_GUARD": "", "FULLSHARD_SILENCE": " "}, ("full", 20.0)),
        (60.0, {"FULLSHARD_SILENCE": "300"}, ("full", 300.0)),
        (60.0, {"FULLSHARD_SILENCE": "0"}, ("full", 0.0)),
    ],
)
def test_settings(limit: float, environ: dict[str, str], expected: tuple[str, float]) -> None:
    found = Settings.read(limit, environ)
    assert (found.mode, found.silence_seconds, found.limit_seconds) == (*expected, limit)
    assert 0 < found.beat_seconds <= 5
    assert not found.silence_seconds or found.beat_seconds <= found.silence_seconds / 4


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"FULLSHARD_GUARD": "all"}, ["FULLSHARD_GUARD", "full, structure, off", "'all'"]),
        ({"FULLSHARD_SILENCE": "-1"}, ["FULLSHARD_SILENCE", "'-1'"]),
        ({"FULLSHARD_SILENCE": "inf"}, ["FULLSHARD_SILENCE", "'inf'"]),
        ({"FULLSHARD_SILENCE": "nan"}, ["FULLSHARD_SILENCE", "'nan'"]),
        ({"FULLSHARD_SILENCE": "a minute"}, ["FULLSHARD_SILENCE", "'a minute'"]),
    ],
)
def test_settings_that_are_none(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        Settings.read(60.0, environ)
    assert all(word in str(error.value) for word in words)
