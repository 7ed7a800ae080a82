"""A small model of experts whose router sends tokens where a test wants them, and its training in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fullshard
from fullshard import MixtureOfExperts
from tests.harness import tolerance
from tests.harness.axes import MAX_NORM, Norm
from tests.harness.models import Trained, adamw, collect, seeded

DIM, EXPERTS = 8, 4
# The tokens of each share: all different, and none.
LENGTHS = (5, 1, 0, 9)


class Layer(nn.Module):
    """x + experts(|x|); the router reads positive numbers, so that the signs of its rows decide."""

    def __init__(self, experts: int = EXPERTS, balance: float = 0.0) -> None:
        super().__init__()
        self.moe = MixtureOfExperts(DIM, 6, experts=experts, experts_per_token=2, balance=balance)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.moe(x.abs() + 0.1)
        return y


class Tiny(nn.Module):
    """Tokens (N,) -> (N, 3)."""

    def __init__(self, balance: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, DIM)
        self.layers = nn.ModuleList(Layer(balance=balance) for _ in range(2))
        self.head = nn.Linear(DIM, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


def tiny(*, starved: bool = False, balance: float = 0.0) -> Tiny:
    """starved: all tokens go to the first two of four experts."""

    def build() -> Tiny:
        model = Tiny(balance)
        for name, p in model.named_parameters():
            if p.ndim == 3 or "router" in name:
                nn.init.normal_(p, std=0.4)
        return model

    model = seeded(build)
    if starved:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "router" in name:
                    p.abs_().add_(0.5)[2:].neg_()
    return model


def tokens(step: int, share: int) -> Tensor:
    return torch.randint(16, (LENGTHS[share],), generator=torch.Generator().manual_seed(100 * step + share))


def loss(model: nn.Module, step: int, share: int) -> Tensor:
    """A sum, so that a share without tokens has one too."""
    found: Tensor = model(tokens(step, share)).square().sum() / 8 + fullshard.balance_loss(model)
    return found


def step_plainly(model: nn.Module, optimizer: Any, losses: Sequence[Callable[[nn.Module], Tensor]]) -> Norm:
    """One step on the mean of `losses`, with clipping."""
    for one in losses:
        (one(model) / len(losses)).backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
    optimizer.step()
    optimizer.zero_grad()
    watched = tolerance.watched(optimizer)
    assert watched is not None
    return Norm(norm, watched.relative)


def plainly(make: Callable[[], nn.Module], steps: int = 3, shares: int = len(LENGTHS)) -> tuple[Trained, list[Norm]]:
    """Training in one process, on all shares of each batch."""
    model = make()
    optimizer = adamw(model.parameters())
    norms = [
        step_plainly(model, optimizer, [functools.partial(loss, step=step, share=share) for share in range(shares)])
        for step in range(steps)
    ]
    return collect(model, optimizer), norms
