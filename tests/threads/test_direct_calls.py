"""Plain modules called outside of the forward of the unit that has their parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from tests.harness.behaviours import behaviour
from tests.harness.implementations import Implementation
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


@behaviour(
    "a call of a plain module outside of the forward of its unit is an error that names both, and says what to do",
    area="errors",
    torch="better",
    reason="torch's operators speak of mixed tensors, and of no module",
)
def test_a_plain_module_called_directly(impl: Implementation) -> None:
    """Before the first forward, in the middle of a step and behind it; the steps around it are what they would be."""
    torch.manual_seed(0)
    base = Towers()

    def calls(model: Any, tokens: Tensor) -> dict[str, Callable[[], Any]]:
        x = torch.ones(2, WIDTH)
        return {
            "embedding": lambda: model.embedding(tokens),
            r"(layers\.1\.)?up": lambda: model.layers[1].up(x),
            r"tower\.body\.0": lambda: model.tower["body"](x),
            "head": lambda: model._score(x),
            r"tower\.body\.(0)": lambda: next(model.pieces(x)),
        }

    def rank_main(rank: int) -> None:
        model: Any = shard(copy.deepcopy(base), impl)
        reference: Any = copy.deepcopy(base)
        tokens = part(batch(2, 0), rank)

        def refused() -> None:
            for name, call in calls(model, tokens).items():
                with pytest.raises(
                    RuntimeError, match=rf"^({name}\.\w+(, )?)+: expected .* inside the forward of .*FSDP"
                ):
                    call()

        refused()
        for step in range(2):
            loss = model(part(batch(2, step), rank)).pow(2).mean()
            with pytest.raises(
                RuntimeError, match=r"^layers\.0\.down\.\w+.*: .* inside the forward of layers\.0 \(FSDPBlock\)"
            ):
                model.layers[0].down(torch.ones(2, 2 * WIDTH + 1))
            loss.backward()
            refused()
            for r in range(2):
                (reference(part(batch(2, step), r)).pow(2).mean() / 2).backward()
            compare_gradients(model, reference, step)
        # What the message says works.
        model.unshard()
        expected = reference.embedding(tokens)
        assert torch.equal(model.embedding(tokens), expected)
        model.reshard()
        with fullshard.full_params(model):
            assert torch.equal(model.embedding(tokens), expected)
        refused()
        # Errors of a module's own are left alone.
        with pytest.raises(IndexError), fullshard.full_params(model):
            model.embedding(torch.tensor([[10**6, 1]]))

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
