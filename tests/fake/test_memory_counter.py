"""The counter of benchmarks/memory.py: storages that come, change their size and go."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.counting import MemoryCounter


def test_storages_come_and_go() -> None:
    before = torch.ones(100)
    with MemoryCounter() as counter:
        counter.mark("two")
        one = before + 1
        two = one * 2
        del one
        counter.mark("views")
        parts = [two[:10], two.view(10, 10), before[5:]]
        counter.mark("three")
        three = torch.empty(50)
    assert (counter.peak("two"), counter.peak("views"), counter.peak("three")) == (800, 400, 600)
    assert counter.peak("three", without_lasting=("two",)) == 200
    assert counter.peak("three", without_lasting=("two", "three")) == 0
    # `one` and `two` have 400 bytes each, `three` 200.
    assert counter.peak("three", above_nbytes=200) == 400 and counter.peak("two", above_nbytes=400) == 0
    assert len(parts) == 3 and three.numel() == 50


def test_a_storage_that_is_resized() -> None:
    """As full parameters are: those from before the count begin with what they had."""
    full = torch.ones(100)
    full.untyped_storage().resize_(0)
    with MemoryCounter() as counter:
        counter.mark("there")
        full.untyped_storage().resize_(400)
        counter.mark("gone")
        full.untyped_storage().resize_(0)
        counter.mark("through an operation")
        torch.empty(0).resize_(30)
    assert (counter.peak("there"), counter.peak("gone"), counter.peak("through an operation")) == (400, 400, 120)


def test_what_autograd_makes_and_frees() -> None:
    """A layer of 64 weights: its gradient lasts, the activations go with the graph."""
    layer = nn.Linear(8, 8, bias=False)
    x = torch.ones(1000, 8)

    def step() -> Tensor:
        return torch.tanh(layer(x)).sum()

    with MemoryCounter() as counter:
        counter.mark("forward")
        loss = step()
        counter.mark("backward")
        loss.backward()
        counter.mark("after")
        del loss
    activation = 1000 * 8 * 4
    assert counter.peak("forward") == 2 * activation
    assert counter.peak("after") <= 64 * 4 + 4 + 4
    assert counter.peak("backward") - counter.peak("backward", without_lasting=("backward",)) <= 64 * 4
