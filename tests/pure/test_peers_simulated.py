"""Many ranks in simulated time: what they ask the store for, questions, meetings, and who is lost.

The budgets are those of benchmarks/guard_scale.py, which counts more, and more ranks.
"""

from __future__ import annotations

import threading
from functools import partial

import pytest

from benchmarks.guard_scale import failure, question, steps, wait_for_one
from benchmarks.simulated_ranks import Simulation
from fullshard.peers import PeerFailed, RanksDisagree, Wait, ask, tell

WORLDS = (8, 64, 1000)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", WORLDS)
def test_requests(world: int) -> None:
    with Simulation(world) as simulation:
        simulation.run(5)
        if world < 1000:
            assert simulation.counted(10).total <= 2 * world
            assert steps(simulation) == 0
        for seconds in (2.0, 10.0) if world < 1000 else (10.0,):
            found = wait_for_one(simulation, seconds)
            assert found["requests"] <= (4.0 if world == 8 else 1.0)
            assert found["reader"] <= (9.0 if world == 8 else 4.0)
            assert found["most in a second"] <= (40 if world == 8 else world + 8)
            # A record is small, and one rank reads those of all.
            assert found["kB/s"] <= (4.0 if world == 8 else 1.5) * world


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", (8, 64))
def test_requests_of_a_question(world: int) -> None:
    with Simulation(world) as simulation:
        simulation.run(5)
        assert question(simulation, 0.0)["requests"] <= 7
        assert question(simulation, 9.0)["requests"] <= (80 if world == 8 else 20)
        assert question(simulation, 0.0, answers=2)["requests"] <= 16
        found = failure(simulation)
        assert found["known after"] <= 5
        assert found["met after"] <= 10
        assert found["requests"] <= (30 if world == 8 else 20)


# ---- questions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", (1, 2, 3, 8, 9, 64))
def test_questions(world: int) -> None:
    with Simulation(world) as simulation:
        scopes = simulation.scopes
        for value in (lambda rank: "x", lambda rank: str(rank % 3), lambda rank: str(rank)):
            simulation.returned.clear()
            for rank in range(world):
                simulation.start(rank, lambda rank=rank, value=value: scopes[rank].agree("what", value(rank)))  # type: ignore[misc]
            simulation.run(30)
            assert not simulation.raised
            answers = {rank: value(rank) for rank in range(world)}
            expected = answers if len(set(answers.values())) > 1 else None
            assert [simulation.returned[rank] for rank in range(world)] == [expected] * world


@pytest.mark.parametrize("world", (2, 9, 64, pytest.param(1000, marks=pytest.mark.slow)))
def test_that_all_differ_is_known_without_a_table(world: int) -> None:
    """A rank makes four requests more than where all answer alike, whatever the world, and no answer has its size."""
    with Simulation(world) as simulation:
        simulation.run(5)
        rest = simulation.counted(30).total / 30
        spent = []
        for answers in (1, world, world - 1):
            simulation.returned.clear()
            for rank in range(world):
                value = str(min(rank, answers - 1))
                simulation.start(rank, partial(ask, simulation.scopes[rank], "what", value, or_distinct=True))
            counted = simulation.counted(60, lambda: len(simulation.returned) == world)
            assert not simulation.raised
            spent.append((counted.total - rest * counted.seconds) / world)
            for answer in simulation.returned.values():
                assert answer == (None if answers == 1 else {}) or (answers != world and len(answer) == world)
        # Its text and a count, and their deletion; and what one rank does for all.
        assert spent[1] <= spent[0] + 4 + 10 / world


def test_that_all_differ_is_not_said_of_ranks_at_other_questions() -> None:
    with Simulation(3) as simulation:
        for rank in range(3):
            what = "first" if rank < 2 else "last"
            simulation.start(rank, partial(ask, simulation.scopes[rank], what, str(rank), or_distinct=what == "first"))
        simulation.run(30)
        assert all(isinstance(simulation.raised[rank], RanksDisagree) for rank in range(3))
        assert len({str(error) for error in simulation.raised.values()}) == 1


