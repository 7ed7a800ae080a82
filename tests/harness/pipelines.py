"""Small models trained as pipelines from one declaration, beside one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard
from fullshard import balance_loss, prepare_fully_shard
from tests.harness import tolerance
from tests.harness.axes import MAX_NORM, STEPS, VOCABULARY, Norm, assert_norms
from tests.harness.installed import clear_redistribution_cache, clear_sharding_cache
from tests.harness.models import Trained, adamw, assert_same_training, collect
from tests.harness.pool import pool

TIMEOUT = 240.0
SAMPLES = 4


def batch(step: int, share: int, tokens: int = 8) -> tuple[Tensor, Tensor]:
    """(SAMPLES, tokens) inputs and targets, int64."""
    generator = torch.Generator().manual_seed(1_000 * step + share)
    whole = torch.randint(VOCABULARY, (SAMPLES, tokens + 1), generator=generator)
    return whole[:, :-1], whole[:, 1:].contiguous()


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def plainly(
    make: Callable[[], nn.Module], shares: int, steps: Sequence[int] = range(STEPS), micro: int = 1
) -> tuple[Trained, list[Norm], list[list[float]]]:
    """Training in one process; what it left, the norms, and the losses of each step by share. Each share is in `micro`
    parts, of which balance losses are not that of the whole."""
    model = make()
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    norms: list[Norm] = []
    losses: list[list[float]] = []
    for step in steps:
        losses.append([])
        for share in range(shares):
            losses[-1].append(0.0)
            for x, y in zip(*(whole.chunk(micro) for whole in batch(step, share)), strict=True):
                out: Any = model(x)
                loss = loss_fn(getattr(out, "logits", out), y) + balance_loss(model)
                losses[-1][-1] += float(loss.detach()) / micro
                (loss / shares / micro).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
        watched = tolerance.watched(optimizer)
        assert watched is not None
        norms.append(Norm(norm, watched.relative))
    return collect(model, optimizer), norms, losses


def train(model: nn.Module, optimizer: Any, prepared: Any, steps: Sequence[int]) -> tuple[list[float], list[float]]:
    """The same on one rank of a pipeline; norms and losses."""
    norms, losses = [], []
    for step in steps:
        x, y = batch(step, prepared.share[0])
        losses.append(float(prepared.step(x, target=y)))
        norms.append(float(fullshard.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, losses


def planned(
    rank: int, make: Callable[[], nn.Module], plan: dict[str, Any], config: Any, steps: Sequence[int]
) -> tuple[Trained, list[float], list[float], int, list[str]]:
    """A rank's training from a declaration; with the share of the batch it had, and what was printed."""
    # Of the groups of another test.
    clear_redistribution_cache()
    clear_sharding_cache()
    model = make()
    optimizer = adamw((p for p in model.parameters() if p.requires_grad), watched=False)
    prepared = prepare_fully_shard(model, optimizer, config, parallelism=plan, loss_fn=loss_fn, show=False)
    norms, losses = train(model, optimizer, prepared, steps)
    return collect(model, optimizer), norms, losses, prepared.share[0], str(prepared).splitlines()


def check(
    world: int,
    make: Callable[[], nn.Module],
    plan: dict[str, Any],
    config: Any = None,
    steps: Sequence[int] = range(STEPS),
    micro: int = 1,
) -> list[str]:
    """Parameters, optimizer state, norms and losses of all ranks are those of one process; every parameter is on some
    stage. Returns what rank 0 printed."""
    axes = fullshard.Parallelism(**plan).on(world)
    expected, norms, losses = plainly(make, axes.shares, steps, micro)
    ranks = pool(world).run(planned, make, plan, config, steps, timeout=TIMEOUT)
    seen: set[str] = set()
    for trained, found, found_losses, share, _ in ranks:
        seen |= {*trained.params}
        assert_same_training(trained, part_of(expected, trained.params))
        assert_norms(found, norms)
        # Off by no more than what rounding does to the gradients of the step.
        for mine, its, norm in zip(found_losses, losses, norms, strict=True):
            assert math.isclose(mine, its[share], rel_tol=norm.relative), (mine, its[share])
    assert seen == {*expected.params}
    printed: list[str] = ranks[0][4]
    return printed


def part_of(whole: Trained, names: Any) -> Trained:
    """What `whole` has of the parameters `names`."""
    state = {key: value for key, value in whole.state.items() if key.rpartition(".")[0] in names}
    return Trained({name: whole.params[name] for name in names}, state, whole.losses, whole.allowed)
