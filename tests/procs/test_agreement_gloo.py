"""Ranks that disagree at the beginning, on gloo: what hung or ended in C++ is an error on all ranks, in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import sync_module_states
from tests.harness.behaviours import behaviour
from tests.harness.forked import run_forks
from tests.harness.implementations import Implementation
from tests.harness.models import seeded
from tests.harness.pool import pool
from tests.threads.programs import Model, batch, part, shard


def _train(model: Any, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(2):
        model(part(batch(dist.get_world_size(), index), rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _wrapped_differently(rank: int, fully_shard: Callable[..., Any]) -> None:
    model: Any = seeded(Model)
    for i, layer in enumerate(model.layers):
        if i != 1 or rank == 0:
            fully_shard(layer)
    _train(fully_shard(model), rank)


def _error_of(rank: int, name: str) -> str:
    import importlib

    fully_shard = importlib.import_module(name).fully_shard
    try:
        _wrapped_differently(rank, fully_shard)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@behaviour(
    "ranks that wrap other modules: an error that names the module, on all ranks",
    area="failures",
    torch="better",
    reason="gloo receives messages of sizes that it does not expect: an abort in C++, or a hang",
)
def test_modules_wrapped_on_some_ranks(impl: Implementation) -> None:
    found = pool(2).run(_error_of, impl.namespace.__name__, timeout=30)
    assert all("layers.1" in text and "rank" in text for text in found), found


def _synchronised(rank: int) -> tuple[bool, float]:
    """The values of rank 1, also of a model that is larger than the buffer; and three steps."""
    model: Any = seeded(Model, seed=rank)
    model.table = nn.Parameter(torch.full((5 << 20,), float(rank)))
    model.table.data[::7] += 0.5
    sync_module_states(model, from_rank=1)
    expected = torch.full((5 << 20,), 1.0)
    expected[::7] += 0.5
    whole = torch.equal(model.table, expected)
    del model.table
    _train(shard(model), rank)
    return whole, float(model.head.weight.detach().full_tensor().sum())


def test_one_rank_s_values_for_all() -> None:
    found = pool(3).run(_synchronised)
    assert all(whole for whole, _ in found) and len({total for _, total in found}) == 1


class _Fails(Model):
    """Raises once, behind the last message of its forward."""

    armed = False

    def out(self, x: Any) -> Any:
        result = super().out(x)
        if self.armed:
            self.armed = False
            raise ArithmeticError("injected")
        return result


def _after_a_failure(rank: int) -> list[str]:
    """Rank 0 fails in its first forward; the other one is through its own and begins the second, in which buffers are
    looked at, before it learns of that. From then on they have begun other numbers of forwards."""
    model: Any = seeded(_Fails)
    model.register_buffer("mean", torch.zeros(2))
    shard(model)
    model.armed = rank == 0
    raised = []
    for index in range(24):
        try:
            for _ in range(2):
                loss = model(part(batch(dist.get_world_size(), index), rank)).pow(2).mean()
            loss.backward()
        except (ArithmeticError, RuntimeError) as error:
            raised.append(type(error).__name__)
    return raised


@pytest.mark.slow
def test_looks_at_buffers_stay_together_after_a_failure() -> None:
    found = run_forks(2, _after_a_failure, (), timeout=50)
    assert found == [["ArithmeticError"], ["PeerFailed"]]
