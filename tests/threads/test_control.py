"""What ranks tell each other besides tensors: agreement, failures, meetings (comm/control.py)."""

from __future__ import annotations

import time
from functools import partial

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
            domain.doing, domain.step = "gather layers.3", lambda: 7
            domain.publish("raised", "ValueError: no such token")
            return "", 0.0
        begun = time.monotonic()
        with pytest.raises(PeerFailed) as caught:
            domain.agree("order", "gather layers.4")
        error = caught.value
        assert (error.rank, error.step, error.unit) == (1, 7, "gather layers.3") and "no such token" in error.text
        return str(error), time.monotonic() - begun

    text, seconds = run_ranks(2, ranks)[0]
    assert text == (
        "expected every rank to take part in order, found that rank 1 raised at step 7 in gather layers.3: "
        "ValueError: no such token"
    )
    assert seconds < 2


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
