"""What ranks tell each other besides tensors (peers/scope.py), whose watch a process has, and what torch records."""

from __future__ import annotations

import re
import sys
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import fully_shard, guard
from fullshard._torch import Recorded, active_collectives, issued_by_group, known_groups
from fullshard.peers import (
    PeerFailed,
    RanksDisagree,
    Scope,
    Settings,
    Wait,
    Watch,
    is_current,
    scope_of,
    wait_until,
    watch,
)
from tests.harness.fake import fake_world
from tests.harness.hang import patience
from tests.harness.models import seeded
from tests.harness.threads import run_ranks, several


def _scope() -> Scope:
    scope = scope_of(range(dist.get_world_size()))
    assert scope is not None
    return scope


def test_equal_answers() -> None:
    def ranks(rank: int) -> list[object]:
        scope = _scope()
        return [scope.agree("order", f"unit {i}") for i in range(20)]

    assert run_ranks(several(), ranks) == [[None] * 20] * several()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_each_rank_has(world: int) -> None:
    def ranks(rank: int) -> object:
        scope = _scope()
        assert scope.agree("before", "same") is None
        found = scope.agree("shapes", f"({rank // 2}, 4)")
        assert scope.agree("after", "same") is None
        return found

    expected = {rank: f"({rank // 2}, 4)" for rank in range(world)}
    assert run_ranks(world, ranks) == [expected if world > 2 else None] * world


def test_different_questions() -> None:
    def raised(rank: int) -> tuple[str, dict[int, str]]:
        with pytest.raises(RanksDisagree, match="rank 0 at order, rank 1 at shapes; make the same calls") as found:
            _scope().agree("shapes" if rank else "order", "equal")
        return str(found.value), found.value.by_rank

    (text, by_rank), other = run_ranks(2, raised)
    assert other == (text, by_rank) and by_rank == {0: "order: equal", 1: "shapes: equal"}


def test_nothing_is_left_in_the_store() -> None:
    def ranks(questions: int, rank: int) -> int:
        scope = _scope()
        for i in range(questions):
            scope.agree("order", f"unit {i}")
        dist.barrier()
        return int(scope.watch.records.store.num_keys())  # type: ignore[attr-defined]

    few, many = (max(run_ranks(2, partial(ranks, questions))) for questions in (5, 50))
    assert few == many


def test_a_rank_that_failed_is_named_while_others_wait() -> None:
    def ranks(rank: int) -> tuple[str, float]:
        scope = _scope()
        if rank == 1:
            scope.doing, scope.step = "the all-gather of layers.3", lambda: 7
            scope.publish("raised", "ValueError: no such token")
            return "", 0.0
        begun = time.monotonic()
        with pytest.raises(PeerFailed) as caught:
            scope.agree("order", "unshard layers.4")
        error = caught.value
        assert (error.rank, error.step, error.unit) == (1, 7, "the all-gather of layers.3")
        assert "no such token" in error.text
        return str(error), time.monotonic() - begun

    text, seconds = run_ranks(2, ranks)[0]
    assert text == (
        "expected every rank to take part in order, found that rank 1 raised at step 7 in the all-gather of layers.3: "
        "ValueError: no such token"
    )
    assert seconds < patience(2)


def test_the_rank_that_failed_is_named_and_not_one_that_followed() -> None:
    """Who raises because another one failed says nothing: the next to come waits for the same."""

    def ranks(rank: int) -> str:
        scope = _scope()
        if rank == 2:
            scope.publish("raised", "ValueError: a bad token")
            return ""
        store = scope.watch.records.store
        if rank == 0:
            while not store.check(["followed"]):
                time.sleep(0.001)
        with pytest.raises(PeerFailed) as caught:
            scope.agree("order", "unshard layers.4")
        if rank == 1:
            store.set("followed", "")
            assert scope.failures.own is None
        assert caught.value.rank == 2
        return str(caught.value)

    found = run_ranks(3, ranks)
    assert all(text.endswith("found that rank 2 raised: ValueError: a bad token") for text in found[:2])


