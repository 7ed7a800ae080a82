"""Gradients that are absent on some ranks only: which ones, and whether messages mix.

Two equal units, on the same input, part of the second one used by one rank only: reductions of equal shape, issued when
gradients are ready, would be issued in another order there, and mix without a word.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import fully_shard
from fullshard.observe import record
from tests.harness import tolerance
from tests.harness.models import assert_same_training, collect, seeded
from tests.harness.threads import run_ranks


class Tower(nn.Module):
    """`used`: whether the second weight takes part in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor, used: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return x + self.second(x) if used else x


class Towers(nn.Module):
    """`shared`: the input of both needs a gradient, which is complete when both are over."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.below = nn.Linear(6, 6)
        self.left, self.right = Tower(), Tower()
        self.shared = shared

    def forward(self, x: Tensor, used: tuple[bool, bool]) -> Tensor:
        if self.shared:
            x = self.below(x)
        x = self.left(x, used[0]) + 2 * self.right(x, used[1])
        return x if self.shared else self.below(x)


def loss(model: Any, rank: int, step: int, absent: str) -> Tensor:
    """On rank 0 everything is used; on the others not: `absent` is "left", "right" or "both", every other step."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    used = [rank == 0 or step % 2 == 0 or absent not in (side, "both") for side in ("left", "right")]
    result: Tensor = model(x, tuple(used)).square().sum()
    return result


def plain(world: int, shared: bool, absent: str) -> Any:
    model = seeded(lambda: Towers(shared))
    optimizer = tolerance.watch(torch.optim.AdamW(model.parameters(), lr=0.05))
    for step in range(4):
        total: Tensor = sum(loss(model, rank, step, absent) for rank in range(world)) / world  # type: ignore[assignment]
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


@pytest.mark.sample(2)
@pytest.mark.parametrize("absent", ["left", "right", "both"])
@pytest.mark.parametrize("shared", [True, False])
def test_gradients_absent_on_some_ranks_do_not_mix_messages(shared: bool, absent: str) -> None:
    """The result is that of plain training on all data, and every rank issued the same messages in the same order."""

    def rank_main(rank: int) -> tuple[Any, list[tuple[str, str]]]:
        model: Any = seeded(lambda: Towers(shared))
        for tower in (model.left, model.right):
            fully_shard(tower)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        with record(model) as trace:
            for step in range(4):
                loss(model, rank, step, absent).backward()
                optimizer.step()
                optimizer.zero_grad()
        return collect(model, optimizer), [c for c in trace.commands if c[0] in ("unshard", "reduce")]

    for world in (2, 3):
        results = run_ranks(world, rank_main)
        expected = plain(world, shared, absent)
        for trained, messages in results:
            assert_same_training(trained, expected)
            assert messages == results[0][1]
