"""Two implementations of one interface, torch's FSDP2 and fullshard: a conformance test must pass for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor

import fullshard
from tests.harness.models import CASES, seeded
from tests.harness.threads import WORLD, run_ranks


@dataclass(frozen=True)
class Implementation:
    """`namespace` holds the public names; `clip` clips gradients of parameters that this implementation sharded."""

    name: str
    namespace: Any
    clip: Callable[..., torch.Tensor]

    @property
    def fully_shard(self) -> Callable[..., Any]:
        return self.namespace.fully_shard

    @property
    def FSDPModule(self) -> type:
        return self.namespace.FSDPModule

    @property
    def MixedPrecisionPolicy(self) -> Callable[..., Any]:
        return self.namespace.MixedPrecisionPolicy

    def reduces_in(self, compute: torch.dtype, storage: torch.dtype) -> torch.dtype:
        """What `reduce_dtype=None` means: from torch 2.15 on the dtype of the parameters, before that of compute. The
        field that came with the change tells which."""
        named = {field.name for field in fields(self.namespace.MixedPrecisionPolicy)}
        return storage if "param_dtype_override_fn" in named else compute

    def __repr__(self) -> str:
        return self.name


TORCH = Implementation("torch", torch_fsdp, torch.nn.utils.clip_grad_norm_)
FULLSHARD = Implementation("fullshard", fullshard, fullshard.clip_grad_norm_)

# `def test_x(impl): ...` under this mark runs once for each.
for_each_implementation = pytest.mark.parametrize("impl", [TORCH, FULLSHARD], ids=repr)
# Two ranks always; one and four, which differ in no code path of their own that two ranks do not take, in the full run.
each_world = pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


class Probe(nn.Module):
    """A linear that notes, each time it runs, what its weight and its input are at that moment."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seen: list[tuple[Any, ...]] = []  # (type, shape and dtype of the weight, dtype of the input)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight
        self.seen.append((type(weight), tuple(weight.shape), weight.dtype, x.dtype))
        return torch.tanh(self.linear(x))


def probes(depth: int = 3) -> nn.Sequential:
    """`depth` probes in a row, the same on every rank."""
    model = seeded(lambda: nn.Sequential(*(Probe() for _ in range(depth))))
    assert isinstance(model, nn.Sequential)
    return model


def sharded(impl: Implementation, model: nn.Module, **options: Any) -> Any:
    """Every child as a unit, then the model."""
    for child in model.children():
        impl.fully_shard(child, **options)
    return impl.fully_shard(model, **options)


def kinds(model: nn.Module) -> set[type]:
    """Whether the registered parameters are DTensors (sharded), plain ones (full), or both."""
    return {DTensor if isinstance(p, DTensor) else nn.Parameter for p in model.parameters()}


def run(fn: Callable[..., Any], impl: Implementation, *, world: int = WORLD) -> list[Any]:
    """`fn(rank, impl)` on `world` ranks that are threads; by default any number will do."""
    return run_ranks(world, fn, impl)
