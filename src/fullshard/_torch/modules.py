"""Private APIs of modules and their hooks, and of DTensor."""

from __future__ import annotations

import copy
import functools
import importlib
import operator
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

# ---- modules ---------------------------------------------------------------------------------------------------------

# The key of torch's states. Read at import, because `install` replaces torch's function.
_STATE_OF: Any = cast(Any, torch_fsdp.fully_shard).__wrapped__


def publish_state(module: nn.Module, state: object) -> None:
    """Make torch's `fully_shard.state(module)` return `state`, and register fully_shard with the composable APIs.

    torch's function is only the lookup key; it is not called.
    """
    states = module.__dict__.setdefault(STATE_KEY, OrderedDict())
    states[_STATE_OF] = state
    module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())["fully_shard"] = RegistryItem()


def published_state(module: nn.Module) -> Any:
    """The state that torch's `fully_shard.state(module)` returns, published by fullshard or torch; or None.

    For code that imported fullshard's `fully_shard` under torch's name and meets a module that torch sharded.
    """
    return module.__dict__.get(STATE_KEY, {}).get(_STATE_OF)


def swappable(name: str) -> list[tuple[ModuleType, Any]]:
    """The torch modules that export the FSDP2 function `name`, each with its current value."""
    # Imported before the swap, or it would import the replaced function from the other module.
    old_path = importlib.import_module("torch.distributed._composable.fsdp")
    # The attribute of that name is the function, which shadows the submodule.
    old_file = importlib.import_module("torch.distributed._composable.fsdp.fully_shard")
    modules: list[ModuleType] = [torch_fsdp, old_path, old_file]
    return [(module, vars(module)[name]) for module in modules if name in vars(module)]


def mark_managed(module: nn.Module) -> None:
    """Tell dynamo and others that FSDP manages the parameters of `module`."""
    module._is_fsdp_managed_module = True  # type: ignore[assignment]
    module._fsdp_use_orig_params = True  # type: ignore[assignment]


class _Refusal(NamedTuple):
    """Raises when torch asks whether it is true."""

    text: str

    def __bool__(self) -> bool:
        raise ValueError(self.text)


def refuse_distribution(module: nn.Module, text: str) -> None:
    """Let torch's `distribute_module`, and so `parallelize_module`, raise a `ValueError` with `text` for `module`.

    Its first step is to look at this mark of its own. Without it, it fails at the first parameter that is a DTensor on
    another mesh, without a name, or cuts one on the same mesh again (torch 2.13).
    """
    module.__dict__.setdefault("_distribute_module_applied", _Refusal(text))


def left_out_of_ddp(module: nn.Module) -> frozenset[str]:
    """The names of parameters below `module` that DistributedDataParallel around it ignores."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def applied_apis(module: nn.Module) -> tuple[str, ...]:
    """The composable APIs applied to `module`, of fullshard or torch: "fully_shard", "replicate", ..."""
    return tuple(module.__dict__.get(REGISTRY_KEY, ()))


def run_first(module: nn.Module, state_dict_hook: RemovableHandle) -> None:
    """Move a state dict post-hook of `module` before those that were registered earlier."""
    module._state_dict_hooks.move_to_end(state_dict_hook.id, last=False)  # type: ignore[attr-defined]


def runs_last(module: nn.Module, hook: Callable[..., Any]) -> bool:
    """Whether no forward hook of `module` runs after `hook`, which is one."""
    return next(reversed(module._forward_hooks.values())) is hook


def non_persistent_buffers(module: nn.Module) -> frozenset[str]:
    """Names of the module's own buffers that its state dict leaves out."""
    return frozenset(module._non_persistent_buffers_set)


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffer dict (not a copy); None for a buffer registered without a tensor."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's own dict of children (not a copy), in which one module may have two names."""
    return module._modules


