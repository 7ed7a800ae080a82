"""Every private torch name this package uses: one place, with the reason and the versions it was tried on.

    name                                        why                                                     tried on
    torch._C._current_graph_task_id             "is a backward running in this thread" cannot be asked  2.13
                                                otherwise, and a flag of our own outlives an exception
    torch._C._autograd._get_current_graph_task_ whether a running backward is the last through its graph    2.13
    keep_graph
    Variable._execution_engine.queue_callback   the only notice that a whole backward is over (DDP too) 2.13
    DTensor(local, spec), ._local_tensor,       the public from_local takes nine times as long, and     2.13
    ._spec, DTensorSpec, TensorMeta             shards must stay views of one flat buffer, on the host too
    torch._C._autograd.*_saved_tensors_*        whether somebody else's hooks are active, which ours    2.13
                                                must not hide; push and pop from two callbacks
    torch._C._functorch.peek_interpreter_stack, gathers inside torch.func transforms write to tensors   2.13
    _functorch.pyfunctorch.temporarily_clear_   that no transform knows, and must not be transformed
    interpreter_stack
    ProcessGroup._allgather_base, .alltoall_*,  the wrappers in torch.distributed cost about ten        2.13
    ._reduce_scatter_base                       microseconds a call and rename these in 2.13
    ProcessGroup._start_coalescing,             several all-to-alls in one launch; the manager of torch,    2.13
    ._end_coalescing                            _coalescing_manager, wraps these two
    ProcessGroup._get_backend, Backend.         memory that a backend wants its messages in is had from 2.13
    supports_tensor_alloc, .allocate_tensor     it alone
    distributed_c10d._get_default_store         the one thing that all ranks share and that is no       2.13
                                                collective (comm/control.py)
    ProcessGroup(store, rank, size),            groups that can be replaced when a peer failed; those of    2.13
    ._register_backend, ._set_default_backend,  new_group live under names that may come again with
    ._set_group_name, ._device_types, .options  what older ones left in the store (comm/lines.py)
    tensor._post_accumulate_grad_hooks,         hooks of the sharded parameter are ours to run          2.13
    ._backward_hooks
    tensor._version, ._base                     was it written since; of which tensor is it a view      2.13
    Tensor._dtensor__new__                      a DTensor subclass with a shape and no data             2.13
                                                (PendingGrad)
    Module._call_impl, ._compiled_call_impl     the one place where a call of one module can be followed    2.13
                                                without hooks; dropped when a module is copied or pickled
    _dynamo.decorators.skip_code                code that stands between modules is none to compile     2.13
    Module._non_persistent_buffers_set          which buffers a state dict leaves out                   2.13
    Module._buffers                             names under which a forward may put its first tensor    2.13
    DeviceMesh._concatenate, ._flatten,         parameters of two and more dims of parallelism: axes    2.13
    ._get_root_mesh                             behind each other, several axes as one, and of one mesh?
    AsyncCollectiveTensor.trigger_wait          gradients of DTensors may be results under way          2.13
    placement_types._StridedShard               two axes cut the same dim, the left one last            2.13
    autograd._unsafe_preserve_version_counter   a full parameter that is filled again was not edited    2.13
    GradScaler._unscale_grads_                  overridden in api/grad_scaler.py: the one place that     2.13
                                                finds infs, for stepping with and without unscale_
    torch.distributed.fsdp.FSDPModule,          base classes, so that isinstance checks elsewhere hold  2.13
    MixedPrecisionPolicy and the like
    _composable.contract.STATE_KEY,             where pipeline schedules look for the state of a        2.13
    REGISTRY_KEY, fully_shard.__wrapped__       sharded module, and DDP for what was applied to it
    torch.distributed._composable.fsdp          the old path of fully_shard, which install() swaps too  2.13
    torch.autograd.profiler._is_profiler_enabled  ranges of a trace cost five microseconds each, so     2.13
                                                they are made only while somebody profiles
    module._is_fsdp_managed_module,             what dynamo and transformers ask a module               2.13
    ._fsdp_use_orig_params

torch's own FSDP2 is never called from here.
"""

from __future__ import annotations

import importlib
import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Variable
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

# The key of torch's states. Taken here, because `install` puts ours in the place of torch's function.
_STATE_OF: Any = cast(Any, torch_fsdp.fully_shard).__wrapped__

