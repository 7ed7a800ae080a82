"""A backward of which a schedule computes inputs' and weights' gradients apart, over units that are freed or kept.

Held against torch's own functions (pipelining/_backward.py), which pipeline stages call.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from fullshard import fully_shard
from tests.harness.models import seeded
from tests.harness.threads import WORLD, run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out


def make() -> Any:
    return seeded(Net)


def stage(first: bool, last: bool) -> Any:
    """`first` and `last`: whether the units of these names are freed after forward."""
    model = make()
    fully_shard(model.first, reshard_after_forward=first)
    fully_shard(model.last, reshard_after_forward=last)
    return fully_shard(model, reshard_after_forward=False)


def input_of(step: int) -> Tensor:
    return torch.linspace(-1, 1, 8).view(2, 4).mul(step + 1).requires_grad_()


def held(model: Any) -> None:
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)


def reduced(model: Any) -> None:
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    model._get_fsdp_state()._root_post_backward_final_callback()


def in_two_parts(model: Any, x: Tensor) -> None:
    loss = model(x).square().sum()
    _, groups = stage_backward_input([loss], None, [x], model.parameters())
    stage_backward_weight(model.parameters(), groups)


def same_as_plain(model: Any, *inputs: Tensor) -> None:
    plain = make()
    for x in inputs:
        plain(x.detach()).square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if ours.requires_grad:
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_kept_weights_get_the_gradients_of_both_kinds_of_micro_batch() -> None:
    def rank_fn(rank: int) -> None:
        model = stage(False, False)
        for _ in range(2):
            held(model)
            model(input_of(0)).square().sum().backward()
            in_two_parts(model, input_of(1))
            reduced(model)
            same_as_plain(model, input_of(0), input_of(1))
            model.zero_grad()

    run_ranks(WORLD, rank_fn)


@pytest.mark.parametrize("split_first", [True, False])
def test_freed_weights_of_one_split_micro_batch_of_two_are_refused(split_first: bool) -> None:
    def rank_fn(rank: int) -> None:
        model = stage(True, True)
        for step, split in enumerate((split_first, not split_first)):
            held(model)
            if split:
                in_two_parts(model, input_of(step))
            else:
                model(input_of(step)).square().sum().backward()
            for unit in (model.first, model.last):
                unit.reshard()
        with pytest.raises(RuntimeError, match=r"(?s)first: .*\(2 of 3 units\).*reshard_after_forward=False"):
            reduced(model)

    run_ranks(WORLD, rank_fn)


def test_the_one_unit_that_was_freed_is_named() -> None:
    def rank_fn(rank: int) -> None:
        model = stage(False, True)
        held(model)
        in_two_parts(model, input_of(0))
        with pytest.raises(RuntimeError, match=r"last: expected gradients of its weights.*\(1 of 3 units\)"):
            reduced(model)
        # The step was discarded: the next one is as if this one had never been.
        held(model)
        model(input_of(1)).square().sum().backward()
        reduced(model)
        same_as_plain(model, input_of(1))

    run_ranks(WORLD, rank_fn)


def test_a_frozen_unit_that_was_freed_lacks_nothing() -> None:
    def rank_fn(rank: int) -> None:
        model = make()
        model.first.requires_grad_(False)
        fully_shard(model.first)
        model = fully_shard(model, reshard_after_forward=False)
        held(model)
        in_two_parts(model, input_of(0))
        reduced(model)
        same_as_plain(model, input_of(0))

    run_ranks(WORLD, rank_fn)


def test_gradients_of_inputs_before_the_whole_backward_are_no_split() -> None:
    """Saliency: the graph is kept, and the same forward's whole backward follows."""

    def rank_fn(rank: int) -> None:
        model = stage(True, True)
        held(model)
        x = input_of(0)
        loss = model(x).square().sum()
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        reduced(model)
        same_as_plain(model, input_of(0))

    run_ranks(WORLD, rank_fn)


def test_gradients_of_inputs_alone_are_no_split() -> None:
    """An adversarial step: its graph ends there, and another forward trains."""

    def rank_fn(rank: int) -> None:
        model = stage(True, True)
        held(model)
        x = input_of(0)
        torch.autograd.grad(model(x).square().sum(), x)
        model(input_of(1)).square().sum().backward()
        reduced(model)
        same_as_plain(model, input_of(1))

    run_ranks(WORLD, rank_fn)
