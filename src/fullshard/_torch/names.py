"""Every private name of torch that this package uses: in which versions it is there, and why it is needed.

tests/pure/test_torch_names.py compares this table with the source and with the installed torch; `make versions` runs it
with each version of the range.
"""

from __future__ import annotations

from typing import NamedTuple

# The versions of torch that the package accepts and is tested with: the first and the last, (major, minor).
OLDEST, NEWEST = (2, 10), (2, 15)


class PrivateName(NamedTuple):
    """`name`: a dotted name below torch; "Module()" is an instance made without arguments. `why`: what public name is
    missing, and who uses this one. `first`, `last`: the versions of the range that have it."""

    name: str
    why: str
    first: tuple[int, int] = OLDEST
    last: tuple[int, int] = NEWEST


_BACKWARD = "no public way to ask about the running backward; an own flag would survive an exception"
_SAVED = "detect other active saved-tensor hooks, which must not be hidden; push and pop from two callbacks"
_RECOMPUTED = "saved-tensor hooks make new tensors of arguments, of which recomputation must get the same objects"
_TRANSFORM = "gathers inside torch.func transforms must not be transformed: they write tensors unknown to transforms"
_SPEC = "from_local takes nine times as long, and shards must stay views of one flat buffer, on the host too"
_OWN_GROUP = "groups that can be replaced after a peer failed; names of new_group may recur (comm/data_group.py)"
_HUNG = "name the user's collective in which a rank hangs: read while it waits, so nothing is wrapped (peers/watch.py)"
_ALLOCATE = "only the backend can allocate registered message memory"
_MESH = "parameters with several parallel dims: concatenate and flatten axes, find a common root mesh"
_HOOKS = "the engine runs the hooks of sharded parameters"
_STATE = "where pipeline schedules look for the state of a sharded module, and DDP for applied composable APIs"
_TAPE = "whose backward an operation belongs to, on the tape of a step (plan/facts.py), without hooks on the model"
_HALVES = "what a stage holds between its gradients of inputs and of weights, on the tape of a plan"
_OPERATIONS = "the operations of a step and the storages that they make (plan/facts.py)"
_ATTENTION = "fused attention with the logarithm of its sums, so that parts of it can be added (_torch/attention.py)"
_HOLDERS = "memory is given back to the device only where no tensor of the program reads it (extras/sleep.py)"
_MARKS = "attributes that dynamo and transformers check"