__all__ = [
    "TorchCPUOffloadPolicy",
    "TorchFSDPModule",
    "TorchMixedPrecisionPolicy",
    "TorchOffloadPolicy",
    "TorchUnshardHandle",
    "all_hold",
    "applied_apis",
    "base_of",
    "buffers_of",
    "call_instead",
    "called_now",
    "concatenated_mesh",
    "current_backward",
    "cut_dim",
    "default_store",
    "dtensor_like",
    "flattened_axes",
    "hand_over_hooks",
    "in_transform",
    "keeping_versions",
    "keeps_graph",
    "launch_together",
    "local_of",
    "mark_managed",
    "no_torch_function",
    "non_persistent_buffers",
    "pop_saved_tensor_hooks",
    "post_accumulate_grad_hooks",
    "pass_by",
    "profiling",
    "publish_state",
    "published_state",
    "push_saved_tensor_hooks",
    "queue_backward_callback",
    "root_mesh",
    "same_group",
    "same_spec",
    "saved_tensor_hooks_allowed",
    "set_local",
    "settled",
    "sharded_parameter",
    "strided_shard",
    "swappable",
    "take_spec",
    "tensor_hooks",
    "timeout_of",
    "dtensor_without_data",
    "top_saved_tensor_hooks",
    "version_of",
    "versions_of",
    "with_tensor_hooks",
    "without_transforms",
]


def publish_state(module: nn.Module, state: object) -> None:
    """Let torch's `fully_shard.state(module)` return `state`, and let composable APIs see that fully_shard was applied.

    torch's function is the key under which its own code looks, and is not called.
    """
    states = module.__dict__.setdefault(STATE_KEY, OrderedDict())
    states[_STATE_OF] = state
    module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())["fully_shard"] = RegistryItem()


def published_state(module: nn.Module) -> Any:
    """What torch's `fully_shard.state(module)` returns: the state that we, or torch's fully_shard, put there; or None.

    Asked for by code that imported our `fully_shard` under torch's name and meets a module that torch sharded.
    """
    return module.__dict__.get(STATE_KEY, {}).get(_STATE_OF)


def swappable(name: str) -> list[tuple[ModuleType, Any]]:
    """The modules of torch that show users its FSDP2 function `name`, each with what is there now."""
    # Imported now, so that its own import of the name does not happen while ours stands in the other module.
    old_path = importlib.import_module("torch.distributed._composable.fsdp")
    # The attribute of that name is the function; the module behind it is found by its full name alone.
    old_file = importlib.import_module("torch.distributed._composable.fsdp.fully_shard")
    modules: list[ModuleType] = [torch_fsdp, old_path, old_file]
    return [(module, vars(module)[name]) for module in modules if name in vars(module)]


def mark_managed(module: nn.Module) -> None:
    """Let dynamo and others know that the parameters of `module` come and go."""
    module._is_fsdp_managed_module = True  # type: ignore[assignment]
    module._fsdp_use_orig_params = True  # type: ignore[assignment]


def profiling() -> bool:
    """Whether a torch profiler, or emit_nvtx, records now."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def applied_apis(module: nn.Module) -> tuple[str, ...]:
    """The composable APIs, ours or torch's, that were applied to `module`: "fully_shard", "replicate", ..."""
    return tuple(module.__dict__.get(REGISTRY_KEY, ()))


def current_backward() -> int:
    """The number of the backward that is running in this thread, or -1. A nested one has a number of its own."""
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Whether the graph of the backward that is running in this thread stays (`retain_graph`)."""
    return bool(cast(Any, torch._C._autograd)._get_current_graph_task_keep_graph())


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward that is running in this thread ends without an exception."""
    Variable._execution_engine.queue_callback(callback)


# ---- DTensor ------------------------------------------------------------------------------------------------


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
    # Not by from_local: that moves a local tensor on the host to the device of the mesh.
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, local.dtype))
    parameter = nn.Parameter(DTensor.__new__(DTensor, local, spec, requires_grad=False), requires_grad=requires_grad)
    set_local(parameter, local)
    return parameter


def local_of(parameter: Tensor) -> Tensor:
    """The local tensor of a DTensor as it is held, without a view or autograd in between."""
    return parameter._local_tensor  # type: ignore[attr-defined,no-any-return]  # no cast: called often


def same_spec(a: Tensor, b: Tensor) -> bool:
    """Whether two DTensors share the object that says how they are placed, as those of `dtensor_like` do."""
    return a._spec is b._spec  # type: ignore[attr-defined]


def all_hold(parameters: Sequence[Tensor], locals_: Sequence[Tensor]) -> bool:
    """Whether each DTensor still holds the local tensor of the same position, the same object; no Python per item."""
    return all(map(operator.is_, map(_get_local, parameters), locals_))


