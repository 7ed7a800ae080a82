"""The first forward ever, inside a transform of torch.func, with weights that are gathered straight into place.

What a root makes when it forms (message buffers, views of full memory) and what a forward compares is no part of what
is transformed: made inside, it would have no memory. On gloo, because there alone large weights go from rank to rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.engine import unit_of
from tests.harness import tolerance
from tests.harness.models import seeded
from tests.harness.pool import pool

# Half of a weight is 512 KiB, above the 128 KiB from which it is gathered into place.
WIDTH = 512
TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),)),
    "grad": lambda model, x: torch.func.grad(lambda y: model(y).sin().sum())(x),
    "grad of grad": lambda model, x: torch.func.grad(
        lambda z: torch.func.grad(lambda y: model(y).sin().sum())(z).square().sum()
    )(x),
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](torch.ones_like(x)),
    "jacrev": lambda model, x: torch.func.jacrev(lambda y: model(y).sum(0)[:2])(x),
    "jacfwd": lambda model, x: torch.func.jacfwd(lambda s: model(x * s).sum(0))(torch.ones(())),
    "hessian": lambda model, x: torch.func.hessian(lambda s: model(x * s).sin().sum())(torch.ones(())),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "vmap of grad": lambda model, x: torch.func.vmap(torch.func.grad(lambda row: model(row).sin().sum()))(x),
    "unshard": lambda model, x: torch.func.grad(lambda y: _unsharded(model)(y).sin().sum())(x),
}


def _unsharded(model: nn.Module) -> nn.Module:
    if isinstance(model, fullshard.FSDPModule):
        model.unshard()
    return model


def _plain() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False)))


def _transformed(rank: int, reshard: bool, grad: bool) -> None:
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)  # torch, in forward mode
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    for transform in TRANSFORMS.values():
        plain, model = _plain(), _plain()
        for layer in (model[0], model[2]):
            fullshard.fully_shard(layer, reshard_after_forward=reshard)
        fullshard.fully_shard(model, reshard_after_forward=reshard)
        assert all(unit_of(model[i]).groups[0].plan.direct for i in (0, 2))  # type: ignore[union-attr]
        trained: tuple[nn.Module, ...] = (plain, model)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in trained]
        for _ in range(2):  # cold; then after a step
            with torch.set_grad_enabled(grad):
                expected, found = (transform(each, x) for each in trained)
            torch.utils._pytree.tree_map(partial(tolerance.assert_close, terms=WIDTH), found, expected)
            for each, optimizer in zip(trained, optimizers, strict=True):
                each(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            tolerance.assert_close(parameter.full_tensor().detach(), wanted.detach(), terms=WIDTH)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("grad", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reshard", [True, False])
def test_the_first_forward_is_inside_a_transform(reshard: bool, grad: bool) -> None:
    pool(2).run(_transformed, reshard, grad)
