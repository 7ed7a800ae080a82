"""A field of a policy or of another options object that fullshard does not read is an error, never ignored.

Made-up classes of a future torch: subclasses of the installed ones, and classes of the same names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, make_dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fullshard
from tests.harness.fake import fake_world


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(2):
        yield


@dataclass(frozen=True)
class MixedPrecisionPolicy(torch_fsdp.MixedPrecisionPolicy):
    stochastic: bool = False
    seeds: tuple[int, ...] = field(default_factory=tuple)


@dataclass(frozen=True, kw_only=True)
class Required(torch_fsdp.MixedPrecisionPolicy):
    stochastic: bool


@dataclass
class CPUOffloadPolicy(torch_fsdp.CPUOffloadPolicy):
    only: tuple[str, ...] = ()


@dataclass
class DiskOffloadPolicy(torch_fsdp.OffloadPolicy):
    """A kind of offload that does not exist yet."""


@dataclass
class OffloadPolicy(torch_fsdp.OffloadPolicy):
    """The installed base class, with a field that may come."""

    keep: int = 0


@dataclass(frozen=True)
class DataParallelMeshDims(fullshard.DataParallelMeshDims):
    context: str | None = None


class ByContent(NamedTuple):
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    loss_dtype: torch.dtype | None = None


class Slotted:
    __slots__ = ("amplify", "mesh", "placement")

    def __init__(self, amplify: int) -> None:
        self.placement, self.mesh, self.amplify = Shard(0), None, amplify


def _attribute(policy: Any, **values: Any) -> Any:
    for name, value in values.items():
        object.__setattr__(policy, name, value)
    return policy


def _plain() -> SimpleNamespace:
    return SimpleNamespace(param_dtype=None, reduce_dtype=None, output_dtype=None, cast_forward_inputs=True)


POLICY = torch_fsdp.MixedPrecisionPolicy
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "a policy's": ("mp_policy.stochastic", {"mp_policy": MixedPrecisionPolicy(stochastic=True)}),
    "a policy's, made by a factory": ("mp_policy.seeds", {"mp_policy": MixedPrecisionPolicy(seeds=(1,))}),
    "a policy's without a default": ("mp_policy.stochastic", {"mp_policy": Required(stochastic=False)}),
    "set on the object": ("mp_policy.buffer_dtype", {"mp_policy": _attribute(POLICY(), buffer_dtype=torch.float32)}),
    "a policy's, accepted by content": ("mp_policy.loss_dtype", {"mp_policy": ByContent(loss_dtype=torch.float32)}),
    "of a namespace": ("mp_policy.fast", {"mp_policy": _attribute(_plain(), fast=True)}),
    "an offload policy's": ("offload_policy.only", {"offload_policy": CPUOffloadPolicy(only=("weight",))}),
    "the base class's": ("offload_policy.keep", {"offload_policy": OffloadPolicy(keep=1)}),
    "another kind of offload": ("offload_policy: .* another kind", {"offload_policy": DiskOffloadPolicy()}),
    "of mesh dims": ("dp_mesh_dims.context", {"dp_mesh_dims": DataParallelMeshDims("dp", context="cp")}),
    "of a placement": ("shard_placement_fn.amplify", {"shard_placement_fn": lambda _: Slotted(2)}),
    "an argument": ("unexpected keyword argument 'prefetch'", {"prefetch": 2}),
}


@pytest.mark.parametrize("function", ["fully_shard", "replicate"])
@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_by_its_name(case: str, function: str) -> None:
    name, arguments = REFUSED[case]
    if function == "replicate" and "shard_placement_fn" in arguments:
        name = "unexpected keyword argument 'shard_placement_fn'"
    if function == "replicate" and "dp_mesh_dims" in arguments:
        arguments = {"dp_mesh_dims": DataParallelMeshDims(replicate="dp", context="cp")}
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=name) as caught:
        getattr(fullshard, function)(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), **arguments)
    assert type(model) is nn.Linear
    if "unexpected" not in name:
        assert "expected" in str(caught.value) and "; " in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
        {"mp_policy": ByContent()},
        {"mp_policy": _plain()},
        {"offload_policy": CPUOffloadPolicy()},
        {"offload_policy": OffloadPolicy()},
    ],
    ids=lambda given: type(next(iter(given.values()))).__name__,
)
def test_defaults_are_taken(arguments: dict[str, Any]) -> None:
    """What is at its default asks for nothing."""
    fullshard.fully_shard(nn.Linear(2, 2), **arguments)


def test_torch_s_own_objects_are_taken() -> None:
    """With every field that the installed torch has."""

    def keep(parameter: nn.Parameter) -> torch.dtype:
        return parameter.dtype

    named = {each.name for each in fields(POLICY)}
    own = {"param_dtype_override_fn": keep} if "param_dtype_override_fn" in named else {}
    policy = POLICY(torch.bfloat16, torch.float32, torch.float32, False, **own)
    model = fullshard.fully_shard(
        nn.Linear(2, 2), mp_policy=policy, offload_policy=torch_fsdp.CPUOffloadPolicy(pin_memory=False)
    )
    found = fullshard.report(model).units[0]
    assert found.compute_dtypes == (("float32",) if own else ("bfloat16",))


def test_a_made_up_field_of_torch_s_own_class() -> None:
    """As if the next torch had it: no subclass in between."""
    made = make_dataclass(
        "MixedPrecisionPolicy",
        [*((each.name, Any, each.default) for each in fields(POLICY)), ("loss_dtype", Any, None)],
        frozen=True,
    )
    fullshard.fully_shard(nn.Linear(2, 2), mp_policy=made())
    with pytest.raises(TypeError, match="mp_policy.loss_dtype: expected the fields cast_forward_inputs"):
        fullshard.fully_shard(nn.Linear(2, 2), mp_policy=made(loss_dtype=torch.float32))
