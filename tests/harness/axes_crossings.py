"""Combinations of axes that can be declared, as a table; a checkpoint is saved under one and loaded under another.

A new axis adds a line: tests/threads/test_axes_crossings.py takes each ordered pair.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fullshard import checkpoint, prepare_fully_shard
from tests.harness import sequences
from tests.harness.axes import llama, train
from tests.harness.models import Trained, adamw, collect
from tests.harness.threads import run_ranks


@dataclass(frozen=True)
class Combination:
    """`plan`: what `prepare_fully_shard` gets as parallelism on `world` ranks, None for its defaults; `make`: the
    model, always with the same values; combinations of one model are compared; `train`: one step on a rank."""

    world: int
    plan: Mapping[str, Any] | None = field(default_factory=dict)
    make: Callable[[], nn.Module] = llama
    train: Callable[..., object] = train


TWO = {"tensor_parallel_degree": 2}
WHOLE = {"enable_sequence_parallel": False}
COPIES = {"data_parallel_replicate_degree": 2}
CP = {"context_parallel_degree": 2}
RING = {**CP, "context_parallel_variant": "ring"}
EP = {"expert_parallel_degree": 2}
of_experts = partial(llama, experts=4, experts_per_token=2)
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
    "cp ring x fsdp": Combination(4, RING, train=sequences.train),
    "cp on all": Combination(4, {"context_parallel_degree": 4}, train=sequences.train),
    "cp x tp": Combination(4, {**CP, **TWO}, train=sequences.train),
    "experts x fsdp": Combination(4, None, of_experts),
    "ep x fsdp": Combination(4, EP, of_experts),
    "ep on all": Combination(4, {"expert_parallel_degree": 4}, of_experts),
    "ep x hsdp": Combination(4, {**EP, **COPIES}, of_experts),
    "ep x tp": Combination(4, {**EP, **TWO, "expert_tensor_parallel_degree": 2}, of_experts),
}


def pairs() -> Iterator[tuple[str, str]]:
    """Each ordered pair of two combinations of one model."""
    every = itertools.permutations(COMBINATIONS.items(), 2)
    return ((saved, loaded) for (saved, one), (loaded, other) in every if one.make is other.make)


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
