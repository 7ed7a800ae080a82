"""Composer's `parallelism_config` and LLM Foundry's YAML. Source: Composer 0.33, `FSDPConfig`, `FSDP2Config`; seed 004.

Composer's own way to FSDP2 drops CPU offload and the degrees of HSDP with a warning, and needs a number for the
micro-batch; here they have settings.
"""

from __future__ import annotations

from ..verdict import DROPPED, EQUIVALENT, EXACT, LOSSY, UNSUPPORTED
from .hugging import PREFETCH
from .rules import (
    AC,
    ANY,
    COPIES,
    DTYPE,
    GIVEN,
    HELD,
    INIT,
    KIND,
    MICRO,
    MODE,
    OFFLOAD,
    PARAM,
    REDUCE,
    REPLICATED,
    RESHARD,
    SHARD,
    TABLE,
    TEXT,
    WHOLE,
    WRAP,
    Case,
    Format,
    Rule,
    dropped,
    rule,
    switch,
)

_HYBRID = (
    "the number of copies is data_parallel_replicate_degree; without it Composer shards over all ranks, with a warning"
)
_PURE = 'gradients are reduced in the low precision, too; precision.mode = "DEFAULT" reduces in float32'

CONFIG: tuple[Rule, ...] = (
    rule(
        "sharding_strategy",
        Case("FULL_SHARD", EXACT, {RESHARD: "default"}, "the default: all but the root's parameters are freed"),
        Case("SHARD_GRAD_OP", EXACT, {RESHARD: False}, "full parameters stay until backward"),
        Case("NO_SHARD", EXACT, REPLICATED, "a copy on each rank, gradients averaged, as DDP; nothing is sharded"),
        Case("HYBRID_SHARD", EQUIVALENT, {}, _HYBRID),
        Case("_HYBRID_SHARD_ZERO2", EQUIVALENT, {RESHARD: False}, _HYBRID),
    ),
    rule("data_parallel_shard_degree", Case(WHOLE, EXACT, {SHARD: GIVEN}, "ranks that share one copy of the state")),
    rule(
        "data_parallel_replicate_degree",
        Case(None, EXACT, {}, "one copy"),
        Case(WHOLE, EXACT, {COPIES: GIVEN}, "number of copies (HSDP)"),
    ),
    rule(
        "device_mesh",
        Case(None, DROPPED, {}, "made from the degrees"),
        Case(ANY, UNSUPPORTED, {}, "an object; give the degrees, or pass mesh= to prepare_fully_shard"),
    ),
    rule(
        "reshard_after_forward",
        Case(True, EXACT, {RESHARD: True}, "freed after forward"),
        Case(False, EXACT, {RESHARD: False}, "full parameters stay until backward"),
        Case(WHOLE, EXACT, {RESHARD: GIVEN}, "kept on this many ranks"),
    ),
    rule(
        "mixed_precision",
        Case("DEFAULT", EXACT, {MODE: "DEFAULT"}, "computed in low precision, reduced in float32"),
        Case("PURE", EXACT, {MODE: "PURE"}, _PURE),
        Case("FULL", EXACT, {MODE: "FULL"}, "everything in the dtype of the parameters"),
        Case(TABLE, EXACT, {}, "its dtypes, one by one"),
        absent="DEFAULT",
    ),
    rule(
        "mixed_precision.param_dtype",
        Case(None, EXACT, {}, "that of the parameters"),
        Case(TEXT, EXACT, {PARAM: GIVEN}, "dtype of compute"),
    ),
    rule(
        "mixed_precision.reduce_dtype",
        Case(None, EXACT, {}, "that of compute, which precision.reduce then says"),
        Case(TEXT, EXACT, {REDUCE: GIVEN}, "dtype in which gradients are averaged"),
    ),
    rule("mixed_precision.buffer_dtype", Case(TEXT, LOSSY, {}, "buffers keep their dtype, as in Composer's FSDP2")),
    switch("keep_low_precision_grads", LOSSY, {}, "gradients always have the dtype of the parameters"),
    switch("cpu_offload", EXACT, {OFFLOAD: True}, "Composer refuses it; here shards are in host memory"),
    rule(
        "activation_checkpointing",
        Case(True, EXACT, {AC: "children"}, "modules that say so by attribute or function, else direct children"),
        Case(False, EXACT, {}, "the default"),
    ),
    rule(
        "activation_checkpointing_reentrant",
        Case(True, EQUIVALENT, {}, "never reentrant here: same values, less memory"),
        Case(False, EXACT, {}, "never reentrant"),
        absent=True,
    ),
    switch("activation_cpu_offload", EXACT, {HELD: True}, "kept inputs are in host memory until backward"),
    rule("backward_prefetch", *PREFETCH, absent="BACKWARD_POST"),
    dropped("backward_prefetch_limit", "model.set_memory_budget(prefetch=...) limits bytes instead of units"),
    dropped("forward_prefetch", "units are gathered ahead in the order of the recorded step"),
    dropped("forward_prefetch_limit", "model.set_memory_budget(prefetch=...) limits bytes instead of units"),
    dropped("limit_all_gathers", "memory of gathers is bounded without it"),
    dropped("use_orig_params", "parameters keep their names and shapes; there is no flat one"),
    dropped("flatten_parameters", "parameters keep their names and shapes; there is no flat one"),
    dropped("verbose", "print(report) of prepare_fully_shard has the units"),
    rule(
        "auto_wrap",
        Case(True, EXACT, {WRAP: "auto"}, "modules marked by _fsdp_wrap and fsdp_wrap_fn, else blocks"),
        Case(False, EXACT, {WRAP: "none"}, "the whole model is one unit"),
        absent=True,
    ),
    rule(
        "ignored_modules",
        Case(None, DROPPED, {}, "nothing is ignored"),
        Case(ANY, UNSUPPORTED, {}, "write wrap.ignored"),
    ),
    rule(
        "state_dict_type",
        Case("sharded", EXACT, {KIND: "sharded"}, "each rank its rows"),
        Case(
            "full", EXACT, {KIND: "full", "state_dict.rank0_only": True, "state_dict.offload_to_cpu": True}, "on rank 0"
        ),
        Case("local", UNSUPPORTED, {}, "there are no flat shards; Composer reads such files up to 0.18.1"),
        absent="full",
    ),
    rule(
        "load_monolith_rank0_only",
        Case(True, EQUIVALENT, {INIT: "mixed"}, "rank 0 loads, and its values are sent"),
        Case(False, EXACT, {}, "each rank reads"),
    ),
    rule(
        "sync_module_states",
        Case(True, EXACT, {INIT: "cpu"}, "rank 0's values are sent"),
        Case(False, EXACT, {}, "each rank has the values; ranks that differ raise an error"),
    ),
    rule(
        "process_group",
        Case(None, DROPPED, {}, "all ranks"),
        Case(TEXT, UNSUPPORTED, {}, "give data_parallel_shard_degree, or pass mesh= to prepare_fully_shard"),
    ),
    dropped("sharded_ckpt_prefix_dir", "checkpoints are named where they are saved"),
    rule(
        "load_planner",
        Case(None, DROPPED, {}, "none"),
        Case(ANY, UNSUPPORTED, {}, "an object of DCP; pass it to dcp.load"),
    ),
    rule(
        "save_planner",
        Case(None, DROPPED, {}, "none"),
        Case(ANY, UNSUPPORTED, {}, "an object of DCP; pass it to dcp.save"),
    ),
    switch("te_checkpoint_wrapper", UNSUPPORTED, {}, "of Transformer Engine"),
    switch("te_shard_fp8_weight", UNSUPPORTED, {}, "of Transformer Engine"),
)

