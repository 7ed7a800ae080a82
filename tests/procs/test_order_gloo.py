"""A rank deviates while the others go on as ever: they wait for what will not come, and all are told within seconds.

Processes over gloo, because the others are *in* a message then. Afterwards all train on together, on connections made
anew.
"""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fullshard
from fullshard import RanksDisagree
from fullshard.peers import scope_of
from tests.harness.errors import RanksFailed
from tests.harness.forked import run_forks
from tests.harness.hang import patience
from tests.threads.test_order import DIVERGENCES, Training, more_evaluation, skipped_unit, step_on_one_rank

SECONDS = 5.0
# The quick ones run in each test run: another number of messages, other ones of equal size, and the same ones.
QUICK = (skipped_unit, more_evaluation, step_on_one_rank)

_WAITS = re.compile(r" \(as rank \d\)")


def _usual(training: Training, steps: int) -> None:
    """What the ranks are used to when they go apart."""
    for _ in range(steps):
        training.backward()
        training.step()
        training.evaluate(1)
    training.backward()
    training.update()


def _diverging(rank: int, names: tuple[str, ...]) -> list[tuple[str, float, list[Any]]]:
    """For each divergence the error on this rank, the seconds it took, and the parameters after training on."""
    found = []
    for diverge in DIVERGENCES:
        if diverge.__name__ not in names:
            continue
        training = Training(rank)
        _usual(training, 3)
        dist.barrier()
        begun, said = time.monotonic(), ""
        try:
            diverge(training, rank == 0)
        except RanksDisagree as error:
            said = str(error)
        seconds = time.monotonic() - begun
        training.optimizer.zero_grad()
        for layer in training.model.layers:
            layer.requires_grad_(True)
        if "dtype" in diverge.__name__:
            training.model.layers[1].to(torch.float32)
        # Some took a step more, without gradients: what they have is still equal.
        fullshard.mark_restored(training.model)
        _usual(training, 1)
        found.append((said, seconds, [p.full_tensor() for p in training.model.parameters()]))
    return found


def _compare(names: tuple[str, ...], world: int) -> None:
    by_rank = run_forks(world, _diverging, (names,), 120)
    for name, *found in zip(names, *by_rank, strict=True):
        for rank, (said, seconds, _) in enumerate(found):
            assert said, f"{name}: rank {rank} did not raise"
            assert seconds < patience(SECONDS), f"{name}: rank {rank} raised after {seconds:.1f} s"
            # Of several ranks that wait each says that it does.
            assert _WAITS.sub("", said) == _WAITS.sub("", found[0][0]), name
            assert "about to" in said and "rank 0" in said.replace("ranks 0", "rank 0") and "; " in said
        print(found[0][0])
        for _, _, parameters in found[1:]:
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[0][2], parameters, strict=True)), name


@pytest.mark.slow
def test_ranks_that_follow_are_told_and_go_on() -> None:
    _compare(tuple(diverge.__name__ for diverge in DIVERGENCES if diverge in QUICK), 2)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_every_divergence_is_told_to_ranks_that_follow(world: int) -> None:
    _compare(tuple(diverge.__name__ for diverge in DIVERGENCES), world)


def _equal_sizes_swapped(rank: int) -> tuple[str, float]:
    """Two units of one size in another order: no backend notices, and wrong values would be computed with."""
    training = Training(rank)
    for _ in range(3):
        training.step()
    begun = time.monotonic()
    with pytest.raises(RanksDisagree) as caught:
        training.step(*((1, 0, 2, 3) if rank == 1 else ()))
    scope = scope_of(range(2))
    assert scope is not None and scope.failures.must_meet
    return str(caught.value), time.monotonic() - begun


def test_equal_units_in_another_order_are_found() -> None:
    (text, seconds), (same, _) = run_forks(2, _equal_sizes_swapped, (), 60)
    assert text == same and seconds < patience(SECONDS)
    # In forward what is gathered ahead makes the messages the same ones, and right; in backward they are not.
    assert text.startswith(
        "layers.0: expected rank 1 to gather the parameters of layers.1 (float32*24), as in the steps before (as rank "
        "0), found rank 1 about to gather the parameters of layers.0 (float32*24); make all ranks run the same modules"
    )


def _of_unequal_sizes(rank: int) -> None:
    for _ in range(2):  # who receives less may complete the first one
        dist.all_reduce(torch.ones(60 if rank else 100))


@pytest.mark.slow
def test_gloo_ends_a_process_that_receives_more_than_it_expects() -> None:
    """Why ranks compare before they send (ADR 0009): no error leads to an exchange of what they did."""
    with pytest.raises(RanksFailed, match="SIGABRT"):
        run_forks(2, _of_unequal_sizes, (), 60)
