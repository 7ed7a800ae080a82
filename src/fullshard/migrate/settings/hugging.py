"""Accelerate's YAML, and the `fsdp_config` of transformers' Trainer, whose keys are the same without a prefix.

Sources: Accelerate 1.15, transformers 5 (documentation, dataclass of the plugin, and what they do with it). Versions 1
and 2 of Accelerate's plugin differ in defaults: version 1 keeps full state dicts. The Trainer has defaults of its own:
version 2, the model's own classes as units, full state dicts.
"""

from __future__ import annotations

from ..verdict import DROPPED, EQUIVALENT, EXACT, LOSSY, UNSUPPORTED
from .rules import (
    AC,
    ANY,
    CLASSES,
    COPIES,
    DTYPE,
    FULL_STATE,
    GIVEN,
    HELD,
    IGNORED,
    INIT,
    KIND,
    LEAST,
    MODE,
    NAMES,
    OFFLOAD,
    PATTERN,
    REGEX,
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

_FULL = "the default: all but the root's parameters are freed after forward"
_NODES = "the replicate degree is the number of machines, which num_machines gives"


def _strategies(hybrid: str) -> tuple[Case, ...]:
    """Of FSDP1, by name and by Accelerate's numbers. `hybrid`: where the number of copies comes from."""
    cases = []
    for number, name, verdict, settings, reason in (
        (1, "FULL_SHARD", EXACT, {RESHARD: "default"}, _FULL),
        (2, "SHARD_GRAD_OP", EXACT, {RESHARD: False}, "full parameters stay until backward"),
        (3, "NO_SHARD", EXACT, REPLICATED, "a copy on each rank, gradients averaged, as DDP; nothing is sharded"),
        (4, "HYBRID_SHARD", EQUIVALENT, {}, hybrid),
        (5, "HYBRID_SHARD_ZERO2", EQUIVALENT, {RESHARD: False}, hybrid),
    ):
        cases += [Case(number, verdict, settings, reason), Case(name, verdict, settings, reason)]
    return tuple(cases)


PREFETCH = (
    Case("BACKWARD_PRE", DROPPED, {}, "units are always gathered ahead in backward"),
    Case(
        "BACKWARD_POST",
        EQUIVALENT,
        {},
        "units are always gathered ahead in backward: one more unit is full at a time; "
        "model.set_memory_budget(prefetch=...) limits its bytes",
    ),
    Case("NO_PREFETCH", EQUIVALENT, {}, "units are always gathered ahead; set_memory_budget(prefetch=0) stops it"),
    Case(None, EQUIVALENT, {}, "units are always gathered ahead; set_memory_budget(prefetch=0) stops it"),
)
STATE_DICTS = (
    Case("SHARDED_STATE_DICT", EXACT, {KIND: "sharded"}, "each rank its rows; the files are DTensors in DCP"),
    Case("FULL_STATE_DICT", EXACT, FULL_STATE, "whole tensors on rank 0, in host memory"),
    Case("LOCAL_STATE_DICT", UNSUPPORTED, {}, "there are no flat shards; choose SHARDED_STATE_DICT or FULL_STATE_DICT"),
)

# Without the prefix `fsdp_`.
PLUGIN: tuple[Rule, ...] = (
    rule(
        "version",
        Case(1, DROPPED, {}, "FSDP1; its settings are read as such"),
        Case(2, DROPPED, {}, "FSDP2, whose interface this is"),
    ),
    rule("sharding_strategy", *_strategies(_NODES)),
    rule(
        "reshard_after_forward",
        Case(True, EXACT, {RESHARD: "default"}, _FULL),
        Case(False, EXACT, {RESHARD: False}, "full parameters stay until backward"),
        Case(WHOLE, EXACT, {RESHARD: GIVEN}, "kept on this many ranks; Accelerate refuses numbers"),
        *(case for case in _strategies(_NODES) if isinstance(case.when, str)),  # version 1 takes names
    ),
    rule(
        "auto_wrap_policy",
        Case("TRANSFORMER_BASED_WRAP", EXACT, {WRAP: "no_split_modules"}, "the classes that the model names"),
        Case("SIZE_BASED_WRAP", EQUIVALENT, {WRAP: "size"}, "modules from a size on; units differ, values do not"),
        Case("NO_WRAP", EXACT, {WRAP: "none"}, "the whole model is one unit"),
        absent="NO_WRAP",
    ),
    rule(
        "transformer_layer_cls_to_wrap",
        Case("", DROPPED, {}, "the classes that the model names"),
        Case(None, DROPPED, {}, "the classes that the model names"),
        Case(NAMES, EXACT, {WRAP: "classes", CLASSES: GIVEN}, "units by class name", forces=True),
    ),
    rule(
        "min_num_params",
        Case(0, DROPPED, {}, "no size is given"),
        Case(WHOLE, EXACT, {LEAST: GIVEN}, "elements from which a module is a unit"),
    ),
    switch(
        "offload_params",
        EXACT,
        {OFFLOAD: True},
        "shards, gradients and optimizer state in host memory",
        names=("cpu_offload",),
    ),
    rule("backward_prefetch", *PREFETCH, names=("backward_prefetch_policy",)),
    dropped("forward_prefetch", "units are gathered ahead in the order of the recorded step"),
    dropped("limit_all_gathers", "memory of gathers is bounded without it"),
    dropped("use_orig_params", "parameters keep their names and shapes; there is no flat one"),
    rule(
        "sync_module_states",
        Case(True, EXACT, {INIT: "cpu"}, "rank 0's values are sent"),
        Case(False, EXACT, {}, "each rank has the values; ranks that differ raise an error"),
    ),
    rule(
        "cpu_ram_efficient_loading",
        Case(True, EXACT, {INIT: "mixed"}, "rank 0 loads, the others start on the meta device", forces=True),
        Case(False, EXACT, {}, "each rank has the values"),
    ),
    rule("state_dict_type", *STATE_DICTS),
    rule(
        "activation_checkpointing",
        Case(
            True,
            EQUIVALENT,
            {AC: "units"},
            "whole units, never reentrant, with their random states; version 2 keeps none, so dropout in units differs "
            "there when they are computed again",
        ),
        Case(False, EXACT, {}, "the default"),
        names=("gradient_checkpointing",),
    ),
    rule(
        "ignored_modules",
        Case(None, DROPPED, {}, "nothing is ignored"),
        Case(PATTERN, EQUIVALENT, {IGNORED: GIVEN}, "the same modules; a name that none has is an error"),
        Case(REGEX, UNSUPPORTED, {}, "a regular expression; write names to wrap.ignored, with * for any text"),
    ),
    switch("xla", UNSUPPORTED, {}, "XLA devices have a sharding of their own"),
    switch("xla_fsdp_v2", UNSUPPORTED, {}, "XLA devices have a sharding of their own"),
    switch("xla_fsdp_grad_ckpt", UNSUPPORTED, {}, "XLA devices have a sharding of their own"),
    rule("xla_fsdp_settings", Case(ANY, UNSUPPORTED, {}, "XLA devices have a sharding of their own")),
)

_PURE = 'Accelerate reduces gradients in the compute dtype; precision.mode = "DEFAULT" reduces in float32'
PRECISION = rule(
    "mixed_precision",
    Case("no", EXACT, {MODE: "FULL"}, "everything in the dtype of the parameters"),
    Case(False, EXACT, {MODE: "FULL"}, "everything in the dtype of the parameters"),  # a bare `no` in YAML
    Case("bf16", EQUIVALENT, {MODE: "PURE", DTYPE: "bfloat16"}, f"{_PURE}; no autocast around it"),
    Case("fp16", EQUIVALENT, {MODE: "PURE", DTYPE: "float16"}, f"{_PURE}; scale the loss with fullshard.GradScaler"),
    Case("fp8", UNSUPPORTED, {}, "use torchao's float8 linear layers; their gathers are float8 too"),
)

_LAUNCH = "of the launcher: torchrun"


# What Accelerate's plugin has beside the Trainer's table.
_ACCELERATE_S = (
    switch(
        "activation_checkpointing_offload", EXACT, {HELD: True}, "inputs of units are in host memory until backward"
    ),
)


def _prefixed(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return tuple(
        Rule(
            f"fsdp_config.fsdp_{each.key}", each.cases, each.absent, tuple(f"fsdp_config.fsdp_{n}" for n in each.names)
        )
        for each in rules
    )


def _parallelism(prefix: str) -> tuple[Rule, ...]:
    other = "apply it to the model first, then shard over the data-parallel axis of the same mesh"
    return (
        rule(f"{prefix}dp_shard_size", Case(WHOLE, EXACT, {SHARD: GIVEN}, "ranks that share one copy of the state")),
        rule(f"{prefix}dp_replicate_size", Case(WHOLE, EXACT, {COPIES: GIVEN}, "number of copies (HSDP)")),
        *(
            rule(f"{prefix}{name}", Case(1, EXACT, {}, "the default"), Case(WHOLE, UNSUPPORTED, {}, other))
            for name in ("tp_size", "cp_size", "sp_size")
        ),
        *(dropped(f"{prefix}{name}", "of context parallelism") for name in ("cp_backend", "cp_comm_strategy")),
        *(
            dropped(f"{prefix}{name}", "of sequence parallelism")
            for name in ("sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation")
        ),
    )


ACCELERATE = Format(
    "accelerate",
    "Accelerate YAML",
    (".yaml", ".yml", ".json"),
    (
        rule(
            "distributed_type",
            Case("FSDP", EXACT, {}, "sharded data parallel"),
            Case("MULTI_GPU", EQUIVALENT, REPLICATED, "DDP: a copy on each rank; leave the two degrees out to shard"),
            Case("MULTI_CPU", EQUIVALENT, REPLICATED, "DDP: a copy on each rank; leave the two degrees out to shard"),
            Case("NO", EQUIVALENT, {}, "one process; a world of one costs nothing"),
            Case("DEEPSPEED", UNSUPPORTED, {}, "convert the DeepSpeed JSON itself, named in deepspeed_config"),
            Case(TEXT, UNSUPPORTED, {}, "there is no counterpart"),
        ),
        PRECISION,
        *_prefixed((*PLUGIN, *_ACCELERATE_S)),
        *_parallelism("parallelism_config.parallelism_config_"),
        rule("deepspeed_config", Case(TABLE, UNSUPPORTED, {}, "convert the DeepSpeed JSON itself")),
        rule("megatron_lm_config", Case(TABLE, UNSUPPORTED, {}, "there is no counterpart")),
        rule(
            "dynamo_config",
            Case(TABLE, LOSSY, {}, "compile the blocks before you shard them: docs/compile.md"),
        ),
        *(
            dropped(name, _LAUNCH)
            for name in (
                "compute_environment",
                "machine_rank",
                "main_process_ip",
                "main_process_port",
                "main_training_function",
                "num_machines",
                "num_processes",
                "rdzv_backend",
                "same_network",
                "gpu_ids",
                "enable_cpu_affinity",
                "debug",
                "tpu_env",
                "tpu_use_cluster",
                "tpu_use_sudo",
                "tpu_name",
                "tpu_zone",
                "tpu_vm",
                "use_cpu",
                "commands",
                "command_file",
                "mpirun_config",
            )
        ),
        dropped("ipex_config", "of Intel's extension for CPUs"),
        dropped("fp8_config", "of mixed_precision = fp8, which is unsupported"),
        dropped("downcast_bf16", "of TPUs"),
    ),
    signs=("distributed_type", "compute_environment"),
)

# Of the Trainer, since transformers 5.
_DEFAULTS = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}

HUGGING_FACE = Format(
    "hf",
    "the Trainer's fsdp_config JSON",
    (".json", ".yaml", ".yml"),
    tuple(
        Rule(
            each.key,
            each.cases,
            _DEFAULTS.get(each.key, each.absent),
            (*each.names, *(f"fsdp_{n}" for n in (each.key, *each.names))),
        )
        for each in PLUGIN
    ),
    signs=("fsdp_version", "fsdp_transformer_layer_cls_to_wrap", "transformer_layer_cls_to_wrap", "auto_wrap_policy"),
)
