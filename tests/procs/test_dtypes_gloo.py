"""Parameters of dtypes that gloo does not know: frozen float8 and int16 weights, masks, complex numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.layout.gather import PAIRWISE_PARAMETER_NBYTES
from tests.harness import tolerance
from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, TORCH, Implementation, for_each_implementation
from tests.harness.models import seeded
from tests.harness.pool import pool

UNKNOWN = ("float8_e4m3fn", "float8_e5m2", "int16", "uint16")
KNOWN = ("bool", "complex64", "int64", "float64")


class Quantised(nn.Module):
    """A frozen weight of `dtype`; unless it is alone, a trained bias of a dtype that all know."""

    def __init__(self, dtype: torch.dtype, alone: bool, rows: int) -> None:
        super().__init__()
        self.table = nn.Parameter((torch.arange(3.0 * rows) % 11).view(rows, 3).to(dtype), requires_grad=False)
        self.bias = None if alone else nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        table = self.table.abs() if self.table.is_complex() else self.table
        out = torch.nn.functional.linear(x, table.float()).sum(-1, keepdim=True).expand(-1, 3)
        return out if self.bias is None else out + self.bias


def _frozen(rank: int, name: str, dtype: str, alone: bool, rows: int = 5) -> None:
    impl: Implementation = {"torch": TORCH, "fullshard": FULLSHARD}[name]
    plain = Quantised(getattr(torch, dtype), alone, rows)
    model: Any = nn.Sequential(Quantised(getattr(torch, dtype), alone, rows), seeded(lambda: nn.Linear(3, 3)))
    expected = 2 * 2 * model[1].weight.detach().sum(0)  # two batches of two rows
    impl.fully_shard(model[0], reshard_after_forward=True)
    impl.fully_shard(model)
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.detach()))
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    for _ in range(2):
        seen.clear()
        model(x).sum().backward()
        assert torch.equal(seen[0], plain(x))
    table = model[0].table
    assert isinstance(table, DTensor) and table.dtype is getattr(torch, dtype) and table.grad is None
    if not alone:
        tolerance.assert_close(model[0].bias.grad.full_tensor(), expected)


@pytest.mark.sample(1)
@behaviour("frozen parameters of dtypes that gloo does not know, beside others: {dtype}", area="parameters")
@pytest.mark.parametrize("dtype", UNKNOWN)
@for_each_implementation
def test_frozen_parameters_beside_others(impl: Implementation, dtype: str) -> None:
    for world in (1, 2, 4):
        pool(world).run(_frozen, impl.name, dtype, False)


@pytest.mark.sample(1)
@behaviour(
    "frozen parameters of dtypes that gloo does not know, alone in a unit: {dtype}",
    area="parameters",
    torch="better",
    reason="what is only moved travels as bytes; torch asks gloo for the dtype",
)
@pytest.mark.parametrize("dtype", UNKNOWN)
def test_frozen_parameters_of_other_dtypes(dtype: str, impl: Implementation) -> None:
    for world in (1, 2, 4):
        pool(world).run(_frozen, impl.name, dtype, True)


def test_frozen_parameters_of_dtypes_that_gloo_knows() -> None:
    """Of which some travel as bytes too, because other backends do not know them."""
    for dtype in KNOWN:
        for alone in (False, True):
            pool(2).run(_frozen, "fullshard", dtype, alone)


def test_a_large_weight_that_goes_from_rank_to_rank() -> None:
    """Without a collective, because of its size (comm/group.py)."""
    rows = PAIRWISE_PARAMETER_NBYTES  # of three bytes, over two ranks
    for alone in (False, True):
        pool(2).run(_frozen, "fullshard", "float8_e4m3fn", alone, rows)


def _trained(rank: int, world: int) -> None:
    """A complex weight, which has complex gradients."""
    weight = torch.complex(torch.arange(10.0).view(5, 2), torch.ones(5, 2))
    model: Any = nn.Module()
    model.weight = nn.Parameter(weight.clone())
    model.forward = lambda x: torch.view_as_real(x @ model.weight.t()).square().mean()
    FULLSHARD.fully_shard(model)
    total = torch.zeros_like(weight)
    for r in range(world):
        plain = weight.clone().requires_grad_()
        torch.view_as_real(_complex(r) @ plain.t()).square().mean().backward()
        total += plain.grad / world
    model(_complex(rank)).backward()
    tolerance.assert_close(model.weight.grad.full_tensor(), total)


def _complex(rank: int) -> Tensor:
    return torch.randn(3, 2, dtype=torch.complex64, generator=torch.Generator().manual_seed(rank))


def test_complex_gradients_are_exchanged() -> None:
    for world in (1, 2, 4):
        pool(world).run(_trained, world)
