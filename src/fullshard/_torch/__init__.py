"""torch's private names: this package uses them, and nothing else does. The table is in names.py.

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
from .foreach import copied_into_one
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
    "copied_into_one",
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
