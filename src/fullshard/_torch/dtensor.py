"""Private DTensor APIs, and the operations that torch runs on many tensors at once."""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

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
