"""Small models whose sequences a plan cuts over `cp`, trained beside one process. The numbers of labels that count
differ from rank to rank, so that a mean over a rank's own is not that of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard
from fullshard import Parallelism, Prepared, prepare_fully_shard
from tests.harness import axes, tolerance
from tests.harness.axes import MAX_NORM, STEPS, Norm, assert_norms
from tests.harness.models import Trained, adamw, assert_same_training, collect
from tests.harness.threads import run_ranks


def batch_of(step: int, share: int) -> dict[str, Tensor]:
    """(2, TOKENS) each; labels as transformers has them, not shifted."""
    ids = axes.batch(step, share)[:, :-1]
    labels = ids.clone()
    labels[0, :4] = -100
    labels[1, 6:] = -100
    return {"input_ids": ids, "labels": labels}


def shifted(labels: Tensor) -> Tensor:
    return F.pad(labels, (0, 1), value=-100)[:, 1:]


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of one process."""
    if hasattr(model, "config"):
        found: Tensor = model(**batch, use_cache=False).loss
        return found
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1).float(), shifted(batch["labels"]).flatten())


def loss_of_parts(model: nn.Module, cp: Any, batch: dict[str, Tensor]) -> Tensor:
    """The same in a plan's context, which gets whole batches."""
    if hasattr(model, "config"):
        found: Tensor = model(**cp.split(batch), use_cache=False).loss
        return found
    inputs, labels = cp.split((batch["input_ids"], shifted(batch["labels"])))
    logits = model(inputs, cp.positions(batch["input_ids"].shape[1]))
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def plainly(make: Callable[[], nn.Module], shares: int, steps: int = STEPS) -> tuple[Trained, list[Norm]]:
    """Training in one process on all shares of each batch, with clipping; and the norms before it."""
    model = make()
    optimizer = adamw(model.parameters())
    norms, losses = [], []
    for step in range(steps):
        of_shares = [loss_of(model, batch_of(step, share)) / shares for share in range(shares)]
        torch.stack(of_shares).sum().backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
        watched = tolerance.watched(optimizer)
        assert watched is not None
        norms.append(Norm(norm, watched.relative))
        losses.append(float(sum(one.detach() for one in of_shares)))
    return collect(model, optimizer, losses), norms


def train(model: nn.Module, optimizer: Any, prepared: Prepared, steps: Sequence[int] = range(STEPS)) -> Any:
    """The same on one rank; returns its losses, and the norms."""
    losses, norms = [], []
    for step in steps:
        with prepared.loss_context(), prepared.context() as cp:
            loss = loss_of_parts(model, cp, batch_of(step, prepared.share[0]))
            loss.backward()
        norms.append(float(fullshard.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms


def planned(
    rank: int, make: Callable[[], nn.Module], plan: Any, config: Any = None
) -> tuple[Trained, list[float], list[str], tuple[int, int]]:
    """A rank's training from the declaration `plan`; its norms, what was printed, and its share."""
    model = make()
    optimizer = adamw(model.parameters(), watched=False)
    prepared = prepare_fully_shard(model, optimizer, config, parallelism=plan, show=False)
    losses, norms = train(model, optimizer, prepared)
    return collect(model, optimizer, losses), norms, str(prepared).splitlines(), prepared.share


def check(
    world: int, make: Callable[[], nn.Module], plan: dict[str, Any], config: Any = None, runner: Any = None
) -> list[str]:
    """Parameters, optimizer state, norms and losses are those of one process; returns what rank 0 printed."""
    shares = Parallelism(**plan).on(world).shares
    expected, norms = plainly(make, shares)
    run = runner or (lambda: run_ranks(world, planned, make, plan, config, timeout=240.0))
    ranks = run()
    means = [0.0] * STEPS
    for trained, found, _, (share, _) in ranks:
        assert_same_training(trained, expected)
        assert_norms(found, norms)
        # Each rank has the loss of its share, whatever part of it is its own.
        mine = [losses for other, _, _, (its, _) in ranks if its == share for losses in [other.losses]]
        assert all(losses == mine[0] for losses in mine)
        means = [mean + loss / len(ranks) for mean, loss in zip(means, trained.losses, strict=True)]
    assert all(
        abs(mean - loss) <= tolerance.figure(steps=STEPS) * abs(loss)
        for mean, loss in zip(means, expected.losses, strict=True)
    )
    printed: list[str] = ranks[0][2]
    return printed
