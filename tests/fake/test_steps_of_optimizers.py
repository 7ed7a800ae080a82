"""In the step of an optimizer the operations on sharded parameters are DTensor's, at its speed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import fully_shard
from fullshard.param import ShardedParameter
from tests.harness.fake import fake_world


def is_dtensors() -> bool:
    ours: Any = ShardedParameter.__torch_dispatch__
    torchs: Any = DTensor.__torch_dispatch__
    return bool(ours.__func__ is torchs.__func__)


class Looks(torch.optim.SGD):
    raises = False
    found: list[bool] = []

    def step(self, closure: Any = None) -> Any:
        self.found.append(is_dtensors())
        if self.raises:
            raise ValueError("mine")
        return super().step(closure)


def test_operations_in_a_step_are_dtensors() -> None:
    """Behind it they are named again; behind one that raised, once another one is over."""
    with fake_world(4):
        model: Any = fully_shard(nn.Linear(8, 8))
        optimizer = Looks(model.parameters(), lr=0.1)
        x = torch.ones(2, 8)
        model(x).sum().backward()
        assert not is_dtensors()
        optimizer.step()
        assert optimizer.found == [True] and not is_dtensors()
        optimizer.raises = True
        with pytest.raises(ValueError, match="mine"):
            optimizer.step()
        optimizer.raises = False
        optimizer.step()
        assert optimizer.found == [True] * 3 and not is_dtensors()
        with pytest.raises(RuntimeError, match="^weight: expected it to be used inside the forward"):
            nn.functional.linear(x, model.weight)


def test_an_operation_leaves_the_class_and_counts_writes() -> None:
    with fake_world(4):
        model: Any = fully_shard(nn.Linear(8, 8))
        weight = model.weight
        written = weight._version
        with torch.no_grad():
            weight.add_(weight.detach())
            torch._foreach_mul_([weight, model.bias], 2.0)
        assert weight._version > written
        assert type(weight) is type(model.bias) is ShardedParameter
        # Views know whose they are; what is computed is anybody's.
        assert type(weight.view(64)) is type(weight[:, :3]) is ShardedParameter
        assert type(weight * 2) is type(weight.clone()) is DTensor
