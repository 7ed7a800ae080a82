"""Ranks that disagree at the beginning, on gloo: what hung or ended in C++ is an error on all ranks, in time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import fully_shard, sync_module_states
from fullshard.peers import RanksDisagree
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


def _of_other_shapes(rank: int) -> None:
    model: Any = seeded(Model)
    if rank:
        model.head = nn.Linear(6, 12)
    _train(shard(model), rank)


def _on_other_meshes(rank: int) -> None:
    """Both meshes exist on all ranks; the same ranks are on both."""
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    one = init_device_mesh("cpu", (4,))
    _train(shard(seeded(Model), mesh=one if rank == 1 else two), rank)


def _other_settings(rank: int) -> None:
    os.environ["FULLSHARD_COMMUNICATION"] = ("auto", "torch")[rank]
    try:
        _train(shard(seeded(Model)), rank)
    finally:
        del os.environ["FULLSHARD_COMMUNICATION"]


def _kept_in_other_parts(rank: int) -> None:
    model: Any = seeded(Model)
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=4 if rank == 1 else 2)
    _train(fully_shard(model), rank)


def _other_seeds(rank: int) -> None:
    _train(shard(seeded(Model, seed=min(rank, 1))), rank)


CASES: dict[str, tuple[Callable[[int], None], int, str]] = {
    "shapes": (
        _of_other_shapes,
        2,
        "head.weight: expected the same shape on every rank, found (11, 6) on rank 0 and (12",
    ),
    "meshes": (
        _on_other_meshes,
        4,
        "root: expected the same mesh on every rank, found cpu (2, 2) ('replicate', 'shard'",
    ),
    "settings": (
        _other_settings,
        2,
        "expected the same FULLSHARD_COMMUNICATION on every rank, found auto on rank 0 and",
    ),
    "parts": (_kept_in_other_parts, 4, "expected all ranks to come to the same places in the same order, found ranks"),
    "seeds": (_other_seeds, 3, "embedding.weight: expected the same values on every rank"),
}


def _raises(rank: int, name: str) -> tuple[str, float]:
    begun = time.monotonic()
    with pytest.raises(RanksDisagree) as caught:
        CASES[name][0](rank)
    return str(caught.value), time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_raise_in_time(name: str) -> None:
    found = pool(CASES[name][1]).run(_raises, name, timeout=40)
    assert len({text for text, _ in found}) == 1
    assert found[0][0].startswith(CASES[name][2]), found[0][0]
    # A bound that a process group's timeout would break, not a measurement.
    assert max(seconds for _, seconds in found) < 20


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


def _equal(rank: int) -> str:
    _train(shard(seeded(Model)), rank)
    return "trained"


@pytest.mark.slow
def test_equal_ranks_raise_nothing() -> None:
    for world in (1, 2, 4):
        assert set(pool(world).run(_equal)) == {"trained"}


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


def test_looks_at_buffers_stay_together_after_a_failure() -> None:
    found = run_forks(2, _after_a_failure, (), timeout=50)
    assert found == [["ArithmeticError"], ["PeerFailed"]]
