"""One rank's side of the guard: what it raises and when, what a meeting gives up, what a device lost, what its record
says. Ranks are simulated (benchmarks/simulated_ranks.py)."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.simulated_ranks import SimulatedHost, Simulation, Store
from fullshard.peers import (
    Fault,
    PeerFailed,
    RanksDisagree,
    Scope,
    Settings,
    Wait,
    Watch,
    had_losses,
    loss_over,
    wait_until,
)
from fullshard.peers.diagnosis import Leader
from fullshard.peers.scope import Groups, _name
from fullshard.peers.wait import TEXT_CHARACTERS, Loss, Waits
from tests.harness.moments import SECONDS, meanwhile

GATHER = "the all-gather of layers.3"
# The package has a function of the module's name.
WATCH: Any = sys.modules["fullshard.peers.watch"]


@pytest.fixture
def two() -> Iterator[Simulation]:
    with Simulation(2, silence=20.0) as simulation:
        simulation.run(5)
        yield simulation
        for scope in simulation.scopes:
            had_losses.pop(id(scope), None)


def fault(scope: Scope, kind: str = "raised", rank: int = 1, **more: Any) -> Fault:
    return Fault(rank, kind, "why", scope.name, more.pop("epoch", scope.epoch), **more)


def meet(simulation: Simulation) -> list[Any]:
    """What a meeting returns on each rank."""
    for rank, scope in enumerate(simulation.scopes):
        simulation.start(rank, scope.meet)
    simulation.run(15)
    assert not simulation.raised, simulation.raised
    return [simulation.returned[rank] for rank in range(simulation.world)]


# ---- failures of a scope ---------------------------------------------------------------------------------------------


def test_a_failure_is_raised_once(two: Simulation) -> None:
    scope = two.scopes[0]
    scope.refuse_failure()
    scope.doing = GATHER
    scope.fail(fault(scope))
    with pytest.raises(PeerFailed, match=f"take part in {GATHER}, found that rank 1 raised"):
        scope.refuse_failure()
    scope.refuse_failure()
    assert two.groups[0].is_cut and scope.failures.must_meet


def test_a_disagreement_that_came_outside_of_a_wait_is_raised(two: Simulation) -> None:
    scope = two.scopes[0]
    scope.note_fault(fault(scope, "disagree"), two.now)
    assert scope.failures.must_meet, "before the next message"
    with pytest.raises(RanksDisagree):
        scope.refuse_failure()


def test_what_a_scope_has_heard(two: Simulation) -> None:
    scope = two.scopes[0]
    later, own, lost = fault(scope, epoch=1), fault(scope, rank=0), fault(scope, "lost", rank=0)
    for one in (later, own, lost):
        scope.note_fault(one, two.now)
    # One of the next epoch is kept for it; one's own failure ends no wait, and being taken for lost does.
    assert scope.causes() == [lost] and not scope.is_of_others(own)
    assert scope.telling(fault(scope)) == [own, lost, fault(scope)], "what this overwrites is sent again"


def test_a_long_error_is_cut_before_it_is_sent(two: Simulation) -> None:
    scope = two.scopes[0]
    scope.publish("raised", "x" * 10 * TEXT_CHARACTERS)
    assert scope.failures.own is not None and len(scope.failures.own.text) == TEXT_CHARACTERS
    assert scope.failures.must_meet, "who catches its error sends nothing before all have met"


def test_the_first_ranks_that_fail_tell_the_others_and_no_more_of_them() -> None:
    with Simulation(8) as simulation:
        simulation.run(5)
        simulation.counted(0.0)
        for rank, told in enumerate((1, 2, 3, 3, 3)):
            simulation.scopes[rank].publish("raised", "ValueError: no such token")
            assert simulation.count.by_call["multi_set"] == told
        assert b"no such token" in simulation.store.kept[simulation.watches[7].records.key(7)]


def test_a_message_outside_of_a_step_meets_as_a_forward_does(two: Simulation) -> None:
    for rank, scope in enumerate(two.scopes):
        assert not scope.resume()
        scope.fail(fault(scope, rank=1 - rank))
        with pytest.raises(PeerFailed):
            scope.resume()
        assert scope.epoch == 0
        two.start(rank, scope.resume)
    two.run(15)
    assert two.returned == {0: True, 1: True} and [scope.epoch for scope in two.scopes] == [1, 1]


def test_who_raises_in_what_all_do_together_ends_it_for_all(two: Simulation) -> None:
    def job(rank: int) -> Any:
        scope = two.scopes[rank]
        with scope.together("saving c"):
            assert scope.told == "saving c"
            if rank == 0 and not scope.epoch:
                raise OSError("no space left")
            return scope.epoch, scope.agree("what", "x")

    for turn in range(2):
        for rank, scope in enumerate(two.scopes):
            scope.doing = GATHER
            two.start(rank, lambda rank=rank: job(rank))  # type: ignore[misc]
        two.run(15)
        assert [scope.doing for scope in two.scopes] == [GATHER] * 2
        if turn == 0:
            assert isinstance(two.raised[0], OSError)
            assert isinstance(two.raised[1], PeerFailed) and "no space left" in two.raised[1].text
            assert "saving c" in str(two.raised[1])
    assert two.returned == {0: (1, None), 1: (1, None)}, "the next one meets first"


class Gone(Store):
    """Of a process that has ended."""

    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("Connection reset by peer")

    compare_set = append = check = set = get = add  # type: ignore[assignment]


def test_the_end_of_the_store_is_that_of_the_rank_that_served_it(two: Simulation) -> None:
    first, second = two.scopes
    second.note_fault(fault(second, "ended", rank=0), two.now)
    for scope, words in ((first, "since the store through which ranks meet is gone"), (second, "rank 0 ended: why")):
        scope.watch.records.store = Gone()
        for call in (lambda scope=scope: scope.agree("what", "x"), scope.meet):  # type: ignore[misc]
            with pytest.raises(PeerFailed, match=words):
                call()


def test_questions_that_all_answer_differently_leave_nothing_of_the_size_of_the_world() -> None:
    left = []
    for world in (3, 9):
        with Simulation(world) as simulation:
            for rank, scope in enumerate(simulation.scopes):
                simulation.start(rank, lambda scope=scope, rank=rank: scope.agree("w", str(rank), or_distinct=True))  # type: ignore[misc]
            simulation.run(15)
            assert list(simulation.returned.values()) == [{}] * world
            left.append(sum("/ask/" in key for key in simulation.store.kept))
    assert left[0] == left[1]


class Interrupted:
    """A connection on which one call raises, before or after it has arrived."""

    def __init__(self, store: Any, call: str, ends: str, arrives: bool) -> None:
        self._store, self._call, self._ends, self._arrives = store, call, ends, arrives

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def one(*args: Any) -> Any:
            if name != self._call or not str(args[0]).endswith(self._ends):
                return call(*args)
            self._call = ""
            if self._arrives:
                call(*args)
            raise KeyboardInterrupt

        return one


def test_who_is_interrupted_before_its_vote_did_not_vote(two: Simulation) -> None:
    scope = two.scopes[0]
    scope.watch.records.store = Interrupted(scope.watch.records.store, "add", "/all", arrives=False)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        scope.agree("what", "x")
    assert scope.failures.own is not None and scope.failures.own.asked == scope.asked == 0


# ---- meetings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "cut", "torn", "renews"),
    [
        ((3, 3), (), (), False),
        ((3, 2), (), (), True),
        ((3, 3), (1,), (), True),
        ((3, 3), (0, 1), (), True),
        ((3, 3), (), (1,), True),
    ],
    ids=["where all are", "other numbers of messages", "cut on one", "cut on both", "a wait that was left"],
)
def test_connections_are_given_up_where_ranks_may_be_at_other_messages(
    two: Simulation, sent: tuple[int, int], cut: tuple[int, ...], torn: tuple[int, ...], renews: bool
) -> None:
    for rank, (scope, group) in enumerate(zip(two.scopes, two.groups, strict=True)):
        group.issued, group.is_cut = sent[rank], rank in cut
        scope.publish("raised", "ValueError: a bad token")
        scope.failures.is_torn = rank in torn
    two.run(5)
    assert meet(two) == [renews] * 2
    for scope, group in zip(two.scopes, two.groups, strict=True):
        assert (scope.epoch, scope.renewed, group.issued) == ((1, 1, 0) if renews else (1, 0, 3))
        assert not scope.faults and not scope.failures.must_meet and scope.failures.own is None


def test_who_comes_to_a_meeting_without_having_told_ends_the_waits_of_the_others(two: Simulation) -> None:
    first, second = two.scopes
    two.start(1, lambda: second.agree("what", "x"))
    two.run(3)
    two.start(0, first.meet)
    two.run(10)
    error = two.raised.pop(1)
    assert isinstance(error, PeerFailed) and error.text == "it left its step"
    two.start(1, second.meet)
    two.run(10)
    assert two.returned == {0: True, 1: True}


def test_the_first_rank_may_come_to_a_meeting_after_the_others_went_on(two: Simulation) -> None:
    """It was interrupted as it let them go, and counts one attempt more than they did then."""
    first, second = two.scopes
    for scope in two.scopes:
        scope.publish("raised", "ValueError: a bad token")
    store = first.watch.records.store
    first.watch.records.store = Interrupted(store, "set", "/done", arrives=True)  # type: ignore[assignment]
    two.start(0, first.meet)
    two.start(1, second.meet)
    two.run(10)
    assert isinstance(two.raised.pop(0), KeyboardInterrupt) and two.returned == {1: False}
    first.failures.attempts += 1
    two.start(0, first.meet)
    two.run(10)
    assert two.returned == {0: False, 1: False} and first.epoch == second.epoch == 1


def test_names_of_data_groups_are_unique() -> None:
    groups = Groups()
    assert [groups.new_name("data") for _ in range(3)] == ["data", "data #2", "data #3"]


def test_who_waits_for_connections_is_not_said_to_have_them(two: Simulation) -> None:
    two.groups[0].is_connected = False
    assert [scope.far["issued"] for scope in two.scopes] == [{}, {"small": 0}]


# ---- losses on a device ----------------------------------------------------------------------------------------------


def test_what_is_under_way_when_connections_are_cut_is_lost(two: Simulation) -> None:
    scope, group = two.scopes[0], two.groups[0]
    group.under_way = GATHER  # type: ignore[attr-defined]
    assert scope.losses.marked("3") == "3?"
    scope.fail(fault(scope))
    lost = Loss(0, (0,), f"{GATHER} was under way when rank 1 raised: why")
    assert scope.losses.current == lost and scope.losses.marked("3") == "3!0"
    # What else is heard of it is no other loss; and what was cut is under way no longer.
    scope.losses.note_under_way("the reduction of layers.0")
    assert scope.losses.current == lost and scope.groups.under_way == ""
    assert loss_over([0]) == loss_over([0, 1]) == lost and loss_over([0, 2]) is None
    # A load in this epoch holds until the meeting, whatever is under way.
    group.is_cut = False
    scope.losses.restore()
    scope.losses.note_under_way()
    assert scope.losses.current is None and scope.losses.marked("3") == "3" and loss_over([0]) is None


def test_a_message_that_failed_is_lost(two: Simulation) -> None:
    scope = two.scopes[0]
    scope.fail(fault(scope), spoiled="the reduction of layers.0")
    assert scope.losses.current is not None and scope.losses.current.text.startswith("the reduction of layers.0 was")
    scope.losses.restore()


@pytest.mark.parametrize("cut", [True, False])
def test_all_ranks_know_after_a_meeting_what_one_of_them_lost(two: Simulation, cut: bool) -> None:
    """Where connections stay, what is under way arrives."""
    for scope in two.scopes:
        scope.publish("raised", "ValueError: a bad token")
    two.groups[1].under_way = GATHER  # type: ignore[attr-defined]
    two.scopes[0].failures.is_torn = cut
    two.run(5)
    assert meet(two) == [cut] * 2
    for scope in two.scopes:
        assert scope.states == ({"": [0], "!0": [1]} if cut else {"": [0, 1]})
        assert (scope.losses.current is not None and scope.losses.current.ranks == (1,)) == cut
        # What was loaded is not lost again by a rank that still says so.
        scope.losses.restore()
        scope.losses.learn({"!0": [1], "": [0]})
        assert scope.losses.current is None


# ---- waits -----------------------------------------------------------------------------------------------------------


def test_a_failure_that_a_wait_raised_is_not_raised_by_the_next_call(two: Simulation) -> None:
    scope = two.scopes[0]
    wait = Wait("connect", scope, "the connections of data", name="data", ranks=scope.ranks)
    two.start(0, lambda: wait_until(lambda: False, wait))
    two.run(2)
    two.scopes[1].publish("raised", "ValueError: a bad token")
    two.run(5)
    assert isinstance(two.raised[0], PeerFailed) and scope.failures.has_raised


def test_a_wait_inside_of_another_one_leaves_it_there() -> None:
    waits = Waits()
    outer, inner = (Wait("torch", None, what) for what in ("outer", "inner"))
    with waits.within(outer):
        with waits.within(inner):
            assert list(waits.values()) == [inner]
        assert list(waits.values()) == [outer]
        assert not waits.are_several
        waits.send_beside(1)
        assert waits.are_several, "another thread may send what is waited for"
        waits.send_beside(-1)
    assert not waits and not waits.are_several


def test_a_fault_ends_the_waits_of_its_epoch_that_have_lasted(two: Simulation) -> None:
    """Where all raised at one place a rank may continue, and comes a moment later: a wait that began after that is
    known gives it that moment."""
    watch, scope = two.watches[0], two.scopes[0]
    scope.note_fault(fault(scope), two.now)
    scope.note_fault(fault(scope, epoch=1), two.now)
    two.run(5)
    young = Wait("ask", scope, "what", name="what", number=0)
    watch.waiting[threading.get_ident()] = young
    watch.end_waits(two.now)
    assert young.fault is None
    watch.end_waits(two.now + 1)
    assert young.fault == fault(scope)
    scope.faults = [(fault(scope, epoch=1), 0.0)]
    later = Wait("ask", scope, "what", name="what", number=0)
    watch.waiting[threading.get_ident()] = later
    watch.end_waits(two.now + 9)
    assert later.fault is None


def test_mail_ends_a_wait_at_once(two: Simulation) -> None:
    watch, scope = two.watches[0], two.scopes[0]
    watch.waiting[threading.get_ident()] = wait = Wait("ask", scope, "what", name="what", number=0)
    watch._receive(fault(scope, "lost"), two.now)
    assert wait.fault is not None
    watch.waiting.clear()


def test_without_the_store_waits_end(two: Simulation) -> None:
    watch, scope = two.watches[0], two.scopes[0]
    watch.waiting[threading.get_ident()] = wait = Wait("ask", scope, "what", name="what", number=0)
    watch.without_store()
    assert wait.fault is not None and "the store through which ranks meet is gone" in wait.fault.text
    watch.waiting.clear()


# ---- this rank's record ----------------------------------------------------------------------------------------------


def test_what_a_record_says(two: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, scope = two.watches[0], two.scopes[0]
    plain = watch.own.contents(None)
    assert not {"failed", "beside", "ended", "sees", "wait"} & plain.keys()
    scope.publish("raised", "ValueError: a bad token")
    watch.waiting.send_beside(1)
    watch.own.ended = "its process ended"
    watch.own.posted = two.now
    watch.own.look_at(1, "0 1 0", two.now)
    assert watch.own.posted == 0.0, "what is asked is answered at once"
    said = watch.own.contents(None)
    assert said["failed"][scope.name]["text"] == "ValueError: a bad token" and said["beside"] == 1
    assert said["ended"] == "its process ended" and said["sees"] == {1: ("exists", 0)}
    two.run(41)
    assert "sees" not in watch.own.contents(None), "nobody asks any more"
    # Collectives of the user's count as of the beginning of a wait: what comes later is another thread's.
    counts = iter(({"0": 1}, {"0": 2}, {"0": 3}))
    monkeypatch.setattr(WATCH, "issued_by_group", lambda: next(counts))
    wait = Wait("ask", scope, "what", name="what", number=0)
    assert watch.own.contents(wait)["torch"] == {"0": 1}
    watch.own.wait = wait
    assert watch.own.contents(wait)["torch"] == {"0": 1}
    assert watch.own.contents(Wait("ask", scope, "what"))["torch"] == {"0": 2}


def test_scopes_are_of_ranks_in_any_order_and_of_a_purpose(two: Simulation) -> None:
    watch, scope = two.watches[0], two.scopes[0]
    assert watch.scope([1, 0]) is watch.scope((0, 1)) is scope
    apart = watch.scope([0, 1], "checkpoint")
    assert apart is not scope and apart.name != scope.name


def test_the_last_words_of_a_rank_reach_all() -> None:
    with Simulation(3) as simulation:
        simulation.run(5)
        simulation.watches[2].end("its process ended with ValueError: a bad token")
        for watch in simulation.watches[:2]:
            watch.post()
        assert all(scope.causes()[0].kind == "ended" for scope in simulation.scopes[:2])
        # One that never trained has a record then.
        watch = Watch(simulation.store, simulation.store, 7, Settings(), SimulatedHost(simulation, 7))
        watch.end("its process ended")
        assert 7 in simulation.watches[0].records.joined()


def test_who_serves_the_store_waits_for_the_others_to_read_why_it_ends() -> None:
    with Simulation(3) as simulation:
        simulation.run(5)
        server = simulation.watches[0]
        server.end("its process ended")

        def waits() -> bool:
            simulation.returned.clear()
            simulation.start(0, lambda: server.wait_for_readers(4.0))
            simulation.run(1.0)
            return 0 not in simulation.returned

        simulation.held.update(range(3))
        assert waits(), "its words are unread"
        simulation.run(5)
        simulation.watches[1].end("its process ended, too")
        assert waits(), "one of them has read it, the other one not"
        simulation.run(5)
        simulation.watches[2].end("its process ended, too")
        server.records.tell([1, 2], [])
        assert not waits(), "all have ended, though mail replaced what they said"


class Call:
    """One of torch's collectives that a thread is in."""

    def __init__(self, ranks: int, needs_all: bool) -> None:
        self.thread, self.group, self.number, self.call = threading.get_ident(), "0", 4, "barrier"
        self.ranks, self.needs_all = ranks, needs_all


