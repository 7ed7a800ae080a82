"""Every private torch name this package uses: one room, with the reason and the versions it was tried on.

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
    ProcessGroup._get_backend, Backend.         memory that a backend wants its messages in is had from 2.13
    supports_tensor_alloc, .allocate_tensor     it alone
    distributed_c10d._get_default_store         the one thing that all ranks share and that is no       2.13
                                                collective (guard/watch.py)
    ProcessGroup(store, rank, size),            groups that can be replaced when a peer failed; those of    2.13
    ._register_backend, ._set_default_backend,  new_group live under names that may come again with
    ._set_group_name, ._device_types, .options  what older ones left in the store (comm/data_group.py)
    _C._distributed_c10d._dump_fr_trace_json,   what a process is in, where a rank waits in a collective    2.13
    ProcessGroup._get_sequence_number_for_      of the user's that the others do not take: read when it
    group, distributed_c10d._world.pg_names     waits, so nothing is wrapped (guard/watch.py)
    tensor._post_accumulate_grad_hooks,         hooks of the sharded parameter are ours to run          2.13
    ._backward_hooks
    tensor._version, ._base                     was it written since; of which tensor is it a view      2.13
    Tensor._dtensor__new__                      a DTensor subclass with a shape and no data             2.13
                                                (PendingGrad)
    Module._non_persistent_buffers_set          which buffers a state dict leaves out                   2.13
    Module._buffers                             names under which a forward may put its first tensor    2.13
    DeviceMesh._concatenate, ._flatten,         parameters of two and more dims of parallelism: axes    2.13
    ._get_root_mesh                             behind each other, several axes as one, and of one mesh?
    AsyncCollectiveTensor.trigger_wait          gradients of DTensors may be results under way          2.13
    placement_types._StridedShard               two axes cut the same dim, the left one last            2.13
    autograd._unsafe_preserve_version_counter   a full parameter that is filled again was not edited    2.13
    GradScaler._unscale_grads_                  overridden in api/clip.py: the one place that     2.13
                                                finds infs, for stepping with and without unscale_
    torch.distributed.fsdp.FSDPModule,          base classes, so that isinstance checks elsewhere hold  2.13
    MixedPrecisionPolicy and the like
    _composable.contract.STATE_KEY,             where pipeline schedules look for the state of a        2.13
    REGISTRY_KEY, fully_shard.__wrapped__       sharded module, and DDP for what was applied to it
    torch.distributed._composable.fsdp          the old path of fully_shard, which install() swaps too  2.13
    torch.autograd.profiler._is_profiler_enabled  ranges of a trace cost five microseconds each, so     2.13
                                                they are made only while somebody profiles
    OpOverload._schema                          which operations of a sharded parameter return a view   2.13
    module._is_fsdp_managed_module,             what dynamo and transformers ask a module               2.13
    ._fsdp_use_orig_params

torch's own FSDP2 is never called from here.
"""

from __future__ import annotations

from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from .autograd import (
    base_of,
    current_backward,
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
    all_hold,
    concatenated_mesh,
    cut_dim,
    dtensor_like,
    dtensor_without_data,
    flattened_axes,
    is_view_of_its_input,
    local_of,
    root_mesh,
    same_spec,
    set_local,
    settled,
    sharded_parameter,
    strided_shard,
    take_spec,
)
from .groups import (
    Recorded,
    active_collectives,
    allocate_for,
    backend_of,
    default_store,
    issued_by_group,
    known_groups,
    same_group,
    timeout_of,
)
from .modules import (
    applied_apis,
    buffers_of,
    mark_managed,
    non_persistent_buffers,
    publish_state,
    published_state,
    swappable,
)

__all__ = [
    "MIXED",
    "Recorded",
    "TorchCPUOffloadPolicy",
    "TorchFSDPModule",
    "TorchMixedPrecisionPolicy",
    "TorchOffloadPolicy",
    "TorchUnshardHandle",
    "active_collectives",
    "all_hold",
    "allocate_for",
    "applied_apis",
    "backend_of",
    "base_of",
    "buffers_of",
    "concatenated_mesh",
    "current_backward",
    "cut_dim",
    "default_store",
    "dtensor_like",
    "dtensor_without_data",
    "flattened_axes",
    "gradient_versions",
    "hand_over_hooks",
    "in_transform",
    "is_view_of_its_input",
    "issued_by_group",
    "keeping_versions",
    "keeps_graph",
    "known_groups",
    "local_of",
    "mark_managed",
    "no_torch_function",
    "non_persistent_buffers",
    "pop_saved_tensor_hooks",
    "post_accumulate_grad_hooks",
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
    "top_saved_tensor_hooks",
    "version_of",
    "versions_of_gradient",
    "with_tensor_hooks",
    "without_transforms",
]
