"""torchtitan's TOML, as it was until February 2026, when its configuration became Python. Sources: torchtitan's
`job_config` of 2024 and 2025; seed 000.
"""

from __future__ import annotations

from ..verdict import DROPPED, EQUIVALENT, EXACT, LOSSY, UNSUPPORTED
from .rules import (
    AC,
    COPIES,
    GIVEN,
    OFFLOAD,
    PARAM,
    REDUCE,
    RESHARD,
    SHARD,
    TEXT,
    WHOLE,
    Case,
    Format,
    Rule,
    dropped,
    rule,
    switch,
)

_OTHER = "apply it to the model first, then shard over the data-parallel axis of the same mesh"
_EVERY, _SAVE = "activation_checkpointing.every", "activation_checkpointing.save"
# What selective checkpointing of single operators keeps in torchtitan: products and attention.
_KEPT = [
    "aten.mm",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_flash_attention",
]


def _degree(key: str, *, names: tuple[str, ...] = ()) -> Rule:
    return rule(key, Case(1, EXACT, {}, "the default"), Case(WHOLE, UNSUPPORTED, {}, _OTHER), names=names)


def _dtypes(key: str, setting: str, reason: str, absent: str) -> Rule:
    cases = tuple(Case(name, EXACT, {setting: name}, reason) for name in ("bfloat16", "float32", "float16"))
    return Rule(key, cases, absent)


TITAN = Format(
    "torchtitan",
    "torchtitan TOML",
    (".toml",),
    (
        rule(
            "parallelism.data_parallel_shard_degree",
            Case(WHOLE, EXACT, {SHARD: GIVEN}, "ranks that share one copy of the state; -1 = all that are left"),
            names=("training.data_parallel_shard_degree", "training.data_parallel_degree"),
        ),
        rule(
            "parallelism.data_parallel_replicate_degree",
            Case(WHOLE, EXACT, {COPIES: GIVEN}, "number of copies (HSDP)"),
            names=("training.data_parallel_replicate_degree",),
        ),
        rule(
            "parallelism.fsdp_reshard_after_forward",
            Case("default", EXACT, {RESHARD: "default"}, "all but the root's, without pipelines"),
            Case("always", EXACT, {RESHARD: "always"}, "freed after forward"),
            Case("never", EXACT, {RESHARD: "never"}, "full parameters stay until backward"),
        ),
        switch(
            "parallelism.enable_fsdp_symm_mem", LOSSY, {}, "set_allocate_memory_from_process_group_for_comm, on NCCL"
        ),
        switch("parallelism.enable_compiled_autograd", DROPPED, {}, "not needed"),
        _degree("parallelism.tensor_parallel_degree", names=("training.tensor_parallel_degree",)),
        _degree("parallelism.pipeline_parallel_degree", names=("experimental.pipeline_parallel_degree",)),
        _degree("parallelism.context_parallel_degree", names=("experimental.context_parallel_degree",)),
        _degree("parallelism.expert_parallel_degree"),
        _degree("parallelism.expert_tensor_parallel_degree"),
        *(
            dropped(f"parallelism.{name}", "of another parallelism")
            for name in (
                "enable_async_tensor_parallel",
                "disable_loss_parallel",
                "enable_sequence_parallel",
                "pipeline_parallel_schedule",
                "pipeline_parallel_schedule_csv",
                "pipeline_parallel_split_points",
                "pipeline_parallel_layers_per_stage",
                "pipeline_parallel_first_stage_less_layers",
                "pipeline_parallel_last_stage_less_layers",
                "pipeline_parallel_microbatch_size",
                "pipeline_parallel_expert_parallel_overlap",
                "context_parallel_rotate_method",
                "context_parallel_load_balancer",
                "module_fqns_per_model_part",
                "spmd_backend",
            )
        ),
        switch(
            "training.enable_cpu_offload",
            EXACT,
            {OFFLOAD: True},
            "shards, gradients and optimizer state in host memory",
        ),
        _dtypes("training.mixed_precision_param", PARAM, "dtype of compute", "bfloat16"),
        _dtypes("training.mixed_precision_reduce", REDUCE, "dtype in which gradients are averaged", "float32"),
        rule(
            "training.dtype",
            Case("float32", EXACT, {}, "parameters are built in it"),
            Case(TEXT, EQUIVALENT, {}, "build the model in this dtype; a config does not change it"),
        ),
        rule(
            "activation_checkpoint.mode",
            Case("none", EXACT, {AC: "none"}, "nothing is recomputed"),
            Case("full", EXACT, {AC: "units"}, "each block is recomputed"),
            Case("selective", EXACT, {AC: "units"}, "see selective_ac_option"),
            Case("memory_budget", UNSUPPORTED, {}, "the compiler's; choose full or selective"),
            absent="selective",
        ),
        rule(
            "activation_checkpoint.selective_ac_option",
            Case(
                "op",
                EQUIVALENT,
                {_SAVE: _KEPT},
                "products and attention are kept; torchtitan recomputes every other product",
            ),
            Case(WHOLE, EXACT, {_EVERY: GIVEN}, "every n-th block"),
            absent="2",
        ),
        *(
            dropped(f"activation_checkpoint.{name}", "of torchtitan's own wrapper")
            for name in (
                "per_op_sac_force_recompute_mm_shapes_by_fqns",
                "early_stop",
                "preserve_rng_state",
                "determinism_check",
                "debug",
                "memory_budget",
                "visualize_memory_budget_pareto",
            )
        ),
    ),
    signs=("parallelism", "activation_checkpoint", "job", "lr_scheduler"),
    elsewhere=tuple(
        "job profiling metrics model optimizer lr_scheduler training checkpoint compile validation comm debug float8 "
        "mx quantize fault_tolerance experimental memory_estimation quantization custom_config".split()
    ),
)
