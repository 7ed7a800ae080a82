"""Ranks with another number of batches: as many turns on all, and results as if each rank had its own batches alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fullshard
from fullshard import PeerFailed, RanksDisagree, joined
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.models import assert_same_training, collect, seeded
from tests.harness.threads import run_ranks, several
from tests.threads.test_order import Stack, Training, ask_always


def batches(rank: int, count: int) -> list[Tensor]:
    return [torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * rank + i)) for i in range(count)]


def _loss(model: Any, x: Tensor) -> Tensor:
    result: Tensor = model(x).square().mean()
    return result


@pytest.mark.sample(3)
@pytest.mark.parametrize("counts", [(3, 1), (0, 2), (2, 2), (0, 0), (1, 0)])
def test_ranks_with_fewer_batches_take_part_in_the_evaluation_of_the_others(counts: tuple[int, ...]) -> None:
    def rank_main(rank: int) -> tuple[list[float], list[bool]]:
        model = Training(rank).model
        found, own = [], []
        for _ in range(2):
            with torch.no_grad():
                for turn in joined(model, batches(rank, counts[rank]), filler=torch.zeros(1, 6)):
                    loss = _loss(model, turn.batch)
                    own.append(turn.own)
                    if turn.own:
                        found.append(loss.item())
            assert not any(unit.full_nbytes_live for unit in fullshard.report(model).units)
        return found, own

    model = seeded(Stack)
    for rank, (found, own) in enumerate(run_ranks(2, rank_main)):
        with torch.no_grad():
            expected = [_loss(model, x).item() for x in batches(rank, counts[rank])]
        assert found == pytest.approx(expected * 2, rel=tolerance.figure())
        assert own == ([True] * counts[rank] + [False] * (max(counts) - counts[rank])) * 2


@behaviour(
    "`joined`: ranks with fewer batches take part in evaluation and training, and add nothing to the gradient",
    area="training",
    torch="none",
    reason="torch has `Join` for DDP alone",
)
def test_a_rank_without_a_batch_adds_nothing_to_the_gradient() -> None:
    """Compared with plain training on the mean over the ranks that have a batch: parameters and optimizer state."""
    world = several()
    counts = [3 - 2 * (rank % 2) for rank in range(world)]

    def rank_main(rank: int) -> Any:
        training = Training(rank)
        optimizer = torch.optim.AdamW(training.model.parameters(), lr=0.05)
        for batch, _, weight in joined(training.model, iter(batches(rank, counts[rank]))):
            (_loss(training.model, batch) * weight).backward()
            optimizer.step()
            optimizer.zero_grad()
        return collect(training.model, optimizer)

    model = seeded(Stack)
    optimizer = tolerance.watch(torch.optim.AdamW(model.parameters(), lr=0.05))
    for turn in range(3):
        with_batch = [rank for rank in range(world) if turn < counts[rank]]
        for rank in with_batch:
            (_loss(model, batches(rank, counts[rank])[turn]) / len(with_batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = collect(model, optimizer)
    for found in run_ranks(world, rank_main):
        assert_same_training(found, expected)


def test_without_a_batch_and_a_filler_all_ranks_say_so() -> None:
    def rank_main(rank: int) -> None:
        model = Training(rank).model
        with pytest.raises(ValueError, match="expected a batch or a filler on all 3 ranks, found 2 with"):
            for turn in joined(model, batches(rank, 2 if rank == 1 else 0)):
                raise AssertionError(turn)

    run_ranks(3, rank_main)


def test_a_loop_that_one_rank_leaves_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_always(monkeypatch)

    def rank_main(rank: int) -> str:
        training = Training(rank)
        with pytest.raises(RanksDisagree) as caught, torch.no_grad():
            for turn in joined(training.model, batches(rank, 3)):
                training.model(turn.batch)
                if rank == 1:
                    break
            training.forward()
        return str(caught.value)

    texts = run_ranks(2, rank_main)
    assert len(set(texts)) == 1 and "leave it on all ranks in the same turn" in texts[0]
    assert "count the batches that are left for root" in texts[0]


def test_an_exception_of_the_batches_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait in the order, where they are told."""
    ask_always(monkeypatch)

    def broken() -> Iterator[Tensor]:
        yield torch.zeros(1, 6)
        raise OSError("the disk is gone")

    def rank_main(rank: int) -> None:
        model = Training(rank).model
        source = broken() if rank == 0 else iter(batches(rank, 3))
        with pytest.raises(OSError if rank == 0 else PeerFailed, match="the disk is gone"), torch.no_grad():
            for turn in joined(model, source):
                model(turn.batch)

    run_ranks(2, rank_main)


def test_joined_wants_the_outermost_sharded_module() -> None:
    def rank_main(rank: int) -> None:
        training = Training(rank)
        with pytest.raises(ValueError, match="joined: expected a model that fully_shard was .* found a Linear"):
            next(joined(torch.nn.Linear(2, 2), [1]))
        training.forward()
        with pytest.raises(ValueError, match=r"expected the outermost sharded module, found layers\.1 below it"):
            next(joined(training.model.layers[1], [1]))
        turns = list(joined(training.model, [1, 2]))
        assert turns == [(1, True, 1.0), (2, True, 1.0)] and turns[0].weight == 1.0

    run_ranks(1, rank_main)
