"""Plain modules called outside of the forward of the unit that has their parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from tests.harness.threads import run_ranks
from tests.threads.programs import WIDTH, Model, batch, compare_gradients, part, shard


class Towers(Model):
    """Plain modules inside plain modules, and methods that call them."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleDict({"body": nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh())})

    def _score(self, x: Tensor) -> Tensor:
        return self.head(x)

    def pieces(self, x: Tensor) -> Any:
        yield self.tower["body"](x)


def test_a_plain_module_called_directly() -> None:
    """An error of DTensor's, before the first forward, in the middle of a step and behind it; the steps around it are
    what they would be."""
    torch.manual_seed(0)
    base = Towers()

    def calls(model: Any, tokens: Tensor) -> list[Callable[[], Any]]:
        x = torch.ones(2, WIDTH)
        return [
            lambda: model.embedding(tokens),
            lambda: model.layers[1].up(x),
            lambda: model.tower["body"](x),
            lambda: model._score(x),
            lambda: next(model.pieces(x)),
        ]

    def rank_main(rank: int) -> None:
        model: Any = shard(copy.deepcopy(base))
        reference: Any = copy.deepcopy(base)
        tokens = part(batch(2, 0), rank)

        def refused() -> None:
            for call in calls(model, tokens):
                with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
                    call()

        refused()
        for step in range(2):
            loss = model(part(batch(2, step), rank)).pow(2).mean()
            with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
                model.layers[0].down(torch.ones(2, 2 * WIDTH + 1))
            loss.backward()
            refused()
            for r in range(2):
                (reference(part(batch(2, step), r)).pow(2).mean() / 2).backward()
            compare_gradients(model, reference, step)
        # What docs/surface.md says works.
        model.unshard()
        expected = reference.embedding(tokens)
        assert torch.equal(model.embedding(tokens), expected)
        model.reshard()
        with fullshard.full_params(model):
            assert torch.equal(model.embedding(tokens), expected)
        refused()

    run_ranks(2, rank_main)


def test_a_plain_module_that_is_a_unit_of_its_own_gathers() -> None:
    """What the message advises first; and the other one, for a module around it."""

    torch.manual_seed(0)
    base = Towers()

    def rank_main(rank: int) -> None:
        model: Any = copy.deepcopy(base)
        reference = copy.deepcopy(base)
        fullshard.fully_shard(model.embedding)
        shard(model)
        fullshard.register_fsdp_forward_method(model, "_score")
        x, tokens = torch.ones(2, WIDTH), part(batch(2, 0), rank)
        with torch.no_grad():
            model(tokens)
        assert torch.equal(model.embedding(tokens), reference.embedding(tokens))
        assert torch.equal(model._score(x), reference.head(x))

    run_ranks(2, rank_main)
