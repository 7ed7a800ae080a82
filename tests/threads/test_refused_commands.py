"""A peer failed while this rank computed, and any command of a step is the first one that is refused because of it: all
try again, and nothing is left of the attempt. On a device that is the usual case, because nobody waits on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard import PeerFailed, fully_shard
from fullshard.engine import unit_of
from fullshard.peers import Fault, scope_of
from fullshard.schedule import Command
from tests.harness.models import seeded
from tests.harness.threads import WORLD, run_ranks
from tests.harness.worlds import OTHER_WORLD


class Block(nn.Module):
    """Two groups of parameters: messages of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(5, 5), nn.Linear(5, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.wide(torch.tanh(self.narrow(x)).double()).float())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(5, 5), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Training:
    def __init__(self, rank: int) -> None:
        self.model: Any = seeded(Model)
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.rank = rank

    def step(self, number: int) -> None:
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * number + self.rank))
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()

    def state(self) -> list[Tensor]:
        found = [p.to_local().clone() for p in self.model.parameters()]
        return found + [self.optimizer.state[p]["exp_avg"].to_local().clone() for p in self.model.parameters()]


def refused_steps(rank: int, steps: int) -> tuple[list[Tensor], set[str]]:
    """In each step another command is refused, at its first attempt."""
    training = Training(rank)
    training.step(0)
    scope, refused = scope_of(range(dist.get_world_size())), set()
    root = unit_of(training.model).root  # type: ignore[union-attr]
    assert scope is not None and root is not None
    left = -1

    def refuse(command: Command) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            refused.add(command.kind)
            scope.publish("raised", "injected")
            scope.fail(Fault(rank, "raised", "injected"))

    root.executor.listeners.append(refuse)
    for number in range(1, steps):
        left = number
        try:
            training.step(number)
            assert left > 0  # it has no more commands than that
        except PeerFailed as error:
            assert "injected" in str(error)
            left = 0
            training.step(number)
    return training.state(), refused


def undisturbed_steps(rank: int, steps: int) -> list[Tensor]:
    training = Training(rank)
    for number in range(steps):
        training.step(number)
    return training.state()


@pytest.mark.slow
@pytest.mark.skipif(WORLD == 1, reason=f"{OTHER_WORLD} two ranks or more: nobody else can fail")
def test_any_command_may_be_the_first_that_is_refused() -> None:
    steps = 40
    expected = run_ranks(WORLD, undisturbed_steps, steps)
    for (found, refused), plain in zip(run_ranks(WORLD, refused_steps, steps), expected, strict=True):
        assert all(map(torch.equal, found, plain))
        assert refused >= {"unshard", "wait", "reshard", "reduce", "finish"}
