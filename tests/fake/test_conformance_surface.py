"""The public surface beside torch's: names, signatures, defaults, error types. What differs is listed.

One process and a fake group: nothing here depends on values. Facts: torch 2.13.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from tests.harness.behaviours import behaviour
from tests.harness.fake import fake_world
from tests.harness.implementations import Implementation, for_each_implementation

# Names that torch exports for FSDP2 and this version does not have.
MISSING = {
    "DataParallelMeshDims": "only meaningful as dp_mesh_dims, which is refused so far",
    "share_comm_ctx": "pipeline parallelism is not built yet",
}
# Methods of torch's FSDPModule that this version refuses by name, each with NotImplementedError.
NOT_BUILT = {
    "set_allocate_memory_from_process_group_for_comm",
    "set_post_optim_event",
    "set_symm_mem_for_comm",
    "set_unshard_in_backward",
}


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(2):
        yield


def _signature(function: Any) -> list[tuple[str, Any, Any]]:
    """(name, kind, default) of every parameter; policies as (class name, fields), because each side has its own
    class.
    """

    def plain(default: Any) -> Any:
        if dataclasses.is_dataclass(default) and not isinstance(default, type):
            return type(default).__name__, dataclasses.asdict(default)
        return default

    return [(p.name, p.kind, plain(p.default)) for p in inspect.signature(function).parameters.values()]


# ---- names and signatures ------------------------------------------------------------------------------------


def test_names() -> None:
    fsdp2 = {
        "CPUOffloadPolicy",
        "DataParallelMeshDims",
        "FSDPModule",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "UnshardHandle",
        "fully_shard",
        "register_fsdp_forward_method",
        "share_comm_ctx",
    }
    assert all(hasattr(torch_fsdp, name) for name in fsdp2)
    assert fsdp2 - set(fullshard.__all__) == set(MISSING), "the list of what is missing is not what is missing"


@behaviour("signature and defaults: `{name}`", area="surface", torch="equal")
@pytest.mark.parametrize("name", ["fully_shard", "register_fsdp_forward_method"])
def test_signatures_of_functions(name: str) -> None:
    assert _signature(getattr(fullshard, name)) == _signature(getattr(torch_fsdp, name))


@behaviour("fields and defaults: `{name}`", area="surface", torch="equal")
@pytest.mark.parametrize("name", ["MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"])
def test_policies_have_torch_s_fields_and_defaults(name: str) -> None:
    ours, theirs = getattr(fullshard, name), getattr(torch_fsdp, name)
    assert [(f.name, f.default) for f in dataclasses.fields(ours)] == [
        (f.name, f.default) for f in dataclasses.fields(theirs)
    ]
    assert _signature(ours) == _signature(theirs)


@behaviour("`MixedPrecisionPolicy` is frozen", area="surface")
@for_each_implementation
def test_mixed_precision_policy_is_frozen(impl: Implementation) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        impl.MixedPrecisionPolicy().param_dtype = torch.bfloat16


def _methods() -> list[str]:
    return sorted(name for name, value in vars(torch_fsdp.FSDPModule).items() if callable(value) and name[0] != "_")


@pytest.mark.parametrize("name", _methods())
def test_methods(name: str) -> None:
    ours = vars(fullshard.FSDPModule).get(name)
    assert ours is not None, "would be torch's own method, which does not know our state"
    same = _signature(ours) == _signature(getattr(torch_fsdp.FSDPModule, name))
    assert same != (name in NOT_BUILT), "differs from torch's" if name not in NOT_BUILT else "is built: off the list"


@pytest.mark.parametrize("name", sorted(NOT_BUILT))
def test_methods_that_are_not_built_refuse(name: str, world: None) -> None:
    model = fullshard.fully_shard(nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match=name):
        getattr(model, name)(True)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("reshard_after_forward", 2),
    ],
)
def test_arguments_that_are_not_built_refuse(argument: str, value: Any, world: None) -> None:
    """Never ignored: torch would act on each of these."""
    with pytest.raises(NotImplementedError, match=argument):
        fullshard.fully_shard(nn.Linear(2, 2), **{argument: value})


@for_each_implementation
def test_the_axes_of_a_mesh_that_replicates_want_names(impl: Implementation) -> None:
    with fake_world(4), pytest.raises(AssertionError, match="mesh"):
        impl.fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2, 2)))


# ---- the class -----------------------------------------------------------------------------------------------


@behaviour("the class of the module is swapped in place, one class for each", area="surface")
@for_each_implementation
def test_the_class_is_swapped_in_place(impl: Implementation, world: None) -> None:
    linear, other = nn.Linear(3, 2), nn.Linear(2, 2)
    assert impl.fully_shard(linear) is linear
    impl.fully_shard(other)
    assert type(linear).__name__ == "FSDPLinear" and type(linear) is type(other)
    for cls in (impl.FSDPModule, torch_fsdp.FSDPModule, nn.Linear):
        assert isinstance(linear, cls), cls
    assert repr(linear).startswith("FSDPLinear(")


@behaviour("slicing a sharded `nn.Sequential` gives a plain one", area="surface")
@for_each_implementation
def test_slicing_a_sharded_container_gives_a_plain_one(impl: Implementation, world: None) -> None:
    model = impl.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    part = model[:2]
    assert type(part) is nn.Sequential and len(part) == 2


# ---- errors --------------------------------------------------------------------------------------------------


class _Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def _transposed() -> nn.Module:
    linear = nn.Linear(3, 2)
    linear.weight = nn.Parameter(torch.randn(2, 3).t().contiguous().t())
    return linear


def _shard_tied_across_units(impl: Implementation) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    for module in (*model, model):
        impl.fully_shard(module)
    model(torch.ones(1, 2))  # torch notices at the first forward, fullshard when the second unit is made


def _run_on_meta(impl: Implementation) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    impl.fully_shard(model)(torch.ones(1, 2))


def _run_child_before_root(impl: Implementation) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    impl.fully_shard(model[0])
    model[0](torch.ones(1, 2))
    impl.fully_shard(model)
    model(torch.ones(1, 2))


def _reset_below_root(impl: Implementation) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for module in (*model, model):
        impl.fully_shard(module)
    model(torch.ones(1, 2))
    model[0].reset_iter_state()


def _deepcopy(impl: Implementation) -> None:
    import copy

    copy.deepcopy(impl.fully_shard(nn.Linear(2, 2)))


def _prefetch_plain(impl: Implementation, method: str) -> None:
    model = impl.fully_shard(nn.Linear(2, 2))
    getattr(model, method)([nn.Linear(2, 2)])


ERRORS: dict[str, tuple[type[Exception], Any]] = {
    "ModuleList without forward": (ValueError, lambda impl: impl.fully_shard(nn.ModuleList([nn.Linear(2, 2)]))),
    "ModuleDict without forward": (ValueError, lambda impl: impl.fully_shard(nn.ModuleDict({"a": nn.Linear(2, 2)}))),
    "mesh of three axes": (
        ValueError,
        lambda impl: impl.fully_shard(
            nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
        ),
    ),
    "0-dim parameter": (ValueError, lambda impl: impl.fully_shard(_Scalar())),
    "non-contiguous parameter": (NotImplementedError, lambda impl: impl.fully_shard(_transposed())),
    "applied twice": (AssertionError, lambda impl: impl.fully_shard(impl.fully_shard(nn.Linear(2, 2)))),
    "deepcopy": (AssertionError, _deepcopy),
    "tied across units": (ValueError, _shard_tied_across_units),
    "meta at first forward": (RuntimeError, _run_on_meta),
    "child ran before its root": (RuntimeError, _run_child_before_root),
    "reset_iter_state below the root": (RuntimeError, _reset_below_root),
    "forward prefetch of a plain module": (
        ValueError,
        lambda impl: _prefetch_plain(impl, "set_modules_to_forward_prefetch"),
    ),
    "backward prefetch of a plain module": (
        ValueError,
        lambda impl: _prefetch_plain(impl, "set_modules_to_backward_prefetch"),
    ),
    "unknown forward method": (
        ValueError,
        lambda impl: impl.namespace.register_fsdp_forward_method(impl.fully_shard(nn.Linear(2, 2)), "no_such_method"),
    ),
    "set_reshard_after_forward of an int": (
        ValueError,
        lambda impl: impl.fully_shard(nn.Linear(2, 2)).set_reshard_after_forward(2),
    ),
}


@behaviour("refused, by the same type of error: {case}", area="errors")
@for_each_implementation
@pytest.mark.parametrize("case", ERRORS)
def test_error_types(case: str, impl: Implementation, world: None) -> None:
    error, action = ERRORS[case]
    with pytest.raises(error) as caught:
        action(impl)
    # A subclass would still be caught by those who catch torch's; another family would not.
    assert not isinstance(caught.value, NotImplementedError) or error is NotImplementedError


@behaviour("the text of the error for a 0-dim parameter", area="errors")
@for_each_implementation
def test_the_text_for_a_scalar_says_what_to_do(impl: Implementation, world: None) -> None:
    """Callers are known to match on this sentence."""
    with pytest.raises(ValueError, match="Change scale to a 1D tensor with numel equal to 1"):
        impl.fully_shard(_Scalar())


@behaviour("`register_fsdp_forward_method` on a plain module does nothing", area="surface")
@for_each_implementation
def test_register_forward_method_on_a_plain_module_does_nothing(impl: Implementation) -> None:
    linear = nn.Linear(2, 2)
    before = dict(vars(linear))
    impl.namespace.register_fsdp_forward_method(linear, "extra_repr")
    assert vars(linear) == before


def test_forward_methods_are_refused_so_far(world: None) -> None:
    """torch wraps the method; until this version does, it must say so and not leave the method unwrapped."""
    with pytest.raises(NotImplementedError, match="register_fsdp_forward_method"):
        fullshard.register_fsdp_forward_method(fullshard.fully_shard(nn.Linear(2, 2)), "extra_repr")
