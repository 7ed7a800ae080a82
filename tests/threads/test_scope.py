"""What ranks tell each other besides tensors: agreement, failures, meetings (comm/control.py)."""

from __future__ import annotations

import json
import math
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import fully_shard, guard
from fullshard.comm import Domain, PeerFailed, domain_of, shown_ranks
from tests.harness.fake import fake_world
from tests.harness.models import seeded
from tests.harness.threads import run_ranks, several


def _domain() -> Domain:
    domain = domain_of(range(dist.get_world_size()))
    assert domain is not None
    return domain


def test_equal_answers() -> None:
    def ranks(rank: int) -> list[object]:
        domain = _domain()
        return [domain.agree("order", f"unit {i}") for i in range(20)]

    assert run_ranks(several(), ranks) == [[None] * 20] * several()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_each_rank_has(world: int) -> None:
    def ranks(rank: int) -> object:
        domain = _domain()
        assert domain.agree("before", "same") is None
        found = domain.agree("shapes", f"({rank // 2}, 4)")
        assert domain.agree("behind", "same") is None
        return found

    expected = {rank: f"({rank // 2}, 4)" for rank in range(world)}
    assert run_ranks(world, ranks) == [expected if world > 2 else None] * world


def test_different_questions() -> None:
    found = run_ranks(2, lambda rank: _domain().agree("shapes" if rank else "order", "equal"))
    assert found == [{0: "order: equal", 1: "shapes: equal"}] * 2


def test_nothing_is_left_in_the_store() -> None:
    def ranks(questions: int, rank: int) -> int:
        domain = _domain()
        for i in range(questions):
            domain.agree("order", f"unit {i}")
        dist.barrier()
        return int(domain.store.num_keys())

    few, many = (max(run_ranks(2, partial(ranks, questions))) for questions in (5, 50))
    assert few == many


def test_a_rank_that_failed_is_named_while_others_wait() -> None:
    def ranks(rank: int) -> tuple[str, float]:
        domain = _domain()
        if rank == 1:
            domain.doing, domain.step = "the gather of layers.3", lambda: 7
            domain.publish("raised", "ValueError: no such token")
            return "", 0.0
        begun = time.monotonic()
        with pytest.raises(PeerFailed) as caught:
            domain.agree("order", "gather layers.4")
        error = caught.value
        assert (error.rank, error.step, error.unit) == (1, 7, "the gather of layers.3")
        assert "no such token" in error.text
        return str(error), time.monotonic() - begun

    text, seconds = run_ranks(2, ranks)[0]
    assert text == (
        "expected every rank to take part in order, found that rank 1 raised at step 7 in the gather of layers.3: "
        "ValueError: no such token"
    )
    assert seconds < 2


def test_the_rank_that_failed_is_named_and_not_one_that_followed() -> None:
    """One that had to follow on another mesh may be the first to say so here."""

    def ranks(rank: int) -> str:
        domain = _domain()
        if rank:
            while len(domain.faults()) < rank - 1:
                time.sleep(0.001)
            domain.publish(
                *(("followed", "PeerFailed: of another mesh"), ("raised", "ValueError: a bad token"))[rank - 1]
            )
            return ""
        while len(domain.faults()) < 2:
            time.sleep(0.001)
        with pytest.raises(PeerFailed) as caught:
            domain.agree("order", "gather layers.4")
        assert caught.value.rank == 2
        return str(caught.value)

    assert run_ranks(3, ranks)[0].endswith("found that rank 2 raised: ValueError: a bad token")


class _Line:
    """A line that was to carry one message and carries none."""

    name, issued, ranks, is_cut, under_way = "gather 0.1", 0, (0, 1), False, ()

    def cut(self) -> None:
        self.is_cut = True


def _with_line(domain: Domain) -> Any:
    domain.lines[_Line.name] = line = _Line()  # type: ignore[assignment]
    return line


