"""Combinations of axes that can be declared, as a table; a checkpoint is saved under one and loaded under another.

A new axis adds a line: tests/threads/test_axes_crossings.py takes each ordered pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from fullshard import checkpoint, prepare_fully_shard
from tests.harness.axes import llama, train
from tests.harness.models import Trained, adamw, collect
from tests.harness.threads import run_ranks


@dataclass(frozen=True)
class Combination:
    """`plan`: what `prepare_fully_shard` gets as parallelism on `world` ranks, None for its defaults; `make`: the
    model, whose values are the same in all combinations that are compared; `train`: one step on a rank."""

    world: int
    plan: Mapping[str, Any] | None = field(default_factory=dict)
    make: Callable[[], nn.Module] = llama
    train: Callable[..., object] = train


TWO = {"tensor_parallel_degree": 2}
WHOLE = {"enable_sequence_parallel": False}
COPIES = {"data_parallel_replicate_degree": 2}
COMBINATIONS = {
    "fsdp": Combination(4, None),
    "fsdp on three": Combination(3, None),
    "hsdp": Combination(4, COPIES),
    "copies": Combination(2, {**COPIES, "data_parallel_shard_degree": 1}),
    "tp": Combination(2, {**TWO, **WHOLE}),
    "tp x fsdp": Combination(4, {**TWO, **WHOLE}),
    "tp x sp x fsdp": Combination(4, TWO),
    "copies x tp": Combination(4, {**COPIES, **TWO, "data_parallel_shard_degree": 1}),
    "hsdp x tp": Combination(8, {**COPIES, **TWO}),
}


def pairs() -> Iterator[tuple[str, str]]:
    """Each ordered pair of two combinations."""
    return ((saved, loaded) for saved in COMBINATIONS for loaded in COMBINATIONS if saved != loaded)


def save(name: str, folder: Path) -> Trained:
    """Take a step under a combination and save it; parameters and optimizer state, whole."""
    each = COMBINATIONS[name]

    def rank_main(rank: int) -> Trained:
        model = each.make()
        optimizer = adamw(model.parameters(), watched=False)
        prepared = prepare_fully_shard(model, optimizer, parallelism=each.plan, show=False)
        each.train(model, optimizer, prepared, [0])
        checkpoint.save(_state(model, optimizer), checkpoint_id=folder)
        return collect(model, optimizer)

    found: Trained = run_ranks(each.world, rank_main, timeout=120.0)[0]
    return found


def load(name: str, folder: Path) -> list[Trained]:
    """What each rank of a combination has after it loaded, parameters and optimizer state, whole."""
    each = COMBINATIONS[name]

    def rank_main(rank: int) -> Trained:
        model = each.make()
        for parameter in model.parameters():
            parameter.data.zero_()  # nothing is right by itself
        optimizer = adamw(model.parameters(), watched=False)
        prepare_fully_shard(model, optimizer, parallelism=each.plan, show=False)
        state = _state(model, optimizer)
        checkpoint.load(state, checkpoint_id=folder)
        checkpoint.set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        return collect(model, optimizer)

    found: list[Trained] = run_ranks(each.world, rank_main, timeout=120.0)
    return found


def _state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    params, state = checkpoint.get_state_dict(model, optimizer)
    return {"model": params, "optimizer": state}