@pytest.mark.parametrize(("ranks", "needs_all", "known"), [(2, False, True), (3, False, False), (3, True, True)])
def test_a_collective_of_the_user_s_is_a_wait_when_it_is_known_for_whom(
    ranks: int, needs_all: bool, known: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a send or a receive in a group of many the other rank is not recorded."""
    one = Call(ranks, needs_all)

    class Host:
        is_within = staticmethod(lambda *_: True)
        called = staticmethod(lambda *_: "barrier")

    monkeypatch.setattr(WATCH, "active_collectives", lambda: [one])
    monkeypatch.setattr(WATCH, "known_groups", lambda: {"0": None})
    monkeypatch.setattr(WATCH.dist, "get_process_group_ranks", lambda _: list(range(ranks)))
    call = WATCH.OwnRecord(SimpleNamespace(host=Host(), waiting=Waits(), rank=0))
    assert call.torch_call(10.0) is None
    found = call.torch_call(12.0)
    assert (found is not None) is known
    if found is not None:
        assert (found.kind, found.name, found.number, found.doing) == ("torch", "0", 4, "barrier")
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                call.log(Fault(1, "disagree", "why"))
        assert len(caplog.records) == 1


# ---- the leader ------------------------------------------------------------------------------------------------------


def test_a_leader_that_reads_keeps_its_place() -> None:
    with Simulation(9, silence=8.0) as simulation:
        simulation.run(10)
        simulation.wait_for_message(range(1, 8))
        simulation.run(5)
        before = simulation.leaders
        assert len(before) == 1
        simulation.run(5)
        assert simulation.leaders == before
        # Nobody waits any more: the place is free for the next one.
        simulation.message_comes(range(1, 8))
        simulation.run(20)
        assert not simulation.leaders


def test_a_leader_that_was_suspended_with_its_machine_accuses_nobody() -> None:
    """It reads before the others have written."""
    with Simulation(3, silence=4.0) as simulation:
        simulation.run(10)
        simulation.wait_for_message([0, 1])
        simulation.run(5)
        assert simulation.leaders == [0]
        simulation.held.update(range(3))
        simulation.run(30)
        simulation.held.discard(0)
        simulation.run(1)
        simulation.held.clear()
        simulation.run(3)
        assert not simulation.cut


def test_the_limit_of_the_process_group_is_that_of_who_waits_longest() -> None:
    """The rank that reads got its message, and waits for the next one."""
    with Simulation(4, limit=12.0) as simulation:
        simulation.run(5)
        simulation.wait_for_message([0, 1])
        simulation.run(8)
        (leader,) = simulation.leaders
        simulation.message_comes([leader])
        simulation.wait_for_message([leader])
        assert not simulation.cut
        simulation.run(9)
        assert set(simulation.cut) == {0, 1}


def test_a_cause_that_is_known_later_is_told_too(two: Simulation) -> None:
    leader, scope = Leader(two.watches[0]), two.scopes[0]
    for one, causes in (
        (fault(scope, vague=True), 1),
        (fault(scope, vague=True), 1),
        (Fault(1, "raised", "ValueError: a bad token", scope.name), 1),
    ):
        leader._deliver(scope, one, two.now)
        assert len(scope.causes()) == causes
    assert scope.causes()[0].text == "ValueError: a bad token"


def test_mail_that_another_message_replaced_is_sent_again() -> None:
    with Simulation(3, silence=20.0) as simulation:
        simulation.run(5)
        simulation.held.add(2)  # its watch does not come to read its mail
        simulation.wait_for_message(range(3))
        simulation.run(3)
        simulation.states[1] = "gone"
        simulation.run(3)
        assert 0 in simulation.cut and 2 not in simulation.cut
        # Somebody else's words are there now.
        simulation.watches[0].records.tell([2], [])
        simulation.watches[0]._lately = []
        simulation.held.discard(2)
        simulation.run(4)
        assert 2 in simulation.cut


def test_who_waits_for_the_reason_of_a_closed_connection_waits_for_a_moment(two: Simulation) -> None:
    """The silence is 20 seconds; who closed it is not seen to have ended."""
    two.states[1] = "stopped"
    wait = Wait("message", two.scopes[0], GATHER, name="small", number=1, ranks=(0, 1), also="closed")
    two.watches[0].waiting[threading.get_ident()] = wait
    two.run(9)
    assert 0 in two.cut


@pytest.mark.parametrize("own", [False, True])
def test_ranks_at_other_questions_are_named_by_all(own: bool) -> None:
    """In one place for all that compare; also by the words of a question that has its own."""
    asked = [("order", "unshard layers.4"), ("structure", "x"), ("order", "unshard layers.5")]
    with Simulation(3) as simulation:
        for rank, (what, value) in enumerate(asked):
            scope = simulation.scopes[rank]
            if own:
                scope.explained_by["order"] = lambda *said: str(said)
            simulation.start(rank, partial(scope.agree, what, value))
        simulation.run(30)
        texts = {str(error) for error in simulation.raised.values() if isinstance(error, RanksDisagree)}
        assert len(simulation.raised) == 3 and texts == {
            "('unshard layers.4', [0], 1, 'structure')"
            if own
            else "expected all ranks to come to the same places in the same order, found ranks 0 and 2 at order, "
            "rank 1 at structure; make the same calls with the same arguments and settings (FULLSHARD_GUARD) on all "
            "ranks"
        }
        assert all(scope.failures.must_meet for scope in simulation.scopes), "some sent what others did not"


def test_a_question_has_its_own_words_for_ranks_that_wait_elsewhere(two: Simulation) -> None:
    def explained(asked: str, asking: Sequence[int], here: int, where: str) -> str:
        return f"{asking} asked {asked}, rank {here} was in {where}"

    for scope in two.scopes:
        scope.explained_by["order"] = explained
    two.start(0, lambda: two.scopes[0].agree("order", "unshard layers.4"))
    two.wait_for_message([1])
    two.run(10)
    assert str(two.raised[0]) == f"[0] asked unshard layers.4, rank 1 was in {GATHER}"


def test_faults_of_epochs_that_are_over_are_not_told_again(two: Simulation) -> None:
    scope = two.scopes[0]
    watch = two.watches[0]
    watch.tell([1], [fault(scope)])
    watch.tell([1], [fault(scope, "lost")])
    watch.tell([1], [fault(scope, "lost")])

    def told() -> list[str]:
        kept = json.loads(two.store.kept[watch.records.key(1)])["mail"]
        return [Fault.loads(text).kind for text in kept]

    assert told() == ["raised", "lost"], "what may be unread is repeated, once"
    scope.epoch = 1
    watch.tell([1], [fault(scope, "late")])
    assert told() == ["late"]
    scope.epoch = 0


def test_a_mesh_that_is_made_later_hears_of_its_own_faults_alone(two: Simulation) -> None:
    watch = two.watches[0]
    name = _name((0, 1), "later")
    for scope_name, since in ((name, 3.0), ("another mesh", 4.0)):
        watch._receive(Fault(1, "raised", "why", scope_name), since)
    made = watch.scope([0, 1], "later")
    assert [(one.scope, since) for one, since in made.faults] == [(name, 3.0)]


# ---- threads of a rank -----------------------------------------------------------------------------------------------


def test_a_fault_that_comes_while_its_scope_is_made_is_known_there(two: Simulation) -> None:
    """Red before: the thread that read it found no such scope, and kept it where that one had looked already."""
    watch, reads, made = two.watches[0], threading.Event(), threading.Event()
    name = _name((0, 1), "the other mesh")

    class Read(Fault):
        def __getattribute__(self, attribute: str) -> Any:
            if attribute == "scope" and not reads.is_set():
                reads.set()
                made.wait(SECONDS)
            return super().__getattribute__(attribute)

    thread = threading.Thread(target=lambda: watch._receive(Read(1, "raised", "why", name), two.now))
    thread.start()
    assert reads.wait(10)
    scope = watch.scope((0, 1), "the other mesh")
    made.set()
    thread.join()
    assert [one.text for one, _ in scope.faults] == ["why"]


def test_a_fault_that_comes_while_a_vague_one_is_replaced_is_kept(two: Simulation) -> None:
    """Red before: the list from before it came replaced the list that had it."""
    scope, reads, noted = two.scopes[0], threading.Event(), threading.Event()

    class Vague(Fault):
        def __getattribute__(self, attribute: str) -> Any:
            if attribute == "vague" and not reads.is_set():
                reads.set()
                noted.wait(SECONDS)
            return super().__getattribute__(attribute)

    scope.faults = [(Vague(1, "raised", "it left its step", scope.name, scope.epoch, vague=True), 0.0)]
    thread = threading.Thread(target=lambda: scope.note_fault(fault(scope), two.now))
    thread.start()
    assert reads.wait(10)
    scope.note_fault(fault(scope, "lost", rank=0), two.now)
    noted.set()
    thread.join()
    assert {one.kind for one, _ in scope.faults} == {"raised", "lost"}


def test_a_record_is_made_while_another_thread_reads_mail(two: Simulation) -> None:
    """Red before: "dictionary changed size during iteration", in the call of the program that wrote the record."""
    own, asked, process = two.watches[0].own, iter(range(100, 9999)), two.watches[1].host.identity()
    with meanwhile(lambda: own.look_at(next(asked), process, two.now), "peers/watch.py"):
        own.look_at(1, process, two.now)
        assert own.contents(None)["sees"]