_PRECISION = rule(
    "precision",
    Case("amp_bf16", EXACT, {DTYPE: "bfloat16"}, "the low precision of DEFAULT and PURE"),
    Case("amp_fp16", EQUIVALENT, {DTYPE: "float16"}, "scale the loss with fullshard.GradScaler"),
    Case("fp32", EXACT, {MODE: "FULL"}, "everything in float32", forces=True),
    Case("amp_fp8", UNSUPPORTED, {}, "use torchao's float8 linear layers"),
)
_MICRO = rule(
    "device_train_microbatch_size",
    Case("auto", EXACT, {MICRO: "auto"}, "found by halving, agreed among ranks; Composer refuses it with FSDP2"),
    Case(WHOLE, EXACT, {MICRO: GIVEN}, "samples of a rank in one forward"),
    names=("device_train_micro_batch_size",),
)
_TENSOR = "apply tensor parallelism to the model first, then shard over the data-parallel axis of the same mesh"


def _inside(prefix: str) -> tuple[Rule, ...]:
    return tuple(
        Rule(f"{prefix}{each.key}", each.cases, each.absent, tuple(f"{prefix}{n}" for n in each.names))
        for each in CONFIG
    )


COMPOSER = Format(
    "composer",
    "Composer's parallelism_config",
    (".yaml", ".yml", ".json"),
    (
        *_inside("fsdp."),
        rule("fsdp", Case(TABLE, DROPPED, {}, "all defaults"), Case(None, DROPPED, {}, "not sharded")),
        rule("tp", Case(None, DROPPED, {}, "none"), Case(TABLE, UNSUPPORTED, {}, _TENSOR)),
        _PRECISION,
        _MICRO,
    ),
    signs=("fsdp", "fsdp2", "parallelism_config"),
)
_NOT_SHARDING = (
    "variables, model, tokenizer, train_loader, eval_loader, optimizer, scheduler, algorithms, callbacks, loggers, "
    "max_duration, eval_interval, eval_first, eval_subset_num_batches, global_train_batch_size, seed, global_seed, "
    "device_eval_batch_size, save_interval, save_folder, save_num_checkpoints_to_keep, save_overwrite, load_path, "
    "load_weights_only, autoresume, run_name, max_seq_len, progress_bar, log_to_console, console_log_interval, "
    "data_local, data_remote, icl_tasks, icl_max_seq_len, dist_timeout, python_log_level, load_strict_model_weights, "
    "eval_loaders, profiler, compile_config, code_paths, only_hf_checkpoint, only_composer_checkpoint, metadata, "
    "save_weights_only, save_filename, save_latest_filename, max_split_size_mb, expandable_segments, name, image, "
    "compute, command, integrations, parameters, scheduling, expected_gpus, log_config, tp_config_, dataset_swap, "
    "eval_gauntlet, eval_gauntlet_str, icl_tasks_str, icl_seq_len, icl_subset_num_batches, load_ignore_keys, "
    "save_ignore_keys, cuda_load_lazy, flatten_metadata, device_train_batch_size, n_gpus, device_train_grad_accum, "
    "spin_dataloaders, accumulate_train_batch_on_tokens"
)
FOUNDRY = Format(
    "foundry",
    "LLM Foundry YAML",
    (".yaml", ".yml"),
    (
        *_inside("fsdp_config."),
        rule("fsdp_config", Case(TABLE, DROPPED, {}, "all defaults"), Case(None, DROPPED, {}, "not sharded")),
        rule(
            "model.init_device",
            Case("meta", EXACT, {INIT: "meta"}, "initialised after sharding, equal at any number of ranks"),
            Case("cpu", EXACT, {INIT: "given"}, "each rank has the values"),
            Case("mixed", EXACT, {INIT: "mixed"}, "rank 0 has the values, the others the meta device", forces=True),
        ),
        _PRECISION,
        _MICRO,
        rule("tp_config", Case(None, DROPPED, {}, "none"), Case(TABLE, UNSUPPORTED, {}, _TENSOR)),
    ),
    signs=("fsdp_config", "train_loader", "device_train_microbatch_size", "global_train_batch_size", "max_duration"),
    elsewhere=tuple(_NOT_SHARDING.split(", ")),
)
