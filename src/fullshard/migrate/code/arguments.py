"""What each argument of FSDP1, DDP and their helpers means here, as tables. `docs/how-to` prints them.

Sources: the signatures of torch 2.13; seed 000 (removed arguments), seed 001 (parameter mapping).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..verdict import DROPPED, EQUIVALENT, EXACT, LOSSY, UNSUPPORTED


@dataclass(frozen=True, slots=True)
class Row:
    """`old`: an argument, or argument=VALUE. `new`: what is written instead, "" for nothing."""

    old: str
    verdict: str
    new: str
    reason: str


# Names of torch's FSDP2 that fullshard has too.
FSDP2_NAMES = (
    "fully_shard",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "CPUOffloadPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "GradientReductionHandle",
    "DataParallelMeshDims",
    "register_fsdp_forward_method",
    "share_comm_ctx",
)
# Of `FullyShardedDataParallel`, in the order of its signature: the position of an argument is its index here.
FSDP1_ARGUMENTS = (
    "module",
    "process_group",
    "sharding_strategy",
    "cpu_offload",
    "auto_wrap_policy",
    "backward_prefetch",
    "mixed_precision",
    "ignored_modules",
    "param_init_fn",
    "device_id",
    "sync_module_states",
    "forward_prefetch",
    "limit_all_gathers",
    "use_orig_params",
    "ignored_states",
    "device_mesh",
)

STRATEGIES = (
    Row(
        "sharding_strategy=FULL_SHARD",
        EXACT,
        "fully_shard(...)",
        "the default reshards after forward, but for the root",
    ),
    Row("sharding_strategy=SHARD_GRAD_OP", EXACT, "reshard_after_forward=False", "full parameters stay until backward"),
    Row("sharding_strategy=NO_SHARD", EXACT, "replicate(...)", "a copy on each rank, gradients averaged, as DDP"),
    Row(
        "sharding_strategy=HYBRID_SHARD",
        EQUIVALENT,
        "mesh of (replicate, shard)",
        "sharded within a node, replicated between nodes; without device_mesh, torchrun's LOCAL_WORLD_SIZE is the node",
    ),
    Row(
        "sharding_strategy=_HYBRID_SHARD_ZERO2",
        EQUIVALENT,
        "mesh of (replicate, shard), reshard_after_forward=False",
        "sharded within a node, full parameters stay until backward",
    ),
)

FSDP1 = (
    Row(
        "auto_wrap_policy",
        EQUIVALENT,
        "fully_shard of each of these modules, then of the model",
        "units are written in the program",
    ),
    Row("backward_prefetch=BACKWARD_PRE", DROPPED, "", "units are always gathered ahead in backward"),
    Row(
        "backward_prefetch=BACKWARD_POST",
        EQUIVALENT,
        "",
        "units are always gathered ahead in backward, as BACKWARD_PRE: one more unit is full at a time; "
        "model.set_memory_budget(prefetch=...) limits its bytes",
    ),
    Row(
        "backward_prefetch=None",
        EQUIVALENT,
        "",
        "units are always gathered ahead in backward: one more unit is full at a time; "
        "model.set_memory_budget(prefetch=...) limits its bytes",
    ),
    Row(
        "param_init_fn",
        EQUIVALENT,
        "materialize(model, init=...)",
        "called with modules whose parameters have memory already, so a test for is_meta in it is never true",
    ),
    Row("device_id", DROPPED, "", "parameters move to the device of the mesh"),
    Row(
        "sync_module_states",
        EXACT,
        "sync_module_states(model) before sharding",
        "rank 0's values are sent, also to ranks on the meta device; without it, ranks that differ raise an error",
    ),
    Row("limit_all_gathers", DROPPED, "", "memory of gathers is bounded without it"),
    Row("use_orig_params", DROPPED, "", "parameters keep their names and shapes; there is no flat one"),
    Row("forward_prefetch", DROPPED, "", "units are gathered ahead in the order of the recorded step"),
    Row("mixed_precision", EQUIVALENT, "mp_policy", "see MixedPrecision"),
    Row("cpu_offload", EXACT, "offload_policy", "see CPUOffload"),
    Row("ignored_modules", EXACT, "ignored_params", "the parameters of these modules stay as they are"),
    Row("ignored_states", EXACT, "ignored_params", "parameters, or the parameters of modules, stay as they are"),
    Row("process_group", EQUIVALENT, "mesh", "the ranks of the group, as a mesh"),
    Row("device_mesh", EXACT, "mesh", "one axis shards; of two axes the first replicates"),
)

# Arguments in which seed 000 says that nothing is needed any more, in its order.
REMOVED = (
    "auto_wrap_policy",
    "backward_prefetch",
    "param_init_fn",
    "device_id",
    "sync_module_states",
    "limit_all_gathers",
    "use_orig_params",
)

MIXED_PRECISION_ARGUMENTS = (
    "param_dtype",
    "reduce_dtype",
    "buffer_dtype",
    "keep_low_precision_grads",
    "cast_forward_inputs",
    "cast_root_forward_inputs",
    "_module_classes_to_ignore",
)
MIXED_PRECISION = (
    Row("param_dtype", EXACT, "param_dtype", "dtype of compute"),
    Row("reduce_dtype", EXACT, "reduce_dtype", "dtype in which gradients are averaged; without it, that of compute"),
    Row("buffer_dtype", LOSSY, "", "buffers keep their dtype; cast them in the model, if it needs that"),
    Row("keep_low_precision_grads", LOSSY, "", "gradients always have the dtype of the parameters"),
    Row(
        "cast_forward_inputs",
        EQUIVALENT,
        "cast_forward_inputs",
        "each unit casts its floating inputs unless set otherwise; FSDP1 casts at the root alone by default",
    ),
    Row(
        "cast_root_forward_inputs",
        EQUIVALENT,
        "cast_forward_inputs",
        "casting is set for each unit; by default all cast",
    ),
    Row(
        "_module_classes_to_ignore",
        EXACT,
        "units of their own, in MixedPrecisionPolicy(torch.float32, torch.float32, param_dtype)",
        "with auto_wrap_policy, as in FSDP1 (BatchNorm by default): inputs in float32, outputs in param_dtype, which "
        "FSDP1 gives them where an input had it",
    ),
    Row(
        "_module_classes_to_ignore=without a policy",
        DROPPED,
        "",
        "has no effect in FSDP1 without auto_wrap_policy either",
    ),
    Row(
        "_module_classes_to_ignore=elsewhere",
        LOSSY,
        "",
        "the models that this MixedPrecision is for were not found, so these classes compute in param_dtype. Where the "
        "model has an auto_wrap_policy, shard them first, with MixedPrecisionPolicy(torch.float32, torch.float32, "
        "output_dtype=param_dtype)",
    ),
)

CPU_OFFLOAD = (
    Row("offload_params=True", EXACT, "CPUOffloadPolicy()", "shards, gradients and optimizer state in host memory"),
    Row("offload_params=False", EXACT, "OffloadPolicy()", "everything on the device"),
)

# Of `DistributedDataParallel`, in the order of its signature.
DDP_ARGUMENTS = (
    "module",
    "device_ids",
    "output_device",
    "dim",
    "broadcast_buffers",
    "init_sync",
    "process_group",
    "bucket_cap_mb",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
    "delay_all_reduce_named_params",
    "param_to_hook_all_reduce",
    "mixed_precision",
    "device_mesh",
    "skip_all_reduce_unused_params",
    "bucket_cap_mb_list",
    "batched_grad_copy",
    "forward_sync_buffers",
    "lazy_bucket_allocation",
)
DDP = (
    Row("device_ids", DROPPED, "", "parameters move to the device of the mesh; move the inputs there yourself"),
    Row("output_device", DROPPED, "", "outputs stay on the device of the model"),
    Row("dim", DROPPED, "", "nothing is scattered"),
    Row(
        "broadcast_buffers",
        EQUIVALENT,
        "",
        "buffers are each rank's own; where BatchNorm's matter: sync_module_states(model, buffers_only=True)",
    ),
    Row(
        "init_sync",
        EXACT,
        "sync_module_states(model) before sharding",
        "rank 0's values are sent, as DDP does by default",
    ),
    Row("process_group", EQUIVALENT, "mesh", "the ranks of the group, as a mesh"),
    Row("device_mesh", EXACT, "mesh", "the ranks of the mesh"),
    Row("bucket_cap_mb", DROPPED, "", "a unit is a bucket"),
    Row("bucket_cap_mb_list", DROPPED, "", "a unit is a bucket"),
    Row("lazy_bucket_allocation", DROPPED, "", "a buffer for gradients is there only from backward to reduction"),
    Row("find_unused_parameters", DROPPED, "", "parameters without a gradient need no setting"),
    Row("check_reduction", DROPPED, "", "has no effect in DDP either"),
    Row("gradient_as_bucket_view", DROPPED, "", "gradients are views of one buffer already"),
    Row("static_graph", DROPPED, "", "no graph has to be static"),
    Row("skip_all_reduce_unused_params", DROPPED, "", "what no rank used is not reduced"),
    Row("batched_grad_copy", DROPPED, "", "gradients are views of one buffer already"),
    Row("forward_sync_buffers", EQUIVALENT, "", "see broadcast_buffers"),
    Row("delay_all_reduce_named_params", UNSUPPORTED, "", "use ignored_params, and reduce these in your own code"),
    Row("param_to_hook_all_reduce", UNSUPPORTED, "", "use ignored_params, and reduce these in your own code"),
    Row("mixed_precision", UNSUPPORTED, "", "write mp_policy=MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...)"),
)

# Methods, functions and classes.
CALLS = (
    Row(
        "FullyShardedDataParallel(model)",
        EXACT,
        "fully_shard(model)",
        "the module itself is sharded; there is no wrapper",
    ),
    Row(
        "DistributedDataParallel(model)",
        EQUIVALENT,
        "fully_shard(model)",
        "gradients are averaged as by DDP, and state is sharded; one unit so far: shard the blocks before the model to "
        "save memory; replicate(model) keeps full copies",
    ),
    Row(
        "no_sync()",
        EQUIVALENT,
        "set_requires_gradient_sync(False)",
        "gradients of all ranks are reduced in the last backward",
    ),
    Row(
        "clip_grad_norm_()",
        EXACT,
        "clip_grad_norm_(model.parameters(), ...)",
        "the norm over all ranks, a plain tensor",
    ),
    Row(
        "summon_full_params()",
        EXACT,
        "full_params(model, ...)",
        "writeback is written out: it is True by default in FSDP1, and False here",
    ),
    Row(
        "state_dict_type(FULL_STATE_DICT)",
        EQUIVALENT,
        "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))",
        "state_dict() alone is sharded here; load_state_dict takes full tensors as it is",
    ),
    Row(
        "state_dict_type(SHARDED_STATE_DICT)",
        EQUIVALENT,
        "model.state_dict()",
        "DTensors instead of ShardedTensors, which DCP stores in the same way",
    ),
    Row("state_dict_type(LOCAL_STATE_DICT)", UNSUPPORTED, "", "there are no flat shards; choose full or sharded"),
    Row(
        "model.state_dict() without a type",
        EQUIVALENT,
        "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))",
        "FSDP1's default is full, as DDP's is; here state_dict() is sharded",
    ),
    Row(
        "optim_state_dict()",
        EQUIVALENT,
        "get_optimizer_state_dict(model, optimizer)",
        "by parameter names, as in FSDP1; counts of steps are the optimizer's own tensors: copy what is kept in memory",
    ),
    Row(
        "optim_state_dict_to_load()",
        EQUIVALENT,
        "set_optimizer_state_dict(model, optimizer, state)",
        "takes what optim_state_dict gave, full or sharded",
    ),
    Row("ShardedGradScaler", EXACT, "GradScaler", "all ranks agree on inf and NaN"),
    Row("model.module", EXACT, "model", "the module is not wrapped"),
    Row(
        "isinstance(module, FullyShardedDataParallel)",
        EXACT,
        "isinstance(module, FSDPModule)",
        "the class of sharded modules",
    ),
    Row("enable_wrap(), wrap()", EXACT, "fully_shard(module)", "each wrapped module is a unit"),
    Row(
        "optimizer built before the model is wrapped",
        EXACT,
        "rebind_optimizer(optimizer, model)",
        "the optimizer continues with the sharded parameters",
    ),
    Row("torch.distributed.fsdp.fully_shard", EXACT, "fullshard.fully_shard", "same arguments, same parameters"),
    Row(
        "a subclass that only passes settings",
        EQUIVALENT,
        "a function of the same name",
        "there is no class to derive from",
    ),
    Row("register_comm_hook()", UNSUPPORTED, "", "set reduce_dtype, or see set_all_reduce_hook"),
    Row("join()", UNSUPPORTED, "", "see fullshard.joined: ranks without batches left take part"),
)

_TABLES = {"fsdp": FSDP1 + STRATEGIES, "ddp": DDP, "precision": MIXED_PRECISION, "offload": CPU_OFFLOAD, "calls": CALLS}


def row(table: str, old: str) -> Row:
    """The row of an argument, or of argument=VALUE."""
    return next(each for each in _TABLES[table] if each.old == old)
