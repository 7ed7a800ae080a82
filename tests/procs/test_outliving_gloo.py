"""What outlives its model is of no rank's collector: full values of it are gathered alike whether a rank has collected.

A model is in reference cycles, so it goes when Python's cyclic collector runs. Here one rank has run it and the other
has not, both ways. All ranks do the same, so nothing may be refused and nobody may wait.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fullshard import fully_shard
from tests.harness.models import BY_NAME, adamw
from tests.harness.pool import pool

CASE = BY_NAME["uneven_mlp"]
Collect = Callable[[], None]


def _model() -> nn.Module:
    return CASE.shard(CASE.build(), fully_shard)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    CASE.loss(model, CASE.batch(0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _whole(values: Any) -> list[Tensor]:
    return [value.full_tensor() for value in values if isinstance(value, DTensor)]


def _state_dict(rank: int, collect: Collect) -> list[Tensor]:
    state = _model().state_dict()
    collect()
    return _whole(state.values())


def _parameter_list(rank: int, collect: Collect) -> list[Tensor]:
    """Of a model that was trained: its order of messages is known."""
    model = _model()
    _train(model, adamw(model.parameters()), rank)
    parameters = list(model.parameters())
    del model
    collect()
    return [p.detach().redistribute(placements=[Replicate()]).to_local() for p in parameters]  # type: ignore[attr-defined]


def _optimizer(rank: int, collect: Collect) -> list[Tensor]:
    model = _model()
    optimizer = adamw(model.parameters())
    _train(model, optimizer, rank)
    del model
    collect()
    return _whole([p for group in optimizer.param_groups for p in group["params"]])


def _state_dict_of_an_optimizer(rank: int, collect: Collect) -> list[Tensor]:
    model = _model()
    optimizer = adamw(model.parameters())
    _train(model, optimizer, rank)
    state = optimizer.state_dict()["state"]
    del model, optimizer
    collect()
    return _whole(value for values in state.values() for value in values.values())


def _beside_the_next_model(rank: int, collect: Collect) -> list[Tensor]:
    """The first model's values are looked at between steps of a second one, which started from them."""
    first = _model()
    _train(first, adamw(first.parameters()), rank)
    state = first.state_dict()
    del first
    second = _model()
    second.load_state_dict(state)
    optimizer = adamw(second.parameters())
    _train(second, optimizer, rank)
    collect()
    found = _whole(state.values())
    _train(second, optimizer, rank)
    return found + _whole(second.state_dict().values())


PROGRAMS = {
    "a state dict": _state_dict,
    "a list of parameters": _parameter_list,
    "an optimizer": _optimizer,
    "an optimizer's state dict": _state_dict_of_an_optimizer,
    "beside the next model": _beside_the_next_model,
}


def _outlives(rank: int, name: str, collecting: tuple[int, ...]) -> list[Tensor]:
    """`collecting`: the ranks that have collected by the time the values are gathered."""

    def collect() -> None:
        if rank in collecting:
            gc.collect()

    gc.collect()
    gc.disable()
    try:
        return PROGRAMS[name](rank, collect)
    finally:
        gc.enable()


@pytest.mark.sample(1)
@pytest.mark.parametrize("collecting", [(0,), (1,)], ids=["rank 0 collects", "rank 1 collects"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_outlives_its_model_is_gathered_whoever_has_collected(name: str, collecting: tuple[int, ...]) -> None:
    """No error and no hang; and what is found is what is found where all have collected."""
    expected = pool(2).run(_outlives, name, (0, 1), timeout=20)
    found = pool(2).run(_outlives, name, collecting, timeout=20)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours and all(map(torch.equal, ours, theirs))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_outlives_its_model_is_gathered_where_nobody_has_collected(name: str) -> None:
    expected = pool(2).run(_outlives, name, (0, 1), timeout=20)
    for ours, theirs in zip(pool(2).run(_outlives, name, (), timeout=20), expected, strict=True):
        assert ours and all(map(torch.equal, ours, theirs))