@pytest.mark.sample(1)
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_an_exception_in_a_question_is_told(at: int) -> None:
    """Of any kind, before or after this rank was counted: nobody waits for it, and all begin anew together."""

    def ranks(rank: int) -> list[object]:
        scope = _scope()
        assert scope.agree("before", "same") is None
        if rank == 1:
            store, calls = scope.watch.records.store, 0

            class Interrupted:
                def __getattr__(self, name: str) -> Any:
                    nonlocal calls
                    calls += 1
                    if calls == at:
                        raise KeyboardInterrupt
                    return getattr(store, name)

            scope.watch.records.store = Interrupted()  # type: ignore[assignment]
            with pytest.raises(KeyboardInterrupt):
                scope.agree("order", "unshard layers.4")
            scope.watch.records.store = store
        else:
            try:
                scope.agree("order", "unshard layers.4")
            except PeerFailed as error:
                assert error.rank == 1 and "KeyboardInterrupt" in error.text
        # Where the other one had its answer already it hears of the failure in its next wait.
        if not scope.failures.must_meet:
            with pytest.raises(PeerFailed, match="KeyboardInterrupt"):
                scope.agree("order", "unshard layers.5")
        scope.meet()
        return [scope.epoch, scope.asked, scope.agree("again", "same"), scope.agree("what", str(rank))]

    assert run_ranks(2, ranks) == [[1, 0, None, {0: "0", 1: "1"}]] * 2


@pytest.mark.slow
def test_nobody_finds_a_question_answered_that_another_rank_gave_up() -> None:
    """It would continue with nobody."""

    def ranks(rank: int) -> str:
        scope = _scope()
        store = scope.watch.records.store
        if rank == 0:
            begun = time.monotonic()

            def check(keys: list[str]) -> bool:
                if time.monotonic() - begun > 0.3:
                    raise PeerFailed("it was lost", rank=1)
                return bool(store.check(keys))

            scope.watch.records.store = _But(store, check=check)  # type: ignore[assignment]
            with pytest.raises(PeerFailed, match="it was lost"):
                scope.agree("order", "unshard layers.4")
            scope.watch.records.store = store
            store.set("gave up", "")
        else:
            while not store.check(["gave up"]):
                time.sleep(0.001)
            with pytest.raises(PeerFailed, match="it was lost"):
                scope.agree("order", "unshard layers.4")
        scope.meet()
        return str(scope.agree("order", "unshard layers.4"))

    assert run_ranks(2, ranks) == ["None"] * 2


class _But:
    """A store with some other methods."""

    def __init__(self, store: Any, **others: Any) -> None:
        self._store = store
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_meeting_begins_an_epoch() -> None:
    """Whoever failed or only follows; what was told before is over. Who was in a wait is not where the others are."""

    def ranks(rank: int) -> list[object]:
        scope = _scope()
        for epoch in range(3):
            if rank == epoch:
                scope.publish("raised", "ValueError: a bad token")
            else:
                with pytest.raises(PeerFailed, match="a bad token"):
                    scope.agree("order", "unshard layers.4")
            assert scope.failures.must_meet
            renews = scope.meet()
            assert renews and not scope.failures.must_meet and not scope.causes() and scope.failures.own is None
            assert scope.agree("order", "unshard layers.4") is None
        return [scope.epoch, scope.renewed]

    assert run_ranks(3, ranks) == [[3, 3]] * 3


@pytest.mark.sample(1)
@pytest.mark.parametrize("pause", [0.0, 2.0])
def test_a_rank_that_fails_once_more_ends_a_meeting(pause: float) -> None:
    """It counts its attempts: the others are not to begin one in which it takes no part, though it stands there."""

    def ranks(rank: int) -> str:
        scope = _scope()
        if rank == 1:
            for attempt in (1, 2):
                scope.failures.attempts = attempt
                scope.publish("raised", f"attempt {attempt}")
                time.sleep(pause)
            scope.meet()
            return ""
        scope.failures.attempts = 1
        scope.publish("raised", "attempt 1")
        with pytest.raises(PeerFailed) as caught:
            scope.meet()
        scope.failures.attempts = 2
        scope.meet()
        return str(caught.value)

    assert run_ranks(2, ranks)[0] == (
        "expected every rank to take part in the next step after a failure, found that rank 1 raised: attempt 2"
    )


def test_who_raised_where_all_raised_may_go_on() -> None:
    """In the same epoch: nobody is taken for one that does not come because it is a little later."""

    def ranks(rank: int) -> object:
        scope = _scope()
        scope.publish("raised", "ValueError: a bad token, on all ranks")
        dist.barrier()
        scope.watch.post()
        assert scope.causes()
        time.sleep(0.2 * rank)
        found = scope.agree("order", "unshard layers.4")
        return found, scope.failures.must_meet

    assert run_ranks(2, ranks) == [(None, True)] * 2


