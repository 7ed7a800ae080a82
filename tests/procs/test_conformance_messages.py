"""Conformance: how many messages a step takes, for torch's FSDP2 and for ours with default settings, on gloo processes.

How a gather or a reduction travels is each implementation's own (all-gather and reduce-scatter, or an exchange); how
many there are is what memory and time depend on.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.behaviours import behaviour
from tests.harness.implementations import FULLSHARD, TORCH, for_each_implementation, kinds, sharded
from tests.harness.models import seeded
from tests.harness.pool import pool

IMPLEMENTATIONS = {"torch": TORCH, "fullshard": FULLSHARD}
UNITS = 3


def _model(impl: str, **options: Any) -> Any:
    base = seeded(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(UNITS))))
    return sharded(IMPLEMENTATIONS[impl], base, **options)


class _Messages(TorchDispatchMode):
    """Counts gathers of parameters and reductions of gradients, and whatever else is sent by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.__name__
            if "allgather" in name:
                name = "gather"
            elif "reduce_scatter" in name or "alltoall" in name:
                name = "reduce"
            self.counted[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def found(self) -> dict[str, int]:
        return dict(self.counted)


def _of_a_step(rank: int, impl: str, reshard: bool) -> list[dict[str, int]]:
    model = _model(impl, reshard_after_forward=reshard)
    x = torch.ones(2, 5)
    model(x).sum().backward()  # what ranks tell each other once is not counted
    model.zero_grad()
    with _Messages() as forward:
        loss = model(x).sum()
    with _Messages() as backward:
        loss.backward()
    return [forward.found, backward.found]


@behaviour(
    "messages of a step: a gather per unit in forward, one in backward where it was freed, one reduction",
    area="communication",
)
@for_each_implementation
@pytest.mark.parametrize("reshard", [True, False])
def test_messages_of_a_step(reshard: bool, impl: Any) -> None:
    for forward, backward in pool(2).run(_of_a_step, impl.name, reshard):
        assert forward == {"gather": UNITS}
        assert backward == ({"gather": UNITS, "reduce": UNITS} if reshard else {"reduce": UNITS})


def _accumulating(rank: int, impl: str) -> list[dict[str, int]]:
    model = _model(impl)
    x, found = torch.ones(2, 5), []
    model(x).sum().backward()
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        loss = model(x).sum()
        with _Messages() as backward:
            loss.backward()
        found.append(backward.found)
    return found


@behaviour("messages of accumulation: nothing is reduced before the last micro-batch", area="communication")
@for_each_implementation
def test_messages_of_accumulation(impl: Any) -> None:
    for held, sent in pool(2).run(_accumulating, impl.name):
        assert held == {"gather": UNITS} and sent == {"gather": UNITS, "reduce": UNITS}


def _frozen(rank: int, impl: str) -> dict[str, int]:
    base = seeded(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(UNITS))))
    base.get_submodule("1").requires_grad_(False)
    model = sharded(IMPLEMENTATIONS[impl], base)
    x = torch.ones(2, 5)
    model(x).sum().backward()
    with _Messages() as step:
        model(x).sum().backward()
    return step.found


@behaviour("messages of a frozen unit: it is gathered as the others, and never reduced", area="communication")
@for_each_implementation
def test_messages_of_a_frozen_unit(impl: Any) -> None:
    for found in pool(2).run(_frozen, impl.name):
        assert found == {"gather": 2 * UNITS, "reduce": UNITS - 1}


def _resharded_by_hand(rank: int, impl: str) -> tuple[dict[str, int], bool, dict[str, int], bool]:
    model = _model(impl, reshard_after_forward=False)
    x = torch.ones(2, 5)
    with torch.no_grad():
        expected = model(x)
        with _Messages() as kept:
            same = torch.equal(model(x), expected)
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        all_sharded = kinds(model) == {DTensor}
        with _Messages() as again:
            same = same and torch.equal(model(x), expected)
    return kept.found, all_sharded, again.found, same


@behaviour("an explicit `reshard()` after an evaluation that kept parameters full", area="communication")
@for_each_implementation
def test_resharded_by_hand(impl: Any) -> None:
    for kept, all_sharded, again, same in pool(2).run(_resharded_by_hand, impl.name):
        assert (kept, all_sharded, again, same) == ({}, True, {"gather": UNITS}, True)