@pytest.mark.parametrize("world", (2, 9, 64))
def test_other_questions(world: int) -> None:
    with Simulation(world) as simulation:
        scopes = simulation.scopes

        def asks(rank: int) -> None:
            simulation.start(rank, lambda: ask(scopes[rank], "last" if rank == world - 1 else "first", "x"))

        for rank in range(world):
            asks(rank)
        simulation.run(30)
        assert sorted(simulation.raised) == list(range(world))
        texts = {str(error) for error in simulation.raised.values() if isinstance(error, RanksDisagree)}
        assert len(texts) == 1
        assert "at first" in next(iter(texts)) and f"rank {world - 1} at last" in next(iter(texts))


def test_texts() -> None:
    with Simulation(9) as simulation:
        scopes = simulation.scopes
        for rank in range(9):
            simulation.start(rank, lambda rank=rank: tell(scopes[rank], "names", f"rank {rank}"))  # type: ignore[misc]
        simulation.run(30)
        assert simulation.returned[4] == {rank: f"rank {rank}" for rank in range(9)}


@pytest.mark.parametrize("world", (2, 9, 64))
def test_a_question_that_somebody_does_not_come_to(world: int) -> None:
    """It waits for a message in its place."""
    with Simulation(world) as simulation:
        scopes = simulation.scopes
        for rank in range(world - 1):
            simulation.start(rank, lambda rank=rank: scopes[rank].agree("what", "x"))  # type: ignore[misc]
        simulation.wait_for_message([world - 1])
        simulation.run(15)
        assert sorted(simulation.raised) == list(range(world - 1))
        assert world - 1 in simulation.cut
        text = str(simulation.raised[0])
        assert (
            "none of them can continue" in text and "the all-gather of layers.3" in text and "waiting in what" in text
        )


@pytest.mark.parametrize("world", (2, 9, 64))
def test_a_question_that_somebody_leaves(world: int) -> None:
    with Simulation(world) as simulation:
        scopes = simulation.scopes
        for rank in range(world - 1):
            simulation.start(rank, lambda rank=rank: scopes[rank].agree("what", "x"))  # type: ignore[misc]
        simulation.run(3)
        simulation.start(world - 1, lambda: scopes[-1].publish("raised", "ValueError: no"))
        simulation.run(5)
        assert sorted(simulation.raised) == list(range(world - 1))
        for error in simulation.raised.values():
            assert isinstance(error, PeerFailed) and error.rank == world - 1 and "ValueError: no" in str(error)
        # All meet, and ask again.
        simulation.raised.clear()

        def meet_and_ask(rank: int) -> None:
            simulation.start(rank, lambda: (scopes[rank].meet(), scopes[rank].agree("what", "x")))

        for rank in range(world):
            meet_and_ask(rank)
        simulation.run(20)
        assert [simulation.returned[rank] for rank in range(world)] == [(True, None)] * world
        assert {scope.epoch for scope in scopes} == {1}


# ---- who is lost -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", (2, 16))
@pytest.mark.parametrize(
    ("state", "within", "words"), [("gone", 5.0, "process has ended"), ("stopped", 26.0, "stopped")]
)
def test_a_process_that_gives_no_sign_of_life(world: int, state: str, within: float, words: str) -> None:
    with Simulation(world, silence=20.0) as simulation:
        one = world - 1
        simulation.run(10)
        simulation.states[one] = state
        # The one that reads is of the same machine, and finds it at once; else it waits for the silence.
        simulation.wait_for_message(range(one))
        simulation.run(within if world == 2 else 28.0)
        assert sorted(simulation.cut) == list(range(one))
        faults = [scope.failures.cause for scope in simulation.scopes[:one]]
        assert {(found.rank, found.kind) for found in faults if found is not None} == {(one, "lost")}
        assert world > 2 or all(words in found.text for found in faults if found is not None)


