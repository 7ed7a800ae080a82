"""What users compute of a gradient as a number: right, an error that torch raises, or seen by `PartialReads` where it
is this rank's part. One rule for all of them, held against the gradient of plain training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.observe.partial_reads import PartialReads
from tests.harness.models import seeded
from tests.harness.threads import run_ranks
from tests.threads.programs import Model, batch, part, shard


def _gradients(model: Any) -> list[Any]:
    return [p.grad for p in model.parameters()]


USES: dict[str, Callable[[Any], Any]] = {
    # of all gradients, in ways that logs and clippings of projects have
    "get_total_norm": lambda m: nn.utils.get_total_norm(_gradients(m)).item(),
    "norms stacked": lambda m: torch.stack([g.norm() for g in _gradients(m)]).norm().item(),
    "norms as numbers, added": lambda m: math.sqrt(sum(g.norm().item() ** 2 for g in _gradients(m))),
    "norms as tensors, added": lambda m: float(sum(g.norm() ** 2 for g in _gradients(m)) ** 0.5),
    "_foreach_norm": lambda m: torch.stack(torch._foreach_norm(_gradients(m))).norm().item(),
    "the largest of all": lambda m: max(g.abs().max() for g in _gradients(m)).item(),
    "concatenated": lambda m: torch.cat([g.flatten() for g in _gradients(m)]).norm().item(),
    "a number of bad ones": lambda m: (
        sum(int(torch.isnan(g).sum()) for g in _gradients(m)) + int(_gradients(m)[0].numel())
    ),
    # of one
    "norm": lambda m: float(m.head.weight.grad.norm()),
    "matrix norm": lambda m: torch.linalg.matrix_norm(m.head.weight.grad).item(),
    "the largest row": lambda m: m.head.weight.grad.norm(dim=1).max().item(),
    "the largest column": lambda m: m.head.weight.grad.norm(dim=0).max().item(),
    "mean": lambda m: m.head.weight.grad.mean().item(),
    "std": lambda m: m.head.weight.grad.std().item(),
    "sum": lambda m: m.head.weight.grad.sum().item(),
    "smallest": lambda m: m.head.weight.grad.min().item(),
    "count_nonzero": lambda m: int(m.head.weight.grad.count_nonzero()),
    "a share that is small": lambda m: (m.head.weight.grad.abs() < 0.05).float().mean().item(),
    "an element": lambda m: m.head.weight.grad[9, 3].item(),
    "a row": lambda m: m.head.weight.grad[9].sum().item(),
    "formatted": lambda m: float(f"{m.head.weight.grad.norm():.6f}"),
    "tolist": lambda m: m.head.weight.grad.norm().tolist(),
    "numpy": lambda m: m.head.weight.grad.norm().numpy().item(),
    # with the weight
    "ratio to the weight": lambda m: (m.head.weight.grad.norm() / m.head.weight.norm()).item(),
    "product with the weight": lambda m: (m.head.weight.grad * m.head.weight).sum().item(),
    "distance to the weight": lambda m: torch.dist(m.head.weight.grad, m.head.weight).item(),
    "a comparison": lambda m: float(m.head.weight.grad.norm() > 0.5),
}


def _used(model: Any) -> dict[str, tuple[Any, bool]]:
    """What each use gives, or the exception; and whether it was seen."""
    found: dict[str, tuple[Any, bool]] = {}
    for name, use in USES.items():
        watch = PartialReads(model.named_parameters())
        try:
            with watch:
                value = use(model)
        except (RuntimeError, TypeError) as error:
            value = RuntimeError(str(error))  # without the frames, which hold the model
        found[name] = value, bool(watch.found)
    return found


def _look(rank: int) -> dict[str, tuple[Any, bool]]:
    model = shard(seeded(Model))
    model(part(batch(2, 0), rank)).square().mean().backward()
    return _used(model)


@pytest.fixture(scope="module")
def looked() -> list[dict[str, tuple[Any, bool]]]:
    return run_ranks(2, _look)


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[Any, bool]]:
    model = seeded(Model)
    model(batch(2, 0)).square().mean().backward()
    return _used(model)


@pytest.mark.sample(14)
@pytest.mark.parametrize("name", USES)
def test_a_number_is_right_or_seen_or_an_error(name: str, looked: Any, plain: Any) -> None:
    wanted = plain[name][0]
    for value, seen in (ranks[name] for ranks in looked):
        assert not isinstance(wanted, Exception)
        right = not isinstance(value, Exception) and value == pytest.approx(wanted, rel=1e-4)
        assert right or seen or isinstance(value, Exception), f"{value} where {wanted} is right, and nothing saw it"


def test_what_is_right_is_not_seen(looked: Any) -> None:
    """Sums that DTensor makes before the read are whole."""
    for name in ("get_total_norm", "norms stacked", "norms as tensors, added", "an element", "ratio to the weight"):
        assert not any(ranks[name][1] for ranks in looked), name
    for name in ("norm", "norms as numbers, added", "product with the weight"):
        assert all(ranks[name][1] for ranks in looked), name
