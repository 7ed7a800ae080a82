"""The public surface beside torch's: names, signatures, defaults, error types. What differs is listed.

One process and a fake group: nothing here depends on values. Facts: torch 2.10 to 2.15.
"""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from tests.harness.behaviours import behaviour
from tests.harness.fake import fake_world
from tests.harness.implementations import FULLSHARD, TORCH, Implementation, for_each_implementation

INSTALLED = tuple(map(int, torch.__version__.split(".")[:2]))
# torch's FSDP2: its whole public surface is on every torch. The torch in which a name, an argument or a field came:
# older ones lack it, and that is all they may lack.
SINCE: dict[str, tuple[int, int]] = {
    "DataParallelMeshDims": (2, 12),
    "fully_shard(dp_mesh_dims)": (2, 12),
    "FSDPModule.set_symm_mem_for_comm": (2, 12),
    "FSDPModule.reset_iter_state": (2, 13),
    "FSDPModule.set_reduce_scatter_max_input_buffers": (2, 13),
    "FSDPModule.set_reduce_scatter_unused_params": (2, 13),
    "FSDPModule.set_separate_reduce_scatter_group": (2, 13),
    "MixedPrecisionPolicy.param_dtype_override_fn": (2, 15),
    "MixedPrecisionPolicy(param_dtype_override_fn)": (2, 15),
    "FSDPModule.finalize_backward": (2, 15),
    "FSDPModule.set_keep_unsharded_storage": (2, 15),
    "FSDPModule.set_manual_backward_finalization": (2, 15),
    "GradientReductionHandle": (2, 15),
}
# What no torch up to 2.15 has in its classes, and why ours have it.
BEYOND = {
    "FSDPModule.named_parameters": "refuses names of parameters that are full at the moment",
    "FSDPModule.set_communication": "the strategy of messages, of which torch has one",
    "FSDPModule.set_memory_budget": "limits in bytes, where torch counts units",
    "fully_shard(optional)": "units that only some ranks run, which torch's ranks all have to run",
    "FSDPModule.zero_grad": "clears gradients that wait for their reduction, which torch keeps",
}
# What differs in signature or default: (in which torch, why).
DIFFERENT: dict[str, tuple[Callable[[tuple[int, ...]], bool], str]] = {
    "FSDPModule._apply": (lambda version: version < (2, 15), "nn.Module's own, spelt out, as in torch from 2.15 on"),
}
# Cases of the tables below in which some torch does otherwise than the newest: (which, what it does).
OTHERWISE: dict[str, tuple[Callable[[tuple[int, ...]], bool], str]] = {
    "tied across units": (lambda version: version < (2, 12), "trains the two apart"),
    "reset_iter_state below the root": (lambda version: version < (2, 13), "has no such method"),
    "DataParallelMeshDims without names": (lambda version: version < (2, 12), "has no such class"),
    "symmetric memory without NCCL": (
        lambda version: version < (2, 12) or torch.distributed.is_nccl_available(),
        "has no such method, or believes a build with NCCL",
    ),
    "an output that is a view": (
        lambda version: version < (2, 13),
        "says nothing, and an edit in place is not noticed",
    ),
    "mp_policy of another type": (lambda version: version >= (2, 15), "refuses it too"),
}
# What stands in torch's class without being a function.
NOT_FUNCTIONS = {
    "_orig_cls_mro_index": "not a function; the same number",
    "__module__": "where it is defined",
    "__doc__": "each has its own",
    "__dict__": "made by Python",
    "__weakref__": "made by Python",
    "__annotations__": "of _orig_cls_mro_index",
    "__firstlineno__": "Python 3.13 and later",
    "__static_attributes__": "Python 3.13 and later",
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


def _members(name: str, value: Any) -> dict[str, Any]:
    """Each public thing of one export: functions and methods by signature, fields by default, properties."""
    if not inspect.isclass(value):
        return {name: _signature(value), **{f"{name}({each[0]})": each[1:] for each in _signature(value)}}
    found: dict[str, Any] = {name: None}
    if dataclasses.is_dataclass(value):
        found |= {f"{name}.{each.name}": each.default for each in dataclasses.fields(value)}
        found |= {f"{name}({each[0]})": each[1:] for each in _signature(value)}
    for each in {each for kind in value.__mro__[:-1] for each in vars(kind) if not each.startswith("_")}:
        member = inspect.getattr_static(value, each)
        kind = "property" if isinstance(member, property) else _signature(member) if callable(member) else None
        if kind is not None:
            found.setdefault(f"{name}.{each}", kind)
    return found


def _surface(namespace: Any) -> dict[str, Any]:
    names = sorted(set(torch_fsdp._fully_shard.__all__) | {name for name in SINCE if name.isidentifier()})
    found: dict[str, Any] = {}
    for name in names:
        if hasattr(namespace, name):
            found |= _members(name, getattr(namespace, name))
    return found


def _came_later(name: str) -> bool:
    """Whether the installed torch is older than `name`, or than the class that it is in."""
    return any(INSTALLED < SINCE.get(each, (0,)) for each in (name, name.split(".")[0].split("(")[0]))


def test_the_whole_surface() -> None:
    """Names, methods, arguments, kinds, defaults and fields, of what torch exports for FSDP2: all of the installed
    torch's are ours, and whatever else differs is listed, for the versions in which it does."""
    ours, theirs = _surface(fullshard), _surface(torch_fsdp)
    assert len(theirs) > 40
    assert not theirs.keys() - ours.keys()
    for name, since in SINCE.items():
        assert name in ours, f"{name}, which torch has since {since}"
        assert (name in theirs) is (INSTALLED >= since), f"{name}: listed as new in {since}"
    alone = {name for name in ours.keys() - theirs.keys() if not _came_later(name)}
    assert alone == set(BEYOND)
    unlike = {name for name in ours.keys() & theirs.keys() if not _equal(ours[name], theirs[name])}
    assert not unlike, [(ours[name], theirs[name]) for name in unlike]


def _equal(ours: Any, theirs: Any) -> bool:
    """But for arguments and fields that came later, which stand in the list by themselves."""
    if isinstance(ours, list):
        late = {"optional", *(() if INSTALLED >= (2, 12) else ("dp_mesh_dims",))}
        both = [[each for each in side if each[0] not in late] for side in (ours, theirs)]
        return [_without_later(each) for each in both[0]] == [_without_later(each) for each in both[1]]
    return bool(_without_later(ours) == _without_later(theirs))


def _without_later(value: Any) -> Any:
    """`value` without fields of policies that the installed torch lacks."""
    if isinstance(value, tuple):
        return tuple(_without_later(each) for each in value)
    if isinstance(value, dict):
        return {k: v for k, v in value.items() if INSTALLED >= SINCE.get(f"MixedPrecisionPolicy.{k}", (0,))}
    if isinstance(value, list):
        return [_without_later(each) for each in value]
    return value


def test_torch_exports_no_more_names() -> None:
    """Of FSDP2; `torch.distributed.fsdp` has FSDP1's beside them."""
    fsdp2 = set(torch_fsdp._fully_shard.__all__)
    assert len(fsdp2) >= 8 and all(hasattr(torch_fsdp, name) for name in fsdp2)
    assert fsdp2 <= set(fullshard.__all__), f"missing: {fsdp2 - set(fullshard.__all__)}"


@behaviour("signature and defaults: `{name}`", area="surface", torch="equal")
@pytest.mark.parametrize("name", ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"])
def test_signatures_of_functions(name: str) -> None:
    assert _equal(_signature(getattr(fullshard, name)), _signature(getattr(torch_fsdp, name)))


@behaviour("fields and defaults: `{name}`", area="surface", torch="equal")
@pytest.mark.parametrize("name", ["MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "DataParallelMeshDims"])
def test_policies_have_torch_s_fields_and_defaults(name: str) -> None:
    """But for fields that came later; before torch has the class, those of the list above."""
    ours, theirs = getattr(fullshard, name), getattr(torch_fsdp, name, None)
    found = [(f.name, f.default) for f in dataclasses.fields(ours) if not _came_later(f"{name}.{f.name}")]
    assert found == ([] if theirs is None else [(f.name, f.default) for f in dataclasses.fields(theirs)])


@behaviour("`isinstance` checks for torch's classes hold", area="surface")
@for_each_implementation
def test_instances_are_those_of_torch_s_classes(impl: Implementation, world: None) -> None:
    """Libraries ask that of policies and handles. The other way needs no check: torch's are accepted by content."""
    for name in ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"):
        assert isinstance(getattr(impl.namespace, name)(), getattr(torch_fsdp, name))
    assert isinstance(impl.namespace.CPUOffloadPolicy(), torch_fsdp.OffloadPolicy)
    handle = impl.fully_shard(nn.Linear(2, 2)).unshard(async_op=True)
    assert isinstance(handle, torch_fsdp.UnshardHandle) and isinstance(handle, impl.namespace.UnshardHandle)


@behaviour("`DataParallelMeshDims` takes a name or several", area="surface")
@for_each_implementation
def test_data_parallel_mesh_dims(impl: Implementation) -> None:
    if impl is TORCH and INSTALLED < SINCE["DataParallelMeshDims"]:
        assert not hasattr(torch_fsdp, "DataParallelMeshDims")
        return
    dims = impl.namespace.DataParallelMeshDims(shard=("dp", "cp"), replicate="pod")
    assert (dims.shard_names, dims.replicate_names) == (("dp", "cp"), ("pod",))
    assert impl.namespace.DataParallelMeshDims(replicate=("a", "b")).shard_names == ()
    assert dims == impl.namespace.DataParallelMeshDims(("dp", "cp"), "pod")


@behaviour(
    "`DataParallelMeshDims` is frozen", area="surface", torch="different", reason="torch's can be changed after its use"
)
def test_data_parallel_mesh_dims_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        fullshard.DataParallelMeshDims(shard="dp").shard = "cp"  # type: ignore[misc]


@behaviour("`MixedPrecisionPolicy` is frozen", area="surface")
@for_each_implementation
def test_mixed_precision_policy_is_frozen(impl: Implementation) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        impl.MixedPrecisionPolicy().param_dtype = torch.bfloat16


def _functions() -> list[str]:
    """Every function in torch's class, private and special ones too."""
    return sorted(name for name, value in vars(torch_fsdp.FSDPModule).items() if callable(value))


def test_all_of_torch_s_class_is_functions_and_what_is_listed() -> None:
    assert set(vars(torch_fsdp.FSDPModule)) <= set(_functions()) | set(NOT_FUNCTIONS)
    assert {"_apply", "_get_fsdp_state", "_set_unshard_async_op", "__new__"} <= set(_functions())


@pytest.mark.parametrize("name", _functions())
def test_methods(name: str) -> None:
    """No function of torch's class can be reached: each is ours, with torch's signature or a reason for another."""
    ours = vars(fullshard.FSDPModule).get(name)
    assert ours is not None, "would be torch's own method, which does not know our state"
    assert inspect.unwrap(getattr(ours, "__func__", ours)).__module__.startswith("fullshard.")
    same = _signature(ours) == _signature(vars(torch_fsdp.FSDPModule)[name])
    differs, _ = DIFFERENT.get(f"FSDPModule.{name}", (lambda _: False, ""))
    assert same != differs(INSTALLED), "differs from torch's, or is on a list and does not"


def test_a_sharded_module_reaches_ours(world: None) -> None:
    """By the order of its base classes: ours, that of the module where torch has it, and torch's behind all others."""
    linear = fullshard.fully_shard(nn.Linear(2, 2))
    order = type(linear).__mro__
    assert order[1:] == (fullshard.FSDPModule, nn.Linear, nn.Module, torch_fsdp.FSDPModule, object)
    # torch 2.10 has the number written where it is used.
    assert fullshard.FSDPModule._orig_cls_mro_index == getattr(torch_fsdp.FSDPModule, "_orig_cls_mro_index", 2)
    assert order[fullshard.FSDPModule._orig_cls_mro_index] is nn.Linear
    for name in _functions():
        owner = next(cls for cls in order if name in vars(cls))
        assert owner is fullshard.FSDPModule, f"{name} is that of {owner}"


@behaviour("modules carry the marks that dynamo, transformers and composable APIs look for", area="surface")
@for_each_implementation
def test_marks_for_others(impl: Implementation, world: None) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    impl.fully_shard(model[0])
    impl.fully_shard(model)
    for module in model.modules():
        assert module._is_fsdp_managed_module is True and module._fsdp_use_orig_params is True
    state = torch_fsdp.fully_shard.state  # type: ignore[attr-defined]
    assert state(model) is impl.fully_shard.state(model) is model._get_fsdp_state()  # type: ignore[attr-defined]
    assert state(model[0]) is not state(model) and state(model[1]) is None
    assert impl.fully_shard.state(model[1]) is None  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="fully_shard"):
        replicate(model)


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


def _run_a_list_as_root(impl: Implementation) -> None:
    modules = impl.fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)])
    modules[0](torch.ones(1, 2))