def copied_around(module: nn.Module, children: dict[str, nn.Module | None]) -> nn.Module:
    """A module like `module`, with other children and tables of its own; its attributes, parameters and buffers are the
    same objects."""
    made = copy.copy(module)
    for name, value in vars(module).items():
        if type(value) in (dict, OrderedDict, set):
            vars(made)[name] = copy.copy(value)
    made._modules = children
    return made


def calling_stage(module: nn.Module) -> dist.ProcessGroup | None:
    """The group of the pipeline's axis, if a stage of a pipeline around `module` called the caller's caller, or None.

    Read off the calling frames: stages have the attributes `submod` and `group`, and register nowhere. Locals of code
    that does not name `submod` are not asked for: before Python 3.13 that copies them into a dict which the frame
    keeps, and a training loop would keep the batch and the logits of its last micro-batch through the next one.
    """
    frame = sys._getframe(2)
    for _ in range(_FRAMES):
        stage = frame.f_locals.get("self") if "submod" in frame.f_code.co_names else None
        if stage is not None and getattr(stage, "submod", None) is module and hasattr(stage, "group"):
            group = stage.group
            return dist.group.WORLD if group is None else cast(dist.ProcessGroup, group)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


# How far up a stage is looked for.
_FRAMES = 3


# ---- outside ---------------------------------------------------------------------------------------------------------
# Keeps torch.compile out of the engine.
#
# Dynamo would otherwise trace hooks, with their messages and resized memory, into the graph of a block, or compile each
# function below them separately. So every callback that torch may call from compiled code goes through
# `outside_graphs`.

F = TypeVar("F", bound=Callable[..., object])


