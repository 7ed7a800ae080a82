"""The expected peak of `fullshard.report` against the bytes of a step, counted where torch dispatches operations.

Units with a part frozen, units inside units, a root with parameters before and after its blocks, and settings that
change what is there at once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.counting import nccl_plan
from fullshard import MixedPrecisionPolicy, fully_shard, report
from fullshard.engine.unit import Shared
from fullshard.policy import use_options
from tests.harness.fake import fake_world
from tests.harness.planned import Real

WIDTH = 64


class Block(nn.Module):
    """`weights` matrices and a bias; the matrices at `frozen` are not trained."""

    def __init__(self, weights: int = 3, frozen: int = 0) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(weights))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        for weight in list(self.weights)[:frozen]:
            weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x @ weight
        return x + self.bias


class Decoder(nn.Module):
    """Blocks between two matrices of the root: that of the second is the first gradient of a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block(n) for n in (3, 4, 2))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


class Pair(nn.Module):
    """Two units inside of one, after a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.inner = nn.ModuleList((Block(2), Block(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner[1](self.inner[0](x @ self.first))  # type: ignore[no-any-return]


def _frozen_first() -> nn.Module:
    model = nn.Sequential(*(Block() for _ in range(5)))
    model[:3].requires_grad_(False)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[type[nn.Module], ...]]] = {
    "blocks": (lambda: nn.Sequential(*(Block(n) for n in (3, 5, 2, 6, 3))), (Block,)),
    "decoder": (Decoder, (Block,)),
    "inside each other": (lambda: nn.Sequential(Pair(), Block(3), Pair()), (Block, Pair)),
    "a part frozen": (lambda: nn.Sequential(*(Block(4, frozen=3) for _ in range(4))), (Block,)),
    "first units frozen": (_frozen_first, (Block,)),
}


@dataclass(frozen=True)
class Setting:
    """`messages`: of NCCL, or of gloo, whose buffers are not kept here. `calls`: on the model, before the step."""

    world: int = 4
    replicas: int = 1
    compute: torch.dtype | None = None
    reshard: bool | int | None = None
    messages: str = "nccl"
    options: dict[str, Any] = field(default_factory=dict)
    calls: tuple[Callable[[Any], object], ...] = ()
    # Each unit gathers the next two.
    lists: bool = False


SETTINGS = {
    "NCCL": Setting(),
    "gloo": Setting(messages="gloo"),
    "gloo, bf16": Setting(messages="gloo", compute=torch.bfloat16),
    "bf16": Setting(compute=torch.bfloat16),
    "ZeRO-2": Setting(reshard=False),
    "a part kept": Setting(reshard=2),
    "HSDP": Setting(replicas=2, compute=torch.bfloat16),
    "replicated": Setting(world=1, replicas=2),
    "one rank": Setting(world=1, compute=torch.bfloat16),
    "one collective each": Setting(options={"communication": "torch"}),
    "one send buffer": Setting(calls=(lambda model: model.set_reduce_scatter_max_input_buffers(1),)),
    "gradients limited": Setting(calls=(lambda model: model.set_memory_budget(gradients=90_000),)),
    "gathers limited": Setting(calls=(lambda model: model.set_memory_budget(prefetch=150_000),)),
    "resident": Setting(calls=(lambda model: model.set_memory_budget(resident=120_000),)),
    "kept storages": Setting(calls=(lambda model: model.set_keep_unsharded_storage(True),)),
    "full after backward": Setting(calls=(lambda model: model.set_reshard_after_backward(False),)),
    "lists of gathers": Setting(lists=True),
}


def _step(model: nn.Module) -> None:
    model(torch.ones(1, WIDTH, requires_grad=True)).float().sum().backward()


def _sharded(model: nn.Module, kinds: tuple[type[nn.Module], ...], setting: Setting) -> Any:
    reduce = None if setting.compute is None else torch.float32
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(setting.compute, reduce),
        "reshard_after_forward": setting.reshard,
    }
    if setting.replicas > 1:
        axes = (setting.replicas, setting.world)
        options["mesh"] = init_device_mesh("cpu", axes, mesh_dim_names=("replicate", "shard"))
    units: list[Any] = [module for module in reversed(list(model.modules())) if isinstance(module, kinds)]
    for unit in units:
        fully_shard(unit, **options)
    if setting.lists:
        # `units` is in the order of backward.
        for one, two, three in zip(units, units[1:], units[2:], strict=False):
            one.set_modules_to_backward_prefetch([two, three])
            three.set_modules_to_forward_prefetch([two, one])
    return fully_shard(model, **options)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", MODELS)
def test_the_expected_peak_is_what_is_counted(kind: str, name: str) -> None:
    (make, kinds), setting = MODELS[kind], SETTINGS[name]
    with ExitStack() as stack:
        stack.enter_context(fake_world(setting.world * setting.replicas))
        stack.enter_context(use_options(**setting.options))
        stack.enter_context(mock.patch("fullshard.engine.root.Shared", lambda *, keep: Shared(keep=False)))
        if setting.messages == "nccl":
            stack.enter_context(nccl_plan(0))
        model = _sharded(make(), kinds, setting)
        for calls in ((), setting.calls):
            _step(model)
            model.zero_grad()
            for call in calls:
                call(model)
        _step(model)
        model.zero_grad()
        gc.collect()
        expected = report(model)
        with Real() as counter:
            counter.mark("step")
            _step(model)
    # What was there before the count began.
    there = ("shards", "storage")
    before = sum(term.nbytes for term in expected.peak_terms if term.name.startswith(there))
    before += sum(unit.full_nbytes_live for unit in expected.units if not unit.keeps_storage)
    products = sum(parameter.ndim > 1 for parameter in make().parameters())
    # Each product and sum has a result that backward keeps and a gradient, of one row.
    activations = 2 * 2 * products * WIDTH * 4
    assert abs(counter.peak("step") - (expected.peak_nbytes - before)) <= activations, expected.peak_terms