def test_of_several_things_that_a_rank_said_the_last_one_knows_most() -> None:
    """That a backward ended is known before why."""

    def ranks(rank: int) -> str:
        scope = _scope()
        if rank:
            scope.publish("raised", "its backward ended with an exception", vague=True)
            scope.publish("raised", "its backward ended with an exception", vague=True)
            dist.barrier()
            scope.publish("raised", "ValueError: a bad token")
            scope.publish("raised", "it follows")
            dist.barrier()
            return ""
        dist.barrier()
        scope.watch.post()
        dist.barrier()
        scope.watch.post()
        with pytest.raises(PeerFailed) as caught:
            scope.agree("order", "unshard layers.4")
        assert len(scope.causes()) == 1
        return caught.value.text

    assert run_ranks(2, ranks)[0] == "ValueError: a bad token"


def test_what_is_told_before_a_rank_is_there_is_heard_when_it_comes() -> None:
    def ranks(rank: int) -> str:
        if rank:
            scope = scope_of([0, 1])
            assert scope is not None
            scope.publish("raised", "ValueError: a bad token")
            scope.watch.records.store.set("told", "")
            dist.barrier()
            return ""
        here = watch()
        assert here is not None
        while not here.records.store.check(["told"]):
            time.sleep(0.001)
        here.post()
        with pytest.raises(PeerFailed) as caught:
            _scope().agree("order", "unshard layers.4")
        dist.barrier()
        return caught.value.text

    assert run_ranks(2, ranks)[0] == "ValueError: a bad token"


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [3, 5])
def test_a_ring_of_ranks_each_of_which_waits_for_the_next(world: int) -> None:
    """On meshes of two."""

    def ranks(rank: int) -> str:
        scope = scope_of(sorted((rank, (rank + 1) % world)))
        assert scope is not None
        with pytest.raises(RanksDisagree) as caught:
            scope.agree("order", "unshard layers.4")
        return str(caught.value)

    found = run_ranks(world, ranks)
    assert len(set(found)) == 1 and "none of them can continue" in found[0]


def test_ranks_that_wait_in_different_ways_are_told() -> None:
    """One in a question, one for connections: neither comes."""

    def ranks(rank: int) -> str:
        scope = _scope()
        with pytest.raises(RanksDisagree) as caught:
            if rank:
                wait = Wait("connect", scope, "the connections of data", name="data", ranks=scope.ranks)
                wait_until(lambda: False, wait)
            else:
                scope.agree("order", "unshard layers.4")
        return str(caught.value)

    found = run_ranks(2, ranks)
    assert found[0] == found[1]
    assert found[0] == (
        "expected all ranks to do the same, found rank 0 waiting in order and rank 1 waiting in the connections of "
        "data: none of them can continue; make all ranks take the same calls in the same order"
    )


def test_a_wait_ends_with_the_limit_of_the_process_group() -> None:
    """Where the other one is somewhere else and never comes: named, with where it is."""

    def ranks(rank: int) -> str:
        scope = _scope()
        scope.watch.settings = replace(scope.watch.settings, limit_seconds=1.5)
        if rank == 1:
            scope.doing = "the all-gather of layers.3"
            begun = time.monotonic()
            scope.watch.post()
            while time.monotonic() - begun < 4:
                scope.watch.look_unless_watched()
                time.sleep(0.02)
            return ""
        with pytest.raises(PeerFailed) as caught:
            scope.agree("order", "unshard layers.4")
        assert caught.value.rank == 1
        return str(caught.value)

    text = run_ranks(2, ranks)[0]
    assert re.search(
        r"found that rank 1 did not come to order for [2-4] s, the time limit of the process group: it is rank 1 in "
        r"the all-gather of layers.3 \(.*test_scope.py:\d+ in ranks\)",
        text,
    ), text


def test_nobody_to_ask() -> None:
    assert scope_of([0, 1]) is None  # no process group
    with fake_world(8):
        assert scope_of(range(8)) is None
    assert run_ranks(1, lambda rank: scope_of([0])) == [None]