class _Streaming(nn.Linear):
    def stream(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        yield self(x)


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.high(self.low(x.bfloat16()).float())
        return out


class _View(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(-1)


def _run(impl: Implementation, module: nn.Module) -> None:
    impl.fully_shard(module)(torch.ones(2, 2)).sum().backward()


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
    "pickle": (pickle.PicklingError, lambda impl: pickle.dumps(impl.fully_shard(nn.Linear(2, 2)))),
    "no module": (TypeError, lambda impl: impl.fully_shard(1)),
    "a list is the root": (RuntimeError, _run_a_list_as_root),
    "a module twice in a list": (AssertionError, lambda impl: impl.fully_shard([nn.Linear(2, 2)] * 2)),
    "a list with a sharded module": (
        AssertionError,
        lambda impl: impl.fully_shard([impl.fully_shard(nn.Linear(2, 2)), nn.Linear(2, 2)]),
    ),
    "reshard_after_forward of another type": (
        ValueError,
        lambda impl: impl.fully_shard(nn.Linear(2, 2), reshard_after_forward="yes"),
    ),
    "prefetch of no list": (
        TypeError,
        lambda impl: impl.fully_shard(nn.Linear(2, 2)).set_modules_to_forward_prefetch(nn.Linear(2, 2)),
    ),
    "share_comm_ctx of a plain module": (ValueError, lambda impl: impl.namespace.share_comm_ctx([nn.Linear(2, 2)])),
    "DataParallelMeshDims without names": (ValueError, lambda impl: impl.namespace.DataParallelMeshDims()),
    "symmetric memory without NCCL": (
        RuntimeError,
        lambda impl: impl.fully_shard(nn.Linear(2, 2)).set_symm_mem_for_comm(),
    ),
    "sharded by the other implementation": (
        AssertionError,
        lambda impl: impl.fully_shard((FULLSHARD if impl is TORCH else TORCH).fully_shard(nn.Linear(2, 2))),
    ),
}


def _root_before_child(impl: Implementation) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    impl.fully_shard(model)
    impl.fully_shard(model[0])


# What both refuse, by another type: (torch's, ours, why).
OTHER_ERRORS: dict[str, tuple[type[Exception], type[Exception], str, Any]] = {
    "root sharded before its children": (
        TypeError,
        RuntimeError,
        "torch stumbles over a missing value; ours says in which order to call",
        _root_before_child,
    ),
    "an empty list": (IndexError, ValueError, "torch takes the first of none", lambda impl: impl.fully_shard([])),
    "a mesh of another type": (
        AttributeError,
        TypeError,
        "torch asks it for ndim",
        lambda impl: impl.fully_shard(nn.Linear(2, 2), mesh="mesh"),
    ),
}

# What torch takes without a word and without effect, or fails at later: (our error, why).
REFUSED_BY_US: dict[str, tuple[type[Exception], str, Any]] = {
    "a ModuleList in a list": (
        ValueError,
        "its forward never runs, so its parameters would be gathered when something else is",
        lambda impl: impl.fully_shard([nn.ModuleList([nn.Linear(2, 2)]), nn.Linear(2, 2)]),
    ),
    "ignored_params that are no parameters": (
        TypeError,
        "torch ignores them",
        lambda impl: impl.fully_shard(nn.Linear(2, 2), ignored_params={1}),
    ),
    "mp_policy of another type": (
        TypeError,
        "torch fails in the first forward",
        lambda impl: impl.fully_shard(nn.Linear(2, 2), mp_policy=torch.bfloat16),
    ),
    "an optimizer event of another type": (
        TypeError,
        "torch keeps it, and on a CPU nobody ever looks",
        lambda impl: impl.fully_shard(nn.Linear(2, 2)).set_post_optim_event("now"),
    ),
    "_set_unshard_async_op of another type": (
        TypeError,
        "torch takes any truth value",
        lambda impl: impl.fully_shard(nn.Linear(2, 2))._set_unshard_async_op(1),
    ),
    "a generator as forward method": (
        NotImplementedError,
        "its body runs after the call has returned and the weights are gone; torch wraps it nevertheless",
        lambda impl: impl.namespace.register_fsdp_forward_method(impl.fully_shard(_Streaming(2, 2)), "stream"),
    ),
}

# What torch refuses or warns of, and ours does: (torch's, why).
ACCEPTED_BY_US: dict[str, tuple[type[BaseException], str, Any]] = {
    "dtypes that differ within a unit": (
        AssertionError,
        "parameters of each dtype travel together",
        lambda impl: _run(impl, _Mixed()),
    ),
    "an output that is a view": (
        UserWarning,
        "what waits for its gradient survives an in-place edit",
        lambda impl: _run(impl, _View(2, 2)),
    ),
}


def _with_reasons(what: str, table: dict[str, tuple[Any, ...]]) -> list[Any]:
    """The cases of a table, each with its row of the page; the reason is the last but one of its values."""
    return [
        pytest.param(case, marks=behaviour(f"{what}: {case}", area="errors", torch="different", reason=values[-2]))
        for case, values in table.items()
    ]


@behaviour("refused, by the same type of error: {case}", area="errors")
@for_each_implementation
@pytest.mark.parametrize("case", ERRORS)
def test_error_types(case: str, impl: Implementation, world: None) -> None:
    error, action = ERRORS[case]
    if impl is TORCH and _does_otherwise(case):
        assert not isinstance(_raised(action), error), "listed as otherwise in this torch, and is not"
        return
    with pytest.raises(error) as caught:
        action(impl)
    # A subclass would still be caught by those who catch torch's; another family would not.
    assert not isinstance(caught.value, NotImplementedError) or error is NotImplementedError
    if impl is FULLSHARD:
        _says_what_to_do(caught.value)


def _does_otherwise(case: str) -> bool:
    return case in OTHERWISE and OTHERWISE[case][0](INSTALLED)


def _raised(action: Any) -> BaseException | None:
    """What torch's FSDP2 raises for it, if anything."""
    try:
        action(TORCH)
    except Exception as error:
        return error
    return None


def _says_what_to_do(error: BaseException) -> None:
    """Three parts: what was expected, what was found, what to do."""
    assert re.search(r"expected .+ found .+(; |\. ).+", str(error), re.S), f"not in three parts: {error}"


@for_each_implementation
@pytest.mark.parametrize("case", _with_reasons("refused, by another type of error", OTHER_ERRORS))
def test_other_error_types(case: str, impl: Implementation, world: None) -> None:
    theirs, ours, _, action = OTHER_ERRORS[case]
    with pytest.raises(theirs if impl is TORCH else ours) as caught:
        action(impl)
    if impl is FULLSHARD:
        _says_what_to_do(caught.value)


@for_each_implementation
@pytest.mark.parametrize("case", _with_reasons("refused at the call", REFUSED_BY_US))
def test_what_torch_accepts_and_we_refuse(case: str, impl: Implementation, world: None) -> None:
    error, _, action = REFUSED_BY_US[case]
    if impl is TORCH:
        assert isinstance(_raised(action), error) is _does_otherwise(case)
        return
    with pytest.raises(error) as caught:
        action(impl)
    _says_what_to_do(caught.value)


@for_each_implementation
@pytest.mark.parametrize("case", _with_reasons("accepted", ACCEPTED_BY_US))
def test_what_torch_refuses_and_we_accept(case: str, impl: Implementation, world: None) -> None:
    """Warnings are errors here."""
    error, _, action = ACCEPTED_BY_US[case]
    if impl is TORCH:
        assert isinstance(_raised(action), error) is not _does_otherwise(case)
    else:
        action(impl)


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
