"""The seam between a root and the other ranks: what of `agree/` runs in a step; and the engine trains without it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.agree.companion import Comparing, Connected
from fullshard.engine import optimizer_steps, root_of, seam, unit_of
from tests.harness.models import seeded
from tests.harness.threads import WORLD, run_ranks

AGREE = str(Path(fullshard.__file__).parent / "agree") + "/"


class Functions:
    """The functions of `agree/` that this thread calls, while it is entered."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(AGREE):
            self.found.add(f"{frame.f_code.co_filename.removeprefix(AGREE)}: {frame.f_code.co_qualname}")

    def __enter__(self) -> Functions:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def made() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 2)))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def sharded(accompany: Any = None) -> Any:
    model: Any = made()
    for module in (*model, model):
        fullshard.fully_shard(module)
        if accompany is not None:
            unit_of(module).settings.accompany = accompany  # type: ignore[union-attr]
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    model(batch(rank, number)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def functions_of_a_step(rank: int) -> tuple[set[str], set[str]]:
    """Of `agree/`: in a training step, and in an evaluation, after the first ones."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found: list[set[str]] = []
    for number in range(3):
        with Functions() as training:
            step(model, optimizer, rank, number)
        with Functions() as evaluation, torch.no_grad():
            model(batch(rank, number))
        found = [training.found, evaluation.found]
    return found[0], found[1]


@pytest.mark.sample(2)
@pytest.mark.parametrize("setting", ["full", "structure", "off"])
def test_with_the_guard_off_a_step_runs_nothing_of_what_compares_ranks(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, backward, step of the optimizer, and an evaluation; otherwise each of them is compared."""
    monkeypatch.setenv("FULLSHARD_GUARD", setting)
    # As in a process of its own: models of other tests, which compare, asked to hear of all optimizer steps.
    monkeypatch.setattr(optimizer_steps, "_told", [])
    for training, evaluation in run_ranks(WORLD, functions_of_a_step):
        if setting == "off":
            assert not training and not evaluation
        else:
            assert training and evaluation


def trained(rank: int, accompany: Any) -> list[Tensor]:
    model = sharded(accompany)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(3):
        step(model, optimizer, rank, number)
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def test_a_root_trains_with_nobody() -> None:
    """The object that does nothing: no comparison, no connections of its own, and the same bits."""
    compared = run_ranks(WORLD, lambda rank: trained(rank, None))
    alone = run_ranks(WORLD, lambda rank: trained(rank, lambda _: seam.NOBODY))
    for ours, theirs in zip(compared, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_who_accompanies_a_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided when it forms."""

    def kind(rank: int) -> type:
        root = root_of(unit_of(sharded()))  # type: ignore[arg-type]
        return type(root.companion)

    assert run_ranks(WORLD, kind) == [Comparing] * WORLD
    assert run_ranks(1, kind) == [Connected]
    monkeypatch.setenv("FULLSHARD_GUARD", "off")
    assert run_ranks(WORLD, kind) == [Connected] * WORLD


def test_all_that_a_root_reports_is_answered() -> None:
    """By what compares; with the guard off what compares is missing, and nothing else."""
    reports = {name for name in vars(seam.Companion) if not name.startswith("_")}
    compares = {"forward_begins", "forward_ends", "before", "carry", "backward_ends", "discards", "did"}
    assert compares < reports
    assert {name for name in reports if getattr(Comparing, name) is getattr(seam.Companion, name)} <= {"scopes"}
    assert {name for name in reports if getattr(Connected, name) is getattr(seam.Companion, name)} == compares | {
        "scopes"
    }