_get_local = operator.attrgetter("_local_tensor")
_get_version = operator.attrgetter("_version")


def set_local(parameter: Tensor, local: Tensor) -> None:
    """Let a DTensor hold `local`, which must have the same shape and dtype."""
    cast(Any, parameter)._local_tensor = local


def take_spec(parameter: Tensor, other: Tensor) -> None:
    """Let the DTensor `parameter` say of itself what `other` does."""
    cast(Any, parameter)._spec = cast(Any, other)._spec


def dtensor_like(parameter: Tensor, local: Tensor) -> DTensor:
    """A DTensor with the spec of `parameter` and another local tensor: no checks, no communication, no copy."""
    # Not through the class: its initialiser does nothing, at the price of a compiler wrapper on every call.
    return DTensor.__new__(DTensor, local, cast(Any, parameter)._spec, requires_grad=False)


def settled(tensor: Tensor) -> Tensor:
    """`tensor`, or what it stands for when it is the result of an asynchronous functional collective; waits for it."""
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else cast(Tensor, wait())


def version_of(tensor: Tensor) -> int:
    """Counts the in-place writes to a tensor and its views, except those through `.data`."""
    return tensor._version


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """`version_of` each; no Python per item. Raises `RuntimeError` for one that was made in inference mode."""
    return list(map(_get_version, tensors))


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that `tensor` is a view of, or None."""
    return tensor._base


def dtensor_without_data(cls: type[DTensor], like: Tensor) -> DTensor:
    """An instance of the DTensor subclass `cls` with the spec of `like` and a local tensor nobody is to read."""
    local = torch.zeros((), dtype=like.dtype, device=like.device).expand(local_of(like).shape)
    made: DTensor = torch.Tensor._dtensor__new__(cls, local, cast(Any, like)._spec, requires_grad=False)
    return made


# For tensor subclasses that only intercept what reaches the dispatcher.
no_torch_function = torch._C._disabled_torch_function_impl


def post_accumulate_grad_hooks(parameter: Tensor) -> list[Callable[[Tensor], None]]:
    """The hooks registered with `register_post_accumulate_grad_hook`, in order."""
    hooks = cast(Any, parameter)._post_accumulate_grad_hooks
    return list(hooks.values()) if hooks else []


def tensor_hooks(parameter: Tensor) -> list[Callable[[Tensor], Any]]:
    """The hooks registered with `register_hook`, in order."""
    hooks = cast(Any, parameter)._backward_hooks
    return list(hooks.values()) if hooks else []


def with_tensor_hooks(parameters: Sequence[Tensor]) -> list[int]:
    """The positions of those that have hooks registered with `register_hook`; no Python per item that has none."""
    return [i for i, hooks in enumerate(map(_get_tensor_hooks, parameters)) if hooks]


_get_tensor_hooks = operator.attrgetter("_backward_hooks")


def hand_over_hooks(old: Tensor, new: Tensor) -> None:
    """Let the hooks of `old`, a leaf, be those of `new`: the same registries, so that handles still remove them."""
    for registry in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(old, registry)
        if hooks is not None:
            setattr(new, registry, hooks)


def called_now(module: nn.Module) -> Callable[..., Any]:
    """What a call of `module` calls: hooks and forward, or what `Module.compile` made of them."""
    compiled: Callable[..., Any] | None = module._compiled_call_impl
    return module._call_impl if compiled is None else compiled


def call_instead(module: nn.Module, function: Callable[..., Any]) -> None:
    """Let a call of `module` call `function`. Dynamo, which follows hooks and forward alone, does not see it."""
    module._compiled_call_impl = function


def pass_by(function: Callable[..., Any]) -> None:
    """Let dynamo run frames of `function`'s code as plain Python, and go on with what it calls.

    Unlike `torch.compiler.disable(recursive=False)` no wrapper is called, and no graph ends that it is inlined into.
    """
    # Not at the top: it imports torch's compiler.
    from torch._dynamo.decorators import skip_code

    skip_code(cast(Any, function).__code__)


def non_persistent_buffers(module: nn.Module) -> frozenset[str]:
    """Names of the module's own buffers that its state dict leaves out."""
    return frozenset(module._non_persistent_buffers_set)


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffers by name, None where one is registered without a tensor; the dict itself."""
    return module._buffers


def keeping_versions(*tensors: Tensor) -> AbstractContextManager[Any]:
    """Writes inside to `tensors` are not counted."""
    return cast("AbstractContextManager[Any]", torch.autograd._unsafe_preserve_version_counter(tuple(tensors)))


# ---- meshes and placements of several axes ------------------------------------------------------------------


def concatenated_mesh(parts: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of `parts` behind each other; they must be different axes of one root mesh."""
    return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(list(parts))


