"""The oracle of the programs (tests/harness/plain.py) is plain training: one process, all batches, no sharding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.harness import plain, programs
from tests.harness.models import BY_NAME, CASES, Case, Trained, adamw, assert_same_training, collect, train_reference
from tests.harness.pool import pool

STEPS, MICROS = 3, 2


def _trained(rank: int, name: str, accumulate: bool) -> Trained:
    case = BY_NAME[name]
    model = case.shard(case.build(), plain.fully_shard)
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        for micro in range(MICROS if accumulate else 1):
            model.set_requires_gradient_sync(not accumulate or micro == MICROS - 1)
            (case.loss(model, case.batch(MICROS * step + micro, rank)) / (MICROS if accumulate else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return collect(model, optimizer)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_oracle_is_plain_training(case: Case) -> None:
    """Two ranks: halves add up to the same bits whether they are halved before or after."""
    name = case.name
    batches = [[BY_NAME[name].batch(MICROS * step, rank) for rank in range(2)] for step in range(STEPS)]
    expected = train_reference(BY_NAME[name].build(), BY_NAME[name].loss, batches)
    for found in pool(2).run(_trained, name, False):
        assert_same_training(found, expected, 0)


def test_the_oracle_holds_gradients_back() -> None:
    """Micro-batches without synchronisation: the average of what each rank added up by itself."""
    case = BY_NAME["transformer"]
    model = case.build()
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        for rank in range(2):
            for micro in range(MICROS):
                (case.loss(model, case.batch(MICROS * step + micro, rank)) / MICROS / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = collect(model, optimizer)
    for found in pool(2).run(_trained, case.name, True):
        assert_same_training(found, expected)


class _Partly(nn.Module):
    """Rank 0 alone uses the first layer, all ranks the last one, nobody the others; the third is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))
        self.layers[2].requires_grad_(False)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return self.layers[3](self.layers[0](x) if rank == 0 else x)


def _absent(rank: int) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    model = plain.fully_shard(_Partly())
    model(torch.ones(1, 2), rank).sum().backward()
    return [p.grad for p in model.parameters()]


def test_the_oracle_knows_absent_gradients() -> None:
    first, second = pool(2).run(_absent)
    assert torch.equal(first[0], second[0]) and bool(first[0].abs().sum() > 0)
    assert first[1:3] == second[1:3] == [None, None]
    assert torch.equal(first[3], second[3])


def test_one_wrong_bit_is_found() -> None:
    right = {"w": torch.ones(3), "loss": 0.5}
    wrong = {"w": torch.ones(3).nextafter(torch.full((3,), 2.0)), "loss": 0.5}
    assert programs.differences(right, right) == []
    assert programs.differences(wrong, right) == ["w: off by 1.19e-07 of 1"]
    assert programs.differences({"w": right["w"]}, right) == ["loss: only on one side"]
    assert programs.differences({**right, "loss": 0.6}, right, 2.0**-26) == ["loss: 0.6 where 0.5"]
    assert programs.differences({**right, "w": right["w"] * float("nan")}, right, 1.0) != []
