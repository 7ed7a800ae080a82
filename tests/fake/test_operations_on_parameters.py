"""Operations on sharded parameters are DTensor's own, on torch's fast path: nothing of ours is called in them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import fully_shard
from tests.harness.fake import fake_world

OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda p: p.mul_(1.0),
    "add": lambda p: p + 1.0,
    "detach": lambda p: p.detach(),
    "view": lambda p: p.view(64),
    "t": lambda p: p.t(),
    "_foreach_mul_": lambda p: torch._foreach_mul_([p], 1.0),
    "zeros_like": torch.zeros_like,
}


def functions_called(does: Callable[[Any], Any], parameter: Any) -> list[str]:
    """The Python functions below `does`, as torch's path for this operation and class calls them."""
    called: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            called.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

    with torch.no_grad():
        does(parameter)  # torch remembers how it shards what it has seen
        gc.disable()  # its callbacks, hypothesis's among them, would be calls of whatever runs then
        sys.setprofile(note)
        try:
            does(parameter)
        finally:
            sys.setprofile(None)
            gc.enable()
    return called


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_calls_what_it_calls_for_a_dtensor(operation: str) -> None:
    """Also in the step of an optimizer, where torch's loops over parameters make thousands of them."""
    does = OPERATIONS[operation]
    with fake_world(4):
        model: Any = fully_shard(nn.Linear(8, 8))
        plain = DTensor.from_local(
            model.weight.to_local().detach(), model.weight.device_mesh, [*model.weight.placements]
        )
        wanted = functions_called(does, nn.Parameter(plain))
        assert functions_called(does, model.weight) == wanted
        found: list[list[str]] = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: found.append(functions_called(does, model.weight)))
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        assert found == [wanted]


def test_an_operation_leaves_the_class_and_counts_writes() -> None:
    with fake_world(4):
        model: Any = fully_shard(nn.Linear(8, 8))
        weight = model.weight
        written = weight._version
        with torch.no_grad():
            weight.add_(weight.detach())
            torch._foreach_mul_([weight, model.bias], 2.0)
        assert weight._version > written
        made = (weight, model.bias, weight.view(64), weight.t(), weight.detach(), weight.data, weight * 2)
        assert {type(value) for value in made} == {DTensor}
        assert isinstance(weight, nn.Parameter) and type(nn.Parameter(weight)) is DTensor
