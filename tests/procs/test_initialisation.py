"""Random initial values on gloo, where every rank has a generator of its own; and the error that no rank survives."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import fullshard
from tests.harness.pool import pool


def _model() -> nn.Sequential:
    """Seven rows on four ranks."""
    return nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 4))


def _on_meta(fully_shard: Any) -> Any:
    with torch.device("meta"):
        model = _model()
    for child in model:
        fully_shard(child)
    return fully_shard(model)


def _full(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor().detach().clone() for p in model.parameters()]


def _drawn_by_dtensor(rank: int, which: str) -> list[Tensor]:
    model = _on_meta({"torch": torch_fsdp, "fullshard": fullshard}[which].fully_shard)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DTensor random operators")
        for child in model:
            child.reset_parameters()
    return _full(model)


@pytest.mark.parametrize("world", [1, 2])
def test_what_dtensor_draws_is_what_it_draws_for_torch(world: int) -> None:
    """In a world of one that is what the plain model draws; on more CPU ranks, where equal generators give equal rows,
    it is not, and `materialize` is there for that."""
    found = {which: pool(world).run(_drawn_by_dtensor, which) for which in ("torch", "fullshard")}
    torch.manual_seed(0)
    drawn = _model()
    for ours, theirs in zip(found["fullshard"], found["torch"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        alike = [torch.equal(a, b) for a, b in zip(ours, drawn.parameters(), strict=True)]
        assert all(alike) if world == 1 else not any(alike)


def _materialized(rank: int) -> tuple[list[Tensor], bool]:
    torch.manual_seed(100 + rank)  # as for dropout; the seed of the values is given
    before = torch.random.get_rng_state()
    model = _on_meta(fullshard.fully_shard)
    fullshard.materialize(model, seed=0)
    kept = torch.equal(torch.random.get_rng_state(), before)
    other = _on_meta(fullshard.fully_shard)
    if torch.distributed.get_world_size() > 1:
        with pytest.raises(ValueError, match="pass seed="):
            fullshard.materialize(other)  # the ambient one differs
    other.to_empty(device="cpu")
    other[0].weight.to_local().data.fill_(1.0)  # of the biases, one rank owns nothing
    with pytest.raises(RuntimeError, match=r": 0\.bias, 1\.weight, 1\.bias; "):
        other(torch.ones(1, 6))
    return _full(model), kept


def test_values_do_not_depend_on_the_world() -> None:
    with torch.device("meta"):
        reference = _model()
    fullshard.materialize(reference, seed=0)
    for world in (1, 2, 4):
        for values, kept in pool(world).run(_materialized):
            assert kept
            assert all(torch.equal(a, b) for a, b in zip(values, reference.parameters(), strict=True))
