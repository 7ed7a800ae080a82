"""Models described by a few of their blocks beside the same described whole: units, and every span of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import Program
from fullshard.migrate.declared import noted_by
from fullshard.migrate.parallelism import Parallelism
from fullshard.plan import Planner, Strategy
from fullshard.plan.description import Model
from fullshard.plan.facts import describe
from fullshard.plan.repeats import KEPT, blocks_of
from fullshard.plan.sizes import Sizes, _are_equal
from fullshard.plan.spans import scaled, steps_of
from fullshard.plan.tape import note
from fullshard.train.model import LlamaShape
from fullshard.train.shapes import language_model
from tests.pure.test_plan import PLAIN

WAYS = ("none", "selective", "alternate", "whole", "none+host", "whole+host")


def _llama(layers: int = 10, **plan: Any) -> Program:
    program = language_model(LlamaShape(120, layers, 32, 4, 4, 64, 16, tie_embeddings=False), 16)
    if not plan:
        return program
    ranks = max(int(degree) for name, degree in plan.items() if name.endswith("degree"))
    return replace(program, parallelize=noted_by(Parallelism(**plan), ranks, note))


def _sizes(program: Program, *, tensor: int = 1, shared: bool = False, compute: str = "bfloat16") -> Sizes:
    def described(blocks: int) -> Callable[..., Model]:
        def made(samples: int, _: object, compute: str, alone: bool, ways: str | Sequence[str]) -> Model:
            sizes: dict[str, Any] = {"samples": samples, "compute": compute, "alone": alone, "recompute": ways}
            return describe(program, "model", blocks=blocks, tensor=tensor, shared=shared, **sizes)

        return made

    return Sizes(described(0), None, described(KEPT), None)


def _expect_proven(sizes: Sizes, ways: Sequence[str]) -> None:
    for way in ways:
        assert sizes.is_proven("bfloat16", way), way
        one, two = (sizes.model(n, "bfloat16", recompute=way) for n in (1, 2))
        for samples in (1, 2, 5):
            whole = one, scaled(steps_of(one, way), steps_of(two, way), samples)
            assert _are_equal(sizes.at(samples, "bfloat16", way), whole), (way, samples)


@pytest.mark.hang_after(300)
def test_six_blocks_stand_for_all_in_every_way_of_recomputation() -> None:
    _expect_proven(_sizes(_llama()), WAYS)


@pytest.mark.slow
@pytest.mark.hang_after(300)
@pytest.mark.parametrize(
    ("plan", "tensor"),
    [
        ({"tensor_parallel_degree": 2}, 2),
        ({"tensor_parallel_degree": 4, "enable_sequence_parallel": False}, 4),
        ({"context_parallel_degree": 2}, 1),
    ],
    ids=str,
)
def test_divided_layers_too(plan: dict[str, Any], tensor: int) -> None:
    sizes = _sizes(_llama(**plan), tensor=tensor, shared=tensor == 1)
    _expect_proven(sizes, ("none", "whole"))


class _Unlike(nn.Module):
    """Blocks of one class; those of `wide` have another inner width."""

    def __init__(self, wide: Sequence[int] = (), count: int = 12) -> None:
        super().__init__()
        width = [64 if i in wide else 32 for i in range(count)]
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, n), nn.ReLU(), nn.Linear(n, 8)) for n in width)
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x) * self.mask
        return x * self.scale


def _unlike(*wide: int) -> Program:
    def shard(model: Any, fully_shard: Callable[..., Any]) -> None:
        for block in model.blocks:
            fully_shard(block[0])
            fully_shard(block)
        fully_shard(model)

    return Program(lambda: _Unlike(wide), lambda m, x: m(x).square().mean(), lambda i: torch.ones(3, 8), shard=shard)


@pytest.mark.slow
def test_units_inside_of_blocks_and_parameters_after_them() -> None:
    _expect_proven(_sizes(_unlike()), ("none",))
    _expect_proven(_sizes(_unlike(0, 11)), ("none",))


@pytest.mark.sample(1)
@pytest.mark.parametrize("wide", [(2,), (3,), (5,), (9,)])
def test_blocks_that_are_not_alike_are_all_described(wide: tuple[int, ...]) -> None:
    sizes = _sizes(_unlike(*wide))
    assert not sizes.is_proven("bfloat16", "none")
    whole = sizes.model(1, "bfloat16")
    assert sizes.at(1, "bfloat16", "none") == (whole, steps_of(whole))


def test_few_blocks_are_described_whole() -> None:
    short = describe(_llama(6), "small", blocks=KEPT)
    assert short.cut is None and blocks_of(short) is None and len(short.units) == 7


@pytest.mark.slow
def test_a_search_describes_the_model_once_and_a_few_blocks_for_the_rest() -> None:
    counts: list[tuple[int, int]] = []

    def described(blocks: int) -> Callable[..., Model]:
        def made(samples: int, _: object, compute: str, alone: bool, ways: str | Sequence[str]) -> Model:
            counts.append((blocks, samples))
            return describe(_llama(), "model", samples=samples, compute=compute, recompute=ways, blocks=blocks)

        return made

    asked = Strategy(2, micro=4, compute="bfloat16", reduce="float32")
    few = Planner(described(0), PLAIN, budget=1e9, short=lambda degrees: described(KEPT))
    few.plan(asked)
    found = few.search(asked, meshes=False)
    assert counts == [(0, 4), (KEPT, 4), (KEPT, 1), (KEPT, 2)]
    whole = Planner(described(0), PLAIN, budget=1e9).search(asked, meshes=False)
    assert [(c.says, c.plan.seconds, c.plan.terms) for c in found] == [
        (c.says, c.plan.seconds, c.plan.terms) for c in whole
    ]