PRIVATE_NAMES: tuple[PrivateName, ...] = (
    # ---- autograd
    PrivateName("torch._C._current_graph_task_id", _BACKWARD),
    PrivateName("torch._C._autograd._get_current_graph_task_keep_graph", _BACKWARD),
    PrivateName("torch.autograd.Variable._execution_engine", "the only notice of the end of a backward (DDP uses it)"),
    PrivateName("torch._C._autograd._saved_tensors_hooks_is_enabled", _SAVED),
    PrivateName("torch._C._autograd._top_saved_tensors_default_hooks", _SAVED),
    PrivateName("torch._C._autograd._push_saved_tensors_default_hooks", _SAVED),
    PrivateName("torch._C._autograd._pop_saved_tensors_default_hooks", _SAVED),
    PrivateName("torch.utils.checkpoint._checkpoint_without_reentrant_generator", _RECOMPUTED),
    PrivateName("torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl", _RECOMPUTED, first=(2, 14)),
    PrivateName("torch._C._functorch.peek_interpreter_stack", _TRANSFORM),
    PrivateName("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", _TRANSFORM),
    PrivateName("torch._C._disabled_torch_function_impl", "subclasses that only intercept what reaches the dispatcher"),
    PrivateName("torch.Tensor._post_accumulate_grad_hooks", _HOOKS),
    PrivateName("torch.Tensor._backward_hooks", _HOOKS),
    PrivateName(
        "torch.Tensor._has_grad_dtype_override", "a grad_dtype that was set to the dtype itself", first=(2, 15)
    ),
    PrivateName("torch.Tensor._version", "detect writes"),
    PrivateName("torch.Tensor._base", "find the base of a view"),
    PrivateName("torch._C._storage_Use_Count", _HOLDERS),
    PrivateName("torch.autograd._unsafe_preserve_version_counter", "an all-gather into a full parameter is no edit"),
    PrivateName(
        "torch.autograd.profiler._is_profiler_enabled",
        "profiler ranges cost five microseconds each, so they are made only while a profiler is active",
    ),
    PrivateName(
        "torch.amp.GradScaler._unscale_grads_",
        "overridden in api/clip.py: the only place that finds infs, for steps with and without unscale_",
    ),
    # ---- DTensor
    PrivateName("torch.distributed.tensor.DTensor._local_tensor", _SPEC),
    PrivateName("torch.distributed.tensor.DTensor._spec", _SPEC),
    PrivateName("torch.distributed.tensor._dtensor_spec.DTensorSpec", _SPEC),
    PrivateName("torch.distributed.tensor._dtensor_spec.TensorMeta", _SPEC),
    PrivateName("torch.Tensor._dtensor__new__", "a DTensor subclass with a shape and no data (PendingGrad)"),
    PrivateName(
        "torch.utils._python_dispatch._disable_current_modes", "a trial that no dispatch mode sees (PendingGrad)"
    ),
    PrivateName("torch.distributed.tensor.placement_types._StridedShard", "two axes shard a dim, the left one last"),
    PrivateName("torch.distributed.device_mesh.DeviceMesh._concatenate", _MESH),
    PrivateName("torch.distributed.device_mesh.DeviceMesh._flatten", _MESH),
    PrivateName("torch.distributed.device_mesh.DeviceMesh._get_root_mesh", _MESH),
    PrivateName(
        "torch.distributed._functional_collectives.AsyncCollectiveTensor.trigger_wait",
        "gradients of DTensors may be in flight",
    ),
    # ---- operations
    PrivateName("torch._C._current_autograd_node", _TAPE),
    PrivateName("torch.distributed.pipelining._backward.stage_backward_input", _HALVES),
    PrivateName("torch.distributed.pipelining._backward.stage_backward_weight", _HALVES),
    PrivateName("torch.autograd._get_sequence_nr", _TAPE),
    PrivateName("torch._C._functions.AccumulateGrad._sequence_nr", _TAPE),
    PrivateName("torch.ops.aten.mm.default._schema", "which operations of a sharded parameter return a view"),
    PrivateName("torch.ops.aten.mm.default._overloadpacket", _OPERATIONS),
    PrivateName("torch.UntypedStorage._cdata", _OPERATIONS),
    PrivateName("torch.utils._python_dispatch.TorchDispatchMode", _OPERATIONS),
    PrivateName(
        "torch.ops.mkldnn._is_mkldnn_bf16_supported", "whether an LSTM on this CPU runs in oneDNN (plan/recurrent.py)"
    ),
    PrivateName("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", "fused attention on the meta device"),
    PrivateName("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", _ATTENTION),
    PrivateName("torch.ops.aten._scaled_dot_product_flash_attention", _ATTENTION),
    PrivateName("torch.ops.aten._scaled_dot_product_flash_attention_backward", _ATTENTION),
    PrivateName("torch._C.DisableTorchFunction", "the same: operations without `__torch_function__`"),
    # ---- process groups
    PrivateName("torch.distributed.ProcessGroup._get_backend", _ALLOCATE),
    PrivateName("torch._C._distributed_c10d.Backend.supports_tensor_alloc", _ALLOCATE),
    PrivateName("torch._C._distributed_c10d.Backend.allocate_tensor", _ALLOCATE),
    PrivateName(
        "torch.distributed.distributed_c10d._get_default_store",
        "communication between all ranks without a collective (peers/watch.py)",
    ),
    PrivateName("torch.distributed.ProcessGroup._register_backend", _OWN_GROUP),
    PrivateName("torch.distributed.ProcessGroup._set_default_backend", _OWN_GROUP),
    PrivateName("torch.distributed.ProcessGroup._set_group_name", _OWN_GROUP),
    PrivateName("torch.distributed.ProcessGroup._device_types", _OWN_GROUP),
    PrivateName("torch.distributed.distributed_c10d.Backend._plugins", _OWN_GROUP),
    PrivateName("torch._C._distributed_c10d.Backend.Options._timeout", _OWN_GROUP),
    PrivateName(
        "torch.distributed.ProcessGroup.bound_device_id",
        "groups of some ranks, of which new_group would make splits of the default group",
    ),
    PrivateName("torch._C._distributed_c10d._dump_fr_trace_json", _HUNG),
    PrivateName("torch.distributed.ProcessGroup._get_sequence_number_for_group", _HUNG),
    PrivateName("torch.distributed.distributed_c10d._world", _HUNG),
    PrivateName(
        "torch.testing._internal.distributed.fake_pg.FakeStore", "layouts at any world size in one process (groups.py)"
    ),
    PrivateName("torch._C._accelerator_getStream", "asked with each report of a step on a device, without Python"),
    # ---- modules
    PrivateName("torch.nn.Module()._parameters", "puts tensors on modules: setattr takes thirty times as long"),
    PrivateName("torch.nn.Module()._buffers", "buffers registered as None, which forward may fill"),
    PrivateName("torch.nn.Module()._modules", "children by name, where one module may have two"),
    PrivateName("torch.nn.Module()._non_persistent_buffers_set", "which buffers a state dict leaves out"),
    PrivateName("torch.nn.Module()._forward_hooks", "whether hooks of the program run after the engine's (arguments)"),
    PrivateName("torch.nn.Module()._state_dict_hooks", "a hook that runs before those registered earlier"),
    PrivateName(
        "torch.nn.Module._load_from_state_dict", "which modules save more than they load (checkpoint/state.py)"
    ),
    PrivateName("torch.distributed._composable.contract.STATE_KEY", _STATE),
    PrivateName("torch.distributed._composable.contract.REGISTRY_KEY", _STATE),
    PrivateName("torch.distributed._composable.contract.RegistryItem", _STATE),
    PrivateName("torch.distributed.fsdp.fully_shard.__wrapped__", _STATE),
    PrivateName(
        "torch.distributed._composable.fsdp.fully_shard", "the old path of fully_shard, which install() swaps too"
    ),
)

# Names on modules and functions, which this package sets for others or reads; torch need not have them.
MARKS: dict[str, str] = {
    "_torchdynamo_orig_callable": "removed from methods that torch.compile may get; 2.10 follows it and loses `self`",
    "_ddp_params_and_buffers_to_ignore": "what DistributedDataParallel leaves out; there is no public name",
    "_checkpoint_internal": "hooks of fullshard are no user's, of which selective recomputation warns from 2.14 on",
    "_user_hooks": "the user's hooks below them, which are none",
    "_is_fsdp_managed_module": _MARKS,
    "_module_classes_to_ignore": "FSDP1's MixedPrecision: classes that it leaves out; there is no public name",
    "_fsdp_use_orig_params": _MARKS,
    "_distribute_module_applied": "the mark that `distribute_module` looks for, so that it refuses a sharded module",
}


def known_in(version: tuple[int, int]) -> tuple[PrivateName, ...]:
    """The names that the table expects in a torch (major, minor)."""
    return tuple(one for one in PRIVATE_NAMES if one.first <= version <= one.last)
