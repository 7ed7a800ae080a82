"""Optional units inside of each other, and with other settings: prefetch lists, budgets, offload, recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fullshard
from tests.harness.models import Trained, adamw, assert_same_training, collect, seeded
from tests.harness.nested_units import PARTS, STEPS, Model, freeze, loss_of, parts_of, reference, shard
from tests.harness.optional_units import WIDTH, batch
from tests.harness.threads import run_ranks


def _nothing(_: Any) -> None:
    pass


def _train(rank: int, models: list[Model], change: Callable[[Any], None], frozen: str = "", **options: Any) -> Trained:
    freeze(models[rank], frozen)
    model = shard(models[rank], **options)
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    change(model)
    for step in STEPS:
        with torch.no_grad():
            model(batch(step, rank)[0], parts_of(step + 3 * rank, rank))
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


# ---- settings --------------------------------------------------------------------------------------------------------


def _lists(model: Any) -> None:
    """Optional units are named, have lists, and are inside of what is named."""
    tower, layers = model.tower, model.layers
    model.set_modules_to_forward_prefetch([tower, tower.inner, layers[0]])
    tower.set_modules_to_forward_prefetch([tower.first, tower.inner, tower.inner.deep])
    layers[0].set_modules_to_forward_prefetch([layers[1], layers[2]])
    layers[1].set_modules_to_forward_prefetch([layers[2]])
    model.set_modules_to_backward_prefetch([layers[2], layers[1]])
    layers[2].set_modules_to_backward_prefetch([layers[1], tower.last])
    layers[1].set_modules_to_backward_prefetch([layers[0], tower])
    tower.inner.set_modules_to_backward_prefetch([tower.inner.deep, tower.first])


def _budget(**given: int) -> Callable[[Any], None]:
    return lambda model: model.set_memory_budget(**given)


def _resident(model: Any) -> None:
    for name in ("tower.inner", "layers.1", "layers.2"):
        model.get_submodule(name).set_memory_budget(resident=10_000)


_OFFLOAD = {"offload_policy": fullshard.CPUOffloadPolicy(pin_memory=False)}
SETTINGS: dict[str, tuple[Callable[[Any], None], dict[str, Any]]] = {
    "nested": (_nothing, {}),
    "nested and kept": (_nothing, {"reshard_after_forward": False}),
    "prefetch lists": (_lists, {}),
    "prefetch lists and kept": (_lists, {"reshard_after_forward": False}),
    "no prefetched bytes": (_budget(prefetch=0), {}),
    "some prefetched bytes": (_budget(prefetch=400), {}),
    "few bytes of gradients": (_budget(gradients=0), {}),
    "resident": (_resident, {}),
    "offload": (_nothing, _OFFLOAD),
    "offload and kept": (_nothing, {**_OFFLOAD, "reshard_after_forward": False}),
    "offload and budgets": (_budget(prefetch=400, gradients=300), _OFFLOAD),
    "frozen": (_nothing, {"frozen": "tower.inner"}),
    "frozen and kept": (_nothing, {"frozen": "tower", "reshard_after_forward": False}),
    "frozen and resident": (_resident, {"frozen": "tower.inner"}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_training_equals_one_process(world: int, setting: str) -> None:
    change, options = SETTINGS[setting]
    models = [seeded(Model) for _ in range(world)]
    expected = reference(world, options.get("frozen", ""))
    for trained in run_ranks(world, lambda rank: _train(rank, models, change, **options)):
        assert_same_training(trained, expected)


# ---- recomputation ---------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("again", "kept"),
    [("each", False), ("each", True), ("around", True), ("each, reentrant", True), ("around, reentrant", True)],
)
def test_recomputation(again: str, kept: bool) -> None:
    """Of units by themselves; also of a tower with units inside of it, where these stay unsharded."""
    models = [seeded(lambda: Model(again)) for _ in range(2)]
    expected = reference(2)
    for trained in run_ranks(2, lambda rank: _train(rank, models, _nothing, reshard_after_forward=not kept)):
        assert_same_training(trained, expected)


# ---- one rank --------------------------------------------------------------------------------------------------------


def _alone(_: int) -> list[torch.Tensor]:
    model, x = shard(seeded(Model)), torch.ones(2, WIDTH)
    with torch.no_grad():
        model(x, PARTS)
        layer = model.layers[1]
        return [layer(layer(x)), model.tower.inner(x, ()), model(x, ())]


def test_one_rank_joins_nobody() -> None:
    """It runs the unit as often as it wants, and outside of the model too."""
    plain, x = seeded(Model), torch.ones(2, WIDTH)
    with torch.no_grad():
        layer = plain.layers[1]
        expected = [layer(layer(x)), plain.tower.inner(x, ()), plain(x, ())]
    for out, wanted in zip(run_ranks(1, _alone)[0], expected, strict=True):
        assert torch.equal(out, wanted)
