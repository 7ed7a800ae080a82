"""`sleep` and `wake` over gloo, where replicas keep parts for each other: one fails while they bring them back, or is
gone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fullshard
from fullshard import PeerFailed
from fullshard.extras.sleep import _asleep
from tests.harness.forked import run_forks
from tests.harness.killed import DONE, run_killed
from tests.harness.models import assert_same_training, collect
from tests.threads.test_sleep import CASE, _hsdp, _step

pytestmark = pytest.mark.hang_after(120)


def _asleep_in_parts(replicas: int, shards: int) -> tuple[Any, Any, Any, Any]:
    model, optimizer, mean = _hsdp(replicas, shards)
    before = collect(model, optimizer)
    fullshard.sleep(model, optimizer, average=mean, drop="replicas")
    return model, optimizer, mean, before


def _broken_at(model: Any, number: int, broken: Callable[[], Any]) -> Callable[[], None]:
    """Bringing back the storage at `number` is `broken`, until the result is called."""
    memory: Any = list(_asleep[model]._memory.values())[number]
    memory.gather = broken
    return lambda: delattr(memory, "gather")


@pytest.mark.slow
def test_a_replica_that_fails_is_named_and_all_stay_asleep() -> None:
    """Rank 2 cannot bring its part, once. Rank 3 holds other parts, and learns of it too."""

    def rank_main(rank: int) -> list[str]:
        model, optimizer, _, before = _asleep_in_parts(2, 2)

        def broken() -> None:
            raise OSError("its page-locked memory is gone")

        repair = _broken_at(model, 2, broken) if rank == 2 else lambda: None
        said = []
        for use in (lambda: fullshard.wake(model), model.state_dict):
            try:
                use()
                said.append("")
            except (RuntimeError, OSError) as error:
                said.append(f"{type(error).__name__}: {error}")
        repair()
        fullshard.wake(model)
        assert_same_training(collect(model, optimizer), before, eps_multiple=0)
        _step(model, optimizer, rank, 1)
        return said

    for rank, (woken, used) in enumerate(run_forks(4, rank_main, (), 90.0)):
        assert "its page-locked memory is gone" in woken and "asleep" in used
        assert "rank 2" in woken and "PeerFailed" in woken if rank != 2 else "OSError" in woken, woken


def test_a_replica_that_dies_is_named_and_the_others_stay_asleep() -> None:
    """It ends while all sleep, and what it kept is lost with it."""

    def rank_main(rank: int) -> None:
        model, _, _, _ = _asleep_in_parts(3, 1)
        if rank == 1:
            os._exit(9)
        for _ in range(2):
            with pytest.raises(PeerFailed, match="rank 1"):
                fullshard.wake(model)
            with pytest.raises(RuntimeError, match="asleep"):
                CASE.loss(model, CASE.batch(1, rank))
            with pytest.raises(RuntimeError, match="asleep"):
                torch.no_grad()(model.state_dict)()

    one, dead, other = run_killed(3, rank_main, None)
    assert (one, other) == (DONE, DONE) and dead == 9