def test_a_second_process_group_begins_anew() -> None:
    """Over the same store: what ranks said in the first one is none of its matters."""

    def ranks(rank: int) -> None:
        world = dist.get_world_size()
        first = _scope().watch
        assert _scope().agree("order", "unit") is None
        second = Watch(first.records.store, first.records.store, rank, Settings())
        assert [which.records.prefix for which in (first, second)] == ["fullshard/1", "fullshard/2"]
        scope = second.scope(range(world))
        assert scope.agree("order", f"unit {rank}") == {r: f"unit {r}" for r in range(world)}

    run_ranks(2, ranks)


def test_subsets_of_ranks_have_scopes_of_their_own() -> None:
    def ranks(rank: int) -> object:
        scope = scope_of([0, 1] if rank < 2 else [2, 3])
        assert scope is not None
        return scope.agree("stage", str(rank // 2))

    assert run_ranks(4, ranks) == [None] * 4


def test_a_guarded_block_in_threads() -> None:
    def ranks(rank: int) -> str:
        model = fully_shard(seeded(lambda: nn.Linear(4, 4)))
        with guard(model):
            model(torch.ones(2, 4)).sum().backward()
        try:
            with guard(model):
                if rank == 1:
                    raise OSError("no such sample")
        except OSError:
            return ""
        except PeerFailed as error:
            return str(error)
        raise AssertionError("nobody raised")

    assert run_ranks(2, ranks)[0].endswith(
        "found that rank 1 raised at step 0 in a guarded block: OSError: no such sample"
    )


def test_a_guard_is_of_sharded_models() -> None:
    with pytest.raises(ValueError, match="guarded: expected models with sharded modules, found a value of type Linear"):
        with guard(nn.Linear(2, 2)):
            pass


# ---- the watch of a process ----------------------------------------------------------------------------------

# The package has a function of the module's name.
WATCH: Any = sys.modules["fullshard.peers.watch"]


class Another:
    """A process group that was there before, at the same place in memory."""


@pytest.mark.threads_only(reason="what is put in its place is of this process")
def test_a_watch_is_of_one_process_group_and_waits_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WATCH, "timeout_of", lambda group: 77.0)

    def ranks(rank: int) -> None:
        here = watch()
        assert here is not None and watch() is here and is_current(here)
        assert here.settings.limit_seconds == 77.0 and here.settings.silence_seconds == 77.0 / 3
        key, another = id(dist.group.WORLD), Another()
        before = WATCH._watches[key]
        WATCH._watches[key] = (weakref.ref(another), here)
        assert not is_current(here) and watch() is not here
        WATCH._watches[key] = before
        assert is_current(here) and not is_current(WATCH.Watch(*[here.records.store] * 2, rank, here.settings))
        dist.barrier()
        if rank == 0:
            # A forked child is no rank, and says nothing in its parent's name.
            WATCH._forked()
            assert watch() is None and not WATCH._latest

    run_ranks(2, ranks)


# ---- what torch records of its own collectives ---------------------------------------------------------------


def test_what_torch_records(tmp_path: Any) -> None:
    """The numbers of collectives alone, in their order, by group; nothing of those that are over is active."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        (name,) = known_groups()
        before = issued_by_group()[name]
        dist.all_reduce(torch.ones(1))
        dist.barrier()
        dist.broadcast(torch.ones(1), 0)
        assert issued_by_group() == {name: before + 3}
        # The backend's own thread says so, a moment after the call has returned.
        end = time.monotonic() + 20
        while any(one.thread == threading.get_ident() for one in active_collectives()):
            assert time.monotonic() < end, active_collectives()
            time.sleep(0.01)
    finally:
        dist.destroy_process_group()


def test_what_needs_all_ranks() -> None:
    """A rank that receives from a root, or sends to one, may end before the others have come."""
    needs = {call for call in CALLS if Recorded("0", 1, call, 4).needs_all}
    assert needs == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}


CALLS = "all_reduce all_gather reduce_scatter all_to_all barrier broadcast scatter reduce gather send".split()


def test_a_group_that_does_not_count_proves_nothing(monkeypatch: Any) -> None:
    class Uncounted:
        def _get_backend(self, device: torch.device) -> Any:
            raise RuntimeError("no backend for the host")

    monkeypatch.setattr("fullshard._torch.groups.known_groups", lambda: {"0": Uncounted()})
    assert issued_by_group() == {}
