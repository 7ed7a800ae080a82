"""All private torch names that this package uses, with the reason and the tested torch version.

    name                                        why                                                     tried on
    torch._C._current_graph_task_id             no public way to ask whether a backward is running in   2.13
                                                this thread; an own flag would survive an exception
    torch._C._autograd._get_current_graph_task_ whether a running backward is the last through its graph    2.13
    keep_graph
    Variable._execution_engine.queue_callback   the only notice of the end of a backward (DDP uses it)  2.13
    DTensor(local, spec), ._local_tensor,       the public from_local takes nine times as long, and     2.13
    ._spec, DTensorSpec, TensorMeta             shards must stay views of one flat buffer, on the host too
    torch._C._autograd.*_saved_tensors_*        detect other active hooks, which must not be hidden;    2.13
                                                push and pop from two callbacks
    torch._C._functorch.peek_interpreter_stack, gathers inside torch.func transforms must not be        2.13
    _functorch.pyfunctorch.temporarily_clear_   transformed: they write tensors unknown to transforms
    interpreter_stack
    ProcessGroup._get_backend, Backend.         only the backend can allocate registered message        2.13
    supports_tensor_alloc, .allocate_tensor     memory
    distributed_c10d._get_default_store         communication between all ranks without a collective    2.13
                                                (guard/watch.py)
    ProcessGroup(store, rank, size),            groups that can be replaced after a peer failed; names  2.13
    ._register_backend, ._set_default_backend,  of new_group may recur and meet leftovers of older
    ._set_group_name, ._device_types, .options  groups in the store (comm/data_group.py)
    ProcessGroup.bound_device_id                groups of some ranks, of which new_group would make     2.13
                                                splits of the default group (comm/group.py)
    _C._distributed_c10d._dump_fr_trace_json,   name the user's collective in which a rank hangs: read  2.13
    ProcessGroup._get_sequence_number_for_      while it waits, so nothing is wrapped (guard/watch.py)
    group, distributed_c10d._world.pg_names
    tensor._post_accumulate_grad_hooks,         the engine runs the hooks of sharded parameters         2.13
    ._backward_hooks
    tensor._has_grad_dtype_override             a grad_dtype that was set to the tensor's own dtype     2.15 on
    tensor._version, ._base                     detect writes; find the base of a view                  2.13
    Tensor._dtensor__new__                      a DTensor subclass with a shape and no data             2.13
                                                (PendingGrad)
    Module._non_persistent_buffers_set          which buffers a state dict leaves out                   2.13
    Module._load_from_state_dict                which modules save more than they load (checkpoint/state.py) 2.13
    Module._buffers                             buffers registered as None, which forward may fill      2.13
    DeviceMesh._concatenate, ._flatten,         parameters with several parallel dims: concatenate and  2.13
    ._get_root_mesh                             flatten axes, check for a common root mesh
    AsyncCollectiveTensor.trigger_wait          gradients of DTensors may be in flight                  2.13
    placement_types._StridedShard               two axes shard the same dim, the left one last          2.13
    autograd._unsafe_preserve_version_counter   an all-gather into a full parameter is not an edit      2.13
    GradScaler._unscale_grads_                  overridden in api/clip.py: the only place that          2.13
                                                finds infs, for steps with and without unscale_
    torch.distributed.fsdp.FSDPModule,          base classes, so that isinstance checks elsewhere hold  2.13
    MixedPrecisionPolicy and the like
    _composable.contract.STATE_KEY,             where pipeline schedules look for the state of a        2.13
    REGISTRY_KEY, fully_shard.__wrapped__       sharded module, and DDP for applied composable APIs
    PipelineStage.submod, .group                which axis a sharded stage's norm is summed over; stages    2.13
                                                register nowhere, so the calling frames are read
    torch.distributed._composable.fsdp          the old path of fully_shard, which install() swaps too  2.13
    torch.autograd.profiler._is_profiler_enabled  profiler ranges cost five microseconds each, so they  2.13
                                                are made only while a profiler is active
    torch._C._accelerator_getStream             asked with each report of a step on a device            2.13
    OpOverload._schema                          which operations of a sharded parameter return a view   2.13
    _C._current_autograd_node, Node.            whose backward an operation belongs to, on the tape of  2.13
    _sequence_nr, autograd._get_sequence_nr     a step (plan/facts.py); without hooks on the model
    OpOverload._overloadpacket,                 the operations of a step and the storages that they     2.13
    UntypedStorage._cdata,                      make (plan/facts.py)
    torch.utils._python_dispatch
    aten._scaled_dot_product_flash_attention_   fused attention on the meta device                      2.13
    for_cpu, _C.DisableTorchFunction
    torch.testing._internal.distributed.fake_pg layouts at any world size in one process (groups.py)      2.13
    module._is_fsdp_managed_module,             attributes that dynamo and transformers check           2.13
    ._fsdp_use_orig_params

This package never calls torch's own FSDP2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed.fsdp
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from .autograd import (
    base_of,
    current_backward,
    grad_dtype_of,
    gradient_versions,
    hand_over_hooks,
    in_transform,
    keeping_versions,
    keeps_graph,
    no_torch_function,
    pop_saved_tensor_hooks,
    post_accumulate_grad_hooks,
    profiling,
    push_saved_tensor_hooks,
    queue_backward_callback,
    saved_tensor_hooks_allowed,
    tensor_hooks,
    top_saved_tensor_hooks,
    version_of,
    versions_of_gradient,
    with_tensor_hooks,
    without_transforms,
)
from .dtensor import (
    MIXED,
    TorchDispatchMode,
    attention_for_cpu,
    concatenated_mesh,
    current_node,
    cut_dim,
    dtensor_like,
    dtensor_without_data,
    flattened_axes,
    is_write,
    local_of,
    next_node_number,
    node_number,
    operation_name,
    overloads,
    root_mesh,
    same_spec,
    set_local,
    settled,
    sharded_parameter,
    storage_key,
    strided_shard,
    take_spec,
    without_torch_functions,
)
from .groups import (
    NcclWatchdog,
    Recorded,
    active_collectives,
    allocate_for,
    backend_of,
    default_store,
    error_of,
    fake_group,
    issued_by_group,
    known_groups,
    nccl_watchdog,
    new_group,
    same_group,
    timeout_of,
)
from .modules import (
    applied_apis,
    buffers_of,
    children_of,
    loads_as_torch,
    mark_managed,
    non_persistent_buffers,
    publish_state,
    published_state,
    refuse_distribution,
    run_first,
    swappable,
)
from .streams import capturing, current_stream_of, is_capturing_elsewhere

if TYPE_CHECKING:

    class TorchGradientReductionHandle: ...

else:
    # torch has it from 2.15 on: handles are then instances of it.
    TorchGradientReductionHandle = getattr(torch.distributed.fsdp, "GradientReductionHandle", object)

__all__ = [
    "MIXED",
    "NcclWatchdog",
    "Recorded",
    "TorchCPUOffloadPolicy",
    "TorchDispatchMode",
    "TorchFSDPModule",
    "TorchGradientReductionHandle",
    "TorchMixedPrecisionPolicy",
    "TorchOffloadPolicy",
    "TorchUnshardHandle",
    "active_collectives",
    "allocate_for",
    "applied_apis",
    "attention_for_cpu",
    "backend_of",
    "base_of",
    "buffers_of",
    "capturing",
    "children_of",
    "concatenated_mesh",
    "current_backward",
    "current_node",
    "current_stream_of",
    "cut_dim",
    "default_store",
    "dtensor_like",
    "dtensor_without_data",
    "error_of",
    "fake_group",
    "flattened_axes",
    "grad_dtype_of",
    "gradient_versions",
    "hand_over_hooks",
    "in_transform",
    "is_capturing_elsewhere",
    "is_write",
    "issued_by_group",
    "keeping_versions",
    "keeps_graph",
    "known_groups",
    "loads_as_torch",
    "local_of",
    "mark_managed",
    "nccl_watchdog",
    "new_group",
    "next_node_number",
    "no_torch_function",
    "node_number",
    "non_persistent_buffers",
    "operation_name",
    "overloads",
    "pop_saved_tensor_hooks",
    "post_accumulate_grad_hooks",
    "profiling",
    "publish_state",
    "published_state",
    "push_saved_tensor_hooks",
    "queue_backward_callback",
    "refuse_distribution",
    "root_mesh",
    "run_first",
    "same_group",
    "same_spec",
    "saved_tensor_hooks_allowed",
    "set_local",
    "settled",
    "sharded_parameter",
    "storage_key",
    "strided_shard",
    "swappable",
    "take_spec",
    "tensor_hooks",
    "timeout_of",
    "top_saved_tensor_hooks",
    "version_of",
    "versions_of_gradient",
    "with_tensor_hooks",
    "without_torch_functions",
    "without_transforms",
]