def test_a_process_that_computes_on_another_machine_is_not_lost() -> None:
    """Rank 15 holds its interpreter lock; the ranks that wait for it are of the other machine, rank 14 is not."""
    with Simulation(16, silence=20.0) as simulation:
        simulation.run(10)
        simulation.held.add(15)
        simulation.wait_for_message(range(8))
        for _ in range(60):
            simulation.ticks[15] = simulation.ticks.get(15, 0) + 50
            simulation.run(1.0)
        assert not simulation.cut
        simulation.run(35.0)  # and now it does nothing
        assert sorted(simulation.cut) == list(range(8))
        faults = [scope.failures.cause for scope in simulation.scopes[:8]]
        assert all(found is not None and "exists and does nothing" in found.text for found in faults)


@pytest.mark.parametrize(("state", "within"), [("gone", 18.0), ("stopped", 28.0)])
def test_a_process_of_another_machine_is_looked_at_there(state: str, within: float) -> None:
    with Simulation(16, silence=20.0) as simulation:
        simulation.run(10)
        simulation.states[15] = state
        simulation.wait_for_message(range(8))
        simulation.run(within)
        assert sorted(simulation.cut) == list(range(8))
        faults = [scope.failures.cause for scope in simulation.scopes[:8]]
        words = "its process has ended" if state == "gone" else "it is stopped"
        assert all(found is not None and words in found.text for found in faults)


def test_somebody_takes_the_place_of_a_reader_that_is_gone() -> None:
    with Simulation(9, silence=8.0) as simulation:
        simulation.run(10)
        simulation.wait_for_message(range(1, 8))
        simulation.run(5)
        (leader,) = simulation.leaders
        simulation.states[leader] = "gone"
        simulation.run(40)
        left = [rank for rank in range(1, 8) if rank != leader]
        assert [rank for rank in left if rank in simulation.cut] == left
        assert {scope.failures.cause.rank for scope in simulation.scopes if scope.failures.cause is not None} == {
            leader
        }


def test_with_a_short_silence_ranks_that_wait_still_give_signs_of_life() -> None:
    with Simulation(64, silence=2.0) as simulation:
        simulation.run(10)
        simulation.wait_for_message(range(63))
        simulation.run(20)
        assert not simulation.cut


def test_a_wait_of_an_epoch_that_is_over_is_none() -> None:
    """An exception may come after a wait and before the watch hears of its end."""
    with Simulation(2) as simulation:
        scopes, watches = simulation.scopes, simulation.watches
        watches[1].waiting[threading.get_ident()] = Wait("ask", scopes[1], "what", name="what", number=2)
        for rank in range(2):
            simulation.start(rank, lambda rank=rank: scopes[rank].meet())  # type: ignore[misc]
        simulation.run(5)
        assert len(simulation.returned) == 2
        # Rank 1 computes for a while. Rank 0 waits for it, and nobody is stuck.
        simulation.wait_for_message([0])
        simulation.run(30)
        assert not simulation.cut and "wait" not in watches[1].own.contents(None)
        assert watches[1].waiting.model_thread and "beside" not in watches[1].own.contents(None)


def test_who_reads_mail_where_a_record_was_waits_for_the_record() -> None:
    """The rank that reads saw the record of rank 1 never before, and another one left mail there a moment ago."""
    with Simulation(3, limit=6.0) as simulation:
        simulation.run(4.5)
        simulation.wait_for_message([0])
        begun = simulation.now
        while not simulation.cut:
            if simulation.now < begun + 6.5:
                simulation.watches[2].records.tell([1], [])
            simulation.run(0.1)
        fault = simulation.scopes[0].failures.cause
        assert fault is not None and fault.kind == "late" and "has not begun" not in fault.text, fault
