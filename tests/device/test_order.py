"""On a device no message is compared before it is sent. What nothing foretold is compared with the first reduction of a
backward, or at the end of a forward without gradients, before its outputs are handed over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import RanksDisagree, fully_shard
from fullshard.engine import unit_of
from fullshard.peers import Scope
from tests.harness.pool import pool


class _Routed(nn.Module):
    """Layers of one size, which run in the order of `route`: no backend notices another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, route: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        for index in route:
            x = torch.tanh(self.layers[index](x))
        return x


def _model() -> Any:
    torch.manual_seed(0)
    model = _Routed().to("simulated")
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def _evaluates_otherwise(rank: int) -> str:
    model, x = _model(), torch.ones(2, 6, device="simulated")
    with torch.no_grad(), pytest.raises(RanksDisagree) as caught:
        model(x, (0, 2, 1) if rank else (0, 1, 2))
    return str(caught.value)


def test_an_evaluation_in_another_order_is_named_before_its_outputs_are_handed_over() -> None:
    said, same = pool(2, backend="nccl").run(_evaluates_otherwise)
    assert said == same
    assert "expected the same on every rank, found unshard" in said and "layers.1" in said and "layers.2" in said
    assert said.endswith("run the same modules in the same order on all ranks")


def _counted(rank: int) -> list[tuple[int, int]]:
    """By evaluation: messages over the connections that compare, and questions."""
    model, x, asked = _model(), torch.ones(2, 6, device="simulated"), [0]
    agree = Scope.agree

    def counted(scope: Scope, what: str, value: str, **options: bool) -> Any:
        asked[0] += 1
        return agree(scope, what, value, **options)

    Scope.agree = counted  # type: ignore[method-assign]
    try:
        found = []
        for _ in range(4):
            with torch.no_grad():
                model(x)
            (scope,) = unit_of(model).root.companion.scopes  # type: ignore[union-attr]
            found.append((sum(n for name, n in scope.groups.issued.items() if name.startswith("check")), asked[0]))
        return found
    finally:
        Scope.agree = agree  # type: ignore[method-assign]


def test_an_evaluation_that_repeats_compares_nothing() -> None:
    for found in pool(2, backend="nccl").run(_counted):
        (first, _), *later = found
        # The second one begins after another for the first time.
        assert first == 1 and later[0][0] == 2 and [each[0] for each in later] == [2, 2, 2], found
        assert len({asked for _, asked in found}) == 1, "nothing goes through the store after the root formed"
