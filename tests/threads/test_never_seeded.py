"""Ranks that never seeded: on a mesh that only shards, their rows are one random model, and a warning says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fullshard
from fullshard.peers import RanksDisagree
from tests.harness.models import Trained, adamw, assert_same_training, collect, seeded
from tests.harness.threads import run_ranks

SAID = "expected the same initial values on every rank, found that each of"


def _make() -> nn.Module:
    # A layer without random values, a tied one, an odd number of rows.
    model = nn.Sequential(nn.Linear(4, 7), nn.LayerNorm(7), nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 3))
    model[3].weight = model[2].weight
    return model


def _shard(fn: Callable[..., Any], model: Any, **options: Any) -> Any:
    for module in (model[0], model[1], model):
        fn(module, **options)
    return model


def _step(model: Any, rank: int, index: int = 0, ranks: int = 1) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * index + rank))
    (model(x).square().mean() / ranks).backward()


def _trained(model: nn.Module, ranks: Sequence[int]) -> Trained:
    optimizer = adamw(model.parameters())
    for index in range(3):
        for rank in ranks:
            _step(model, rank, index, len(ranks))
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


# What is said is collected in this process, which forks cannot write to.
pytestmark = pytest.mark.threads_only(reason="a fork's warnings are not this process's")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Each warning, with its rank. Not `catch_warnings`: ranks are threads of a process with one list of filters."""
    found: list[tuple[int, str]] = []
    monkeypatch.setattr(
        "fullshard.agree.structure.warnings.warn", lambda text, **_: found.append((dist.get_rank(), text))
    )
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_they_train_the_model_that_torch_trains(world: int, said: list[tuple[int, str]]) -> None:
    """And say so once, on the first rank."""

    def job(rank: int) -> None:
        models = [_shard(fn, seeded(_make, seed=rank)) for fn in (torch_fully_shard, fullshard.fully_shard)]
        plain = seeded(_make)
        with torch.no_grad():  # the rows of all ranks, as torch cuts them
            for p, cut in zip(plain.parameters(), models[0].parameters(), strict=True):
                p.copy_(cut.full_tensor())
        expected = _trained(plain, range(world))
        for model in models:
            assert_same_training(_trained(model, [rank]), expected)
        with torch.no_grad():
            models[1](torch.ones(1, 4))

    run_ranks(world, job)
    ((rank, text),) = said
    assert rank == 0 and SAID in text and f"{world} ranks drew its own" in text and "torch.manual_seed" in text


def _two_alike(rank: int) -> Any:
    return _shard(fullshard.fully_shard, seeded(_make, seed=min(rank, 1)))


def _replicas(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("replicate", "shard"))
    return _shard(fullshard.fully_shard, seeded(_make, seed=rank), mesh=mesh)


def _only_replicas(rank: int) -> Any:
    return _shard(fullshard.replicate, seeded(_make, seed=rank))


def _loaded_before_on_one(rank: int) -> Any:
    model = seeded(_make, seed=rank)
    if rank == 0:
        model.load_state_dict(seeded(_make, seed=9).state_dict())
    return _shard(fullshard.fully_shard, model)


def _loaded_before_by_assignment(rank: int) -> Any:
    model = seeded(_make, seed=rank)
    if rank == 0:
        read = {name: value.clone() for name, value in seeded(_make, seed=9).state_dict().items()}  # as from a file
        model.load_state_dict(read, assign=True)
        model[3].weight = model[2].weight
    return _shard(fullshard.fully_shard, model)


def _loaded_afterwards(rank: int) -> Any:
    """A part, with whole tensors; the rest is as each rank drew it."""
    model = _shard(fullshard.fully_shard, seeded(_make, seed=rank))
    model.load_state_dict({"0.bias": torch.full((7,), float(rank))}, strict=False)
    return model


def _copied(rank: int) -> Any:
    model = _shard(fullshard.fully_shard, seeded(_make, seed=rank))
    with torch.no_grad():
        model[0].bias.copy_(model[0].bias * 2)
    return model


def _copied_on_one(rank: int) -> Any:
    model = _shard(fullshard.fully_shard, seeded(_make, seed=rank))
    with torch.no_grad():
        if rank == 1:
            model[0].bias.to_local().copy_(model[0].bias.to_local() * 2)
    return model


def _materialised(rank: int) -> Any:
    with torch.device("meta"):
        model = _make()

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 1.0 + rank)

    return fullshard.materialize(_shard(fullshard.fully_shard, model), init=init, seed=0)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "make",
    [
        _two_alike,
        _replicas,
        _only_replicas,
        _loaded_before_on_one,
        _loaded_before_by_assignment,
        _loaded_afterwards,
        _copied,
        _copied_on_one,
        _materialised,
    ],
    ids=lambda make: make.__name__.strip("_"),
)
def test_everything_else_is_an_error(make: Callable[[int], Any]) -> None:
    def job(rank: int) -> str:
        model = make(rank)
        with pytest.raises(RanksDisagree) as caught:
            _step(model, rank)
        return str(caught.value)

    texts = set(run_ranks(3, job))
    assert len(texts) == 1
    assert "expected the same values on every rank when fully_shard cut it" in texts.pop()