def call(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`: for `outside_graphs`, where the function differs from call to call."""
    return function(*args)


def outside_graphs(function: F) -> F:
    """`function` excluded from compilation with everything it calls, even if compiled code calls it.

    Wrap once: a call costs a third of a microsecond, wrapping a hundred times that. The first use in a process imports
    torch's compiler, like creating an optimizer does.
    """
    wrapped: F = torch.compiler.disable(function, reason="fullshard: messages and memory are no part of a graph")
    return wrapped


def remains_a_method(wrapper: F) -> F:
    """`wrapper`, which `functools.wraps` made of a function of `outside_graphs`: compiled as a method it keeps `self`.

    Torch notes on such a function which one it calls, and `functools.wraps` copies the note. From 2.11 on
    `torch.compile` ignores the copy; 2.10 follows it from the bound method to a function that is bound to nothing.
    """
    vars(wrapper).pop("_torchdynamo_orig_callable", None)
    return wrapper


def loads_as_torch(module: nn.Module) -> bool:
    """Whether `module` loads its own parameters and buffers, as torch does, and nothing else."""
    return type(module)._load_from_state_dict is nn.Module._load_from_state_dict


# ---- stages of a pipeline --------------------------------------------------------------------------------------------
# Imported where they run: torch's pipelines bring its compiler.


def stage_backward_input(
    ends: list[Tensor], gradients: list[Tensor] | None, inputs: list[Tensor], weights: Iterator[nn.Parameter]
) -> list[dict[str, Any]]:
    """Compute the gradients of `inputs` alone; returns what `stage_backward_weight` continues with."""
    from torch.distributed.pipelining._backward import stage_backward_input as own

    return own(ends, gradients, inputs, weights)[1]


def stage_backward_weight(weights: Iterator[nn.Parameter], groups: list[dict[str, Any]]) -> None:
    """Compute the gradients of `weights` that `stage_backward_input` left out."""
    from torch.distributed.pipelining._backward import stage_backward_weight as own

    own(weights, groups)


# ---- DTensor ---------------------------------------------------------------------------------------------------------

# ---- dtensor ---------------------------------------------------------------------------------------------------------
# Private DTensor APIs: construction, placements, and meshes of several axes.


# DTensor's error text for an operator with a plain tensor and a DTensor.
MIXED = "got mixed torch.Tensor and DTensor"


# Whether an operation in place that would have to change the placements raises: in torch from 2.12 on.
REFUSES_CHANGED_PLACEMENTS: bool = torch.torch_version.TorchVersion(torch.__version__) >= "2.12"


def sharded_parameter(
    local: Tensor,
    *,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> nn.Parameter:
    """A DTensor parameter whose local tensor *is* `local` (not a copy or a detached alias)."""
    # Not `from_local`: it would move a local tensor on the host to the device of the mesh.
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, local.dtype))
    parameter = nn.Parameter(DTensor.__new__(DTensor, local, spec, requires_grad=False), requires_grad=requires_grad)
    set_local(parameter, local)
    return parameter


# The local tensor of a DTensor itself, without a view or autograd. A C function: called for each parameter of a step.
local_of = cast("Callable[[Tensor], Tensor]", operator.attrgetter("_local_tensor"))

# The spec of a DTensor: one object for all that `dtensor_like` made of a parameter.
spec_of = cast("Callable[[Tensor], Any]", operator.attrgetter("_spec"))

# A DTensor of a local tensor and a spec in its dtype. A C function where torch's is one.
dtensor_of = cast("Callable[[Tensor, Any], DTensor]", partial(DTensor.__new__, DTensor, requires_grad=False))


def set_local(parameter: Tensor, local: Tensor) -> None:
    """Replace the local tensor of a DTensor by `local`, which must have the same shape and dtype."""
    cast(Any, parameter)._local_tensor = local


def dtensor_like(parameter: Tensor, local: Tensor) -> DTensor:
    """A DTensor with the spec of `parameter` and another local tensor: no checks, no communication, no copy."""
    spec = spec_of(parameter)
    # Not `DTensor(...)`: its `__init__` does nothing but costs a compiler wrapper on every call.
    return dtensor_of(local, spec if spec.tensor_meta.dtype is local.dtype else _spec_in(spec, local.dtype))


def _spec_in(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """`spec` in another dtype."""
    meta = spec.tensor_meta
    assert meta is not None
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta._replace(dtype=dtype))


def settled(tensor: Tensor) -> Tensor:
    """`tensor`; if it is the result of an asynchronous functional collective, wait and return the plain tensor."""
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else cast(Tensor, wait())


def dtensor_without_data(cls: type[DTensor], like: Tensor, dtype: torch.dtype) -> DTensor:
    """An instance of the DTensor subclass `cls` with the spec of `like` in `dtype`, and a dummy local tensor.
    Operations on it go to the `__torch_dispatch__` of `cls`."""
    local = torch.empty((), dtype=dtype, device=like.device).expand(local_of(like).shape)
    spec = spec_of(like)
    if spec.tensor_meta.dtype is not dtype:
        spec = _spec_in(spec, dtype)
    asked = _subclasses_are_asked(spec, local)
    if not asked:
        local = local.as_subclass(_Local)
    made: DTensor = torch.Tensor._dtensor__new__(cls, local, spec, requires_grad=False)
    if not asked:
        cast(Any, local).owner = weakref.ref(made)
    return made


# Whether operations on a subclass of DTensor go to its own `__torch_dispatch__`. Up to 2.11 torch takes each for
# a DTensor. None before the trial.
_asked: bool | None = None


def _subclasses_are_asked(spec: DTensorSpec, local: Tensor) -> bool:
    """Whether they are, by a trial, once in a process, which active dispatch modes do not see."""
    global _asked
    if _asked is None:
        with _disable_current_modes():
            probe = torch.Tensor._dtensor__new__(_Probe, local, spec, requires_grad=False)
            _asked = torch.neg(probe) is probe
    return _asked


class _Probe(DTensor):
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class _Local(Tensor):
    """A dummy local tensor that hands every operation to the DTensor whose it is, for a torch that does not ask that.
    `owner`: a weak reference, or there would be a circle for each placeholder."""

    owner: Callable[[], DTensor | None]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def owners(value: Any) -> Any:
            if isinstance(value, _Local):
                found = value.owner()
                if found is None:
                    raise RuntimeError(f"{func}: expected a gradient, found the rest of a placeholder that was freed")
                handed[id(found)] = value
                return found
            return type(value)(map(owners, value)) if isinstance(value, (list, tuple)) else value

        handed: dict[int, Tensor] = {}
        given, named = owners(args), {name: owners(value) for name, value in (kwargs or {}).items()}
        first = next(iter(handed.values()))
        made = cast(Any, type(cast(Any, first).owner())).__torch_dispatch__(func, types, given, named)
        return handed.get(id(made), made)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def concatenated_mesh(parts: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the concatenated axes of `parts`, which must be different axes of meshes over the same ranks."""
    return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(list(parts))


def can_be_one_mesh(first: DeviceMesh, second: DeviceMesh) -> bool:
    """Whether `concatenated_mesh` takes both: their root meshes, which need not be the same, are over the same ranks,
    and no two axes are along the same ranks."""
    roots = root_mesh(first), root_mesh(second)
    if roots[0].device_type != roots[1].device_type or not torch.equal(*(r.mesh.flatten() for r in roots)):
        return False
    try:
        concatenated_mesh([first, second])
    except RuntimeError:
        return False
    return True


def flattened_axes(mesh: DeviceMesh, name: str | None = None) -> DeviceMesh:
    """`mesh` flattened to one axis, in rank order, under `name`. Its process group is created once per root mesh."""
    return mesh if mesh.ndim == 1 else mesh._flatten(name)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` was sliced from, or itself."""
    return mesh._get_root_mesh()


def strided_shard(dim: int, pieces: int) -> Placement:
    """A shard of `dim` on an axis that splits each of the `pieces` made by the axes to its right."""
    return _StridedShard(dim, split_factor=pieces)


def cut_dim(placement: Placement) -> int | None:
    """The dim that `placement` shards, strided or not; None if it is no shard."""
    return int(placement.dim) if isinstance(placement, (Shard, _StridedShard)) else None


# ---- operations ------------------------------------------------------------------------------------------------------
# Private names about operations and nodes, for those who watch all of them (plan/facts.py).


# The node that runs in the backward of this thread, or None.
current_node: Callable[[], Any] = torch._C._current_autograd_node

# The number that the next node of a forward in this thread gets.
next_node_number: Callable[[], int] = cast(Any, torch.autograd)._get_sequence_nr


def node_number(node: Any) -> int:
    """The place of `node` in the order in which forwards made nodes; -1 for the accumulation of a gradient."""
    number = int(node._sequence_nr())
    return -1 if number >= 1 << 62 else number


def operation_name(operation: Any) -> str:
    """Namespace and name of an operation that torch dispatches: "aten.mm"."""
    return str(operation._schema.name).replace("::", ".")


def is_write(operation: Any) -> bool:
    """Whether the operation writes to one of its arguments."""
    return bool(operation._schema.is_mutable)


def written(operation: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yields the tensors that the operation writes to."""
    for place, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, Tensor))


def overloads(operation: Any) -> Any:
    """The operation without the choice of an overload: `torch.ops.aten.mm`."""
    return operation._overloadpacket


def storage_key(storage: torch.UntypedStorage) -> int:
    """The same for all tensors of a storage, while it is there."""
    return int(storage._cdata)


def without_torch_functions() -> Any:
    """A context in which `__torch_function__` is not asked."""
    return torch._C.DisableTorchFunction()


def is_bfloat16_in_onednn() -> bool:
    """Whether oneDNN has its layers in bfloat16 on this CPU."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def asked_once(function: Any) -> Any:
    """`function` of torch, for the mode that was asked about it and asks it again. Such functions ask modes before
    anything else, and would ask this one for ever: their code, without that question."""
    unasked = {name: lambda *_: False for name in ("has_torch_function", "has_torch_function_unary")}
    return types.FunctionType(
        function.__code__,
        function.__globals__ | unasked,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def attention_for_cpu(query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Any, scale: Any) -> Tensor:
    """Fused attention: what torch takes on a CPU, and with shapes alone."""
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )[0]
    return out