def test_a_closed_connection_is_explained_by_the_one_who_closed_it() -> None:
    """It says so a moment later: what the backend says is no name."""

    def ranks(rank: int) -> str:
        domain = _domain()
        line = _with_line(domain)
        if rank:
            time.sleep(0.4)
            domain.publish("raised", "ValueError: a bad token")
            return ""
        error = domain.explain(line, 1, RuntimeError("Connection closed by peer"))
        assert isinstance(error, PeerFailed) and error.rank == 1 and line.is_cut
        return error.text

    assert run_ranks(2, ranks)[0] == "ValueError: a bad token"


class _Sent:
    """The first message of a line, waited for since long ago."""

    number, since = 1, -math.inf

    def __init__(self, line: Any) -> None:
        self.line = line


@pytest.mark.parametrize("comes", [False, True])
@pytest.mark.parametrize("what", ["question", "crossing", "silence"])
def test_who_comes_while_another_one_looks_is_not_accused(
    what: str, comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The monitor reads, one after the other, what a peer asks and how far it is. Where the message arrived meanwhile
    that does not hold together: neither this rank nor, worse, all of them are to hear of it."""

    def ranks(rank: int) -> tuple[str, str]:
        domain = _domain()
        line = _with_line(domain)
        if rank:
            if what == "question":
                asking = {"asked": 0, "what": "batches", "value": "7", "issued": {line.name: 0}}
                domain.store.set(f"{domain.prefix}/0/asking/1", json.dumps(asking))
            elif what == "crossing":
                waits = {"line": line.name, "number": 1, "issued": {line.name: 0}, "doing": "clip"}
                domain.store.set(f"{domain.prefix}/0/waiting/1", json.dumps(waits))
            dist.barrier()
            dist.barrier()
            return "", ""
        dist.barrier()
        domain.waiting = _Sent(line)  # type: ignore[assignment]

        def silent_for(rank: int) -> float:
            # The last that is read, after everything else.
            return 100.0 if what == "silence" else 0.0

        def about_to(*_: object) -> str:
            return "other things"

        monkeypatch.setattr(domain.control, "silent_for", silent_for)
        monkeypatch.setitem(domain.explained_by, "batches", about_to)
        finds = {"question": domain._question, "crossing": domain._crossing, "silence": domain.control.silent}
        found: Any = finds[what]

        def then_comes(*given: Any) -> Any:
            fault = found(*given)
            assert fault is not None, "nothing was found to be accused of"
            if comes:
                domain.waiting = None
            return fault

        monkeypatch.setattr(found.__self__, found.__name__, then_comes)
        domain.look()
        dist.barrier()
        (told,) = domain.faults() or (None,)
        assert line.is_cut == (told is not None) == (domain.failure is not None)
        return ("", "") if told is None else (told.kind, told.message)

    kind, message = run_ranks(2, ranks)[0]
    assert kind == ("" if comes else "lost" if what == "silence" else "disagree"), message


def test_nobody_to_ask() -> None:
    assert domain_of([0, 1]) is None  # no process group
    with fake_world(8):
        assert domain_of(range(8)) is None
    assert run_ranks(1, lambda rank: domain_of([0])) == [None]


def test_a_second_process_group_begins_anew() -> None:
    def ranks(rank: int) -> None:
        store = _domain().store
        assert _domain().agree("order", "unit") is None
        assert _domain().prefix.endswith(".1")
        domain = Domain(_domain().control, tuple(range(dist.get_world_size())))
        assert domain.store is store and domain.prefix.endswith(".2")
        assert domain.agree("order", f"unit {rank}") == {r: f"unit {r}" for r in range(dist.get_world_size())}

    run_ranks(2, ranks)


def test_subsets_of_ranks_have_domains_of_their_own() -> None:
    def ranks(rank: int) -> object:
        domain = domain_of([0, 1] if rank < 2 else [2, 3])
        assert domain is not None
        return domain.agree("stage", str(rank // 2))

    assert run_ranks(4, ranks) == [None] * 4


def test_ranks_in_words() -> None:
    assert shown_ranks([2, 0, 1, 5, 6]) == "ranks 0 to 2 and 5 and 6"


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
    with pytest.raises(ValueError, match="expected a model that fully_shard was applied to, found a Linear"):
        with guard(nn.Linear(2, 2)):
            pass