def flattened_axes(mesh: DeviceMesh) -> DeviceMesh:
    """One axis that has all ranks of `mesh` in order. Its process group is made once for each root mesh."""
    return mesh if mesh.ndim == 1 else mesh._flatten()


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` was sliced from, or itself."""
    return mesh._get_root_mesh()


def strided_shard(dim: int, pieces: int) -> Placement:
    """A shard of `dim` by an axis that cuts each of the `pieces` which axes to its right made of that dim."""
    return _StridedShard(dim, split_factor=pieces)


def cut_dim(placement: Placement) -> int | None:
    """The dim that `placement` shards, however; None when it does not."""
    return int(placement.dim) if isinstance(placement, (Shard, _StridedShard)) else None


# ---- transforms (torch.func) --------------------------------------------------------------------------------


def in_transform() -> bool:
    """Whether a transform (grad, vjp, jvp, vmap, ...) is running in this thread."""
    return _peek_transforms() is not None


_peek_transforms: Callable[[], object] = cast(Any, torch._C)._functorch.peek_interpreter_stack


def without_transforms() -> AbstractContextManager[Any]:
    """What runs inside is not transformed."""
    return cast("AbstractContextManager[Any]", temporarily_clear_interpreter_stack())


# ---- saved-tensor hooks -------------------------------------------------------------------------------------


def saved_tensor_hooks_allowed() -> bool:
    """Whether saved tensors of this thread may go through hooks now; not so inside functorch transforms."""
    return bool(cast(Any, torch._C._autograd)._saved_tensors_hooks_is_enabled())


def top_saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The (pack, unpack) pair through which saved tensors of this thread go now."""
    return cast("tuple[Any, Any] | None", torch._C._autograd._top_saved_tensors_default_hooks(True))


def push_saved_tensor_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensor_hooks() -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()


def allocate_for(process_group: ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for messages of `process_group`, (numel,): from its backend where that allocates, else torch's."""
    backend = process_group._get_backend(device)
    if backend.supports_tensor_alloc(device):
        return backend.allocate_tensor(numel, dtype=dtype, device=device)
    return torch.empty(numel, dtype=dtype, device=device)


def launch_together(
    process_group: ProcessGroup, device: torch.device, call: Callable[..., object], messages: Sequence[tuple[Any, ...]]
) -> Any:
    """The work of `call(*message)` for all of `messages`, which send over `process_group`: one launch. NCCL, and
    the fake group."""
    process_group._start_coalescing(device)
    try:
        for message in messages:
            call(*message)
    except BaseException:
        # Left open it would swallow whatever is sent next.
        process_group._end_coalescing(device)
        raise
    return process_group._end_coalescing(device)


def default_store() -> Any:
    """The store of the default process group, by a connection of our own: one that waits holds up nobody else."""
    return cast(Any, distributed_c10d._get_default_store()).clone()


def timeout_of(process_group: ProcessGroup) -> float:
    """Seconds after which the backend of `process_group` gives a message up; half an hour where it does not say."""
    for device in process_group._device_types:
        options = getattr(process_group._get_backend(device), "options", None)
        if hasattr(options, "_timeout"):
            return float(cast(Any, options)._timeout.total_seconds())
    return 1800.0


def same_group(like: ProcessGroup, ranks: Sequence[int], device: torch.device, name: str) -> ProcessGroup:
    """A process group of `ranks`, those of `like`, with connections of its own, known to nobody but the caller: it ends
    with its last reference. `name`: never used before, the same on all of its ranks. gloo and NCCL."""
    store = dist.PrefixStore(name, distributed_c10d._get_default_store())
    rank, size = like.rank(), len(ranks)
    made = cast(Any, ProcessGroup)(store, rank, size)
    kinds = ProcessGroup.BackendType
    if device.type == "cuda":
        options = cast(Any, like._get_backend(device)).options
        backend, kind = cast(Any, dist).ProcessGroupNCCL(store, rank, size, options), kinds.NCCL
    else:
        timeout = cast(Any, like._get_backend(device)).options._timeout
        backend, kind = cast(Any, dist).ProcessGroupGloo(store, rank, size, timeout), kinds.GLOO
    backend._set_sequence_number_for_group()
    made._register_backend(device, kind, backend)
    made._set_default_backend(kind)
    made._set_group_name(name)
    return cast(ProcessGroup, made)
