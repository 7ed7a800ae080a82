"""DeepSpeed's JSON with `zero_optimization`. Sources: DeepSpeed's documentation; seed 000's names of the levels.

DeepSpeed holds half-precision parameters and float32 master copies in its optimizer; here parameters are in float32,
and are gathered in the low precision.
"""

from __future__ import annotations

from ..verdict import DROPPED, EQUIVALENT, EXACT, LOSSY, UNSUPPORTED
from .rules import (
    ANY,
    COPIES,
    DTYPE,
    GIVEN,
    MICRO,
    MODE,
    NUMBER,
    OFFLOAD,
    PIN,
    REDUCE,
    REPLICATED,
    RESHARD,
    SHARD,
    TABLE,
    WHOLE,
    Case,
    Format,
    Rule,
    dropped,
    rule,
    switch,
)

_SCALER = "loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale".split()
_ZERO = "zero_optimization."
_BUCKETS = "model.set_memory_budget(gradients=..., prefetch=...) limits bytes in flight"
# Of the trainer.
BATCH, CLIP = "training.global_batch", "training.clip_norm"
_AUTO = Case("auto", DROPPED, {}, "the Trainer's own value")
_LOW = (
    "build the model in float32: parameters are the master copies; gradients are reduced in the low precision, as there"
)


def _in_zero(*rules: Rule) -> tuple[Rule, ...]:
    return tuple(Rule(f"{_ZERO}{r.key}", r.cases, r.absent, tuple(f"{_ZERO}{n}" for n in r.names)) for r in rules)


def _offload(key: str) -> tuple[Rule, ...]:
    both = "parameters and optimizer state go together: shards, gradients and state in host memory"
    return (
        rule(
            f"{key}.device",
            Case("none", EXACT, {}, "the default"),
            Case("cpu", EXACT if key == "offload_param" else EQUIVALENT, {OFFLOAD: True}, both),
            Case("nvme", UNSUPPORTED, {}, "there is no offload to disks"),
        ),
        rule(
            f"{key}.pin_memory",
            Case(True, EXACT, {}, "the default"),
            Case(False, EXACT, {PIN: False}, "pageable host memory"),
        ),
        dropped(f"{key}.buffer_count", "of DeepSpeed's own buffers"),
        dropped(f"{key}.buffer_size", "of DeepSpeed's own buffers"),
        dropped(f"{key}.max_in_cpu", "of DeepSpeed's own buffers"),
        dropped(f"{key}.fast_init", "of disks"),
        dropped(f"{key}.pipeline_read", "of disks"),
        dropped(f"{key}.pipeline_write", "of disks"),
        rule(f"{key}.nvme_path", Case(ANY, DROPPED, {}, "of disks")),
        rule(
            f"{key}.ratio",
            Case(1, EXACT, {}, "all"),
            Case(1.0, EXACT, {}, "all"),
            Case(NUMBER, LOSSY, {}, "all or nothing"),
        ),
    )


DEEPSPEED = Format(
    "deepspeed",
    "DeepSpeed ZeRO JSON",
    (".json",),
    (
        rule(
            f"{_ZERO}stage",
            Case(0, EXACT, REPLICATED, "a copy on each rank, gradients averaged, as DDP"),
            Case(1, EQUIVALENT, {RESHARD: False}, "gradients are sharded too: the same values in less memory"),
            Case(2, EXACT, {RESHARD: False}, "full parameters stay until backward"),
            Case(3, EXACT, {RESHARD: "default"}, "parameters, gradients and state are sharded"),
            absent=0,
        ),
        *_in_zero(
            *_offload("offload_param"),
            *_offload("offload_optimizer"),
            rule(
                "zero_hpz_partition_size",
                Case(1, EXACT, {}, "the default"),
                Case(WHOLE, EXACT, {RESHARD: GIVEN}, "ZeRO++ hpZ: kept on this many ranks after forward", forces=True),
            ),
            rule(
                "mics_shard_size",
                Case(-1, EXACT, {}, "the default"),
                Case(WHOLE, EXACT, {SHARD: GIVEN, COPIES: -1}, "MiCS: this many ranks share a copy"),
            ),
            dropped("mics_hierarchical_params_gather", "gathers stay within a copy"),
            switch("zero_quantized_weights", LOSSY, {}, "gathers are in the compute dtype; see float8 of torchao"),
            switch("zero_quantized_gradients", LOSSY, {}, "gradients are reduced in precision.reduce"),
            switch("zero_quantized_nontrainable_weights", LOSSY, {}, "see QLoRA: docs/ecosystem.md"),
            *(
                dropped(name, _BUCKETS)
                for name in (
                    "allgather_bucket_size",
                    "reduce_bucket_size",
                    "stage3_prefetch_bucket_size",
                    "stage3_max_live_parameters",
                    "stage3_max_reuse_distance",
                    "sub_group_size",
                )
            ),
            rule(
                "stage3_param_persistence_threshold",
                Case("auto", DROPPED, {}, "the Trainer's own value"),
                Case(
                    NUMBER,
                    EQUIVALENT,
                    {},
                    "set_memory_budget(resident=...) keeps whole units by bytes; values are the same",
                ),
            ),
            dropped(
                "stage3_gather_16bit_weights_on_model_save", "fullshard checkpoint export --to hf writes whole weights"
            ),
            dropped(
                "stage3_gather_fp16_weights_on_model_save", "fullshard checkpoint export --to hf writes whole weights"
            ),
            *(
                dropped(name, "done without it")
                for name in (
                    "allgather_partitions",
                    "reduce_scatter",
                    "overlap_comm",
                    "contiguous_gradients",
                    "round_robin_gradients",
                    "ignore_unused_parameters",
                    "memory_efficient_linear",
                    "load_from_fp32_weights",
                    "elastic_checkpoint",
                    "use_all_reduce_for_fetch_params",
                    "stage3_use_all_reduce_for_fetch_params",
                    "legacy_stage1",
                    "override_module_apply",
                    "log_trace_cache_warnings",
                    "param_persistence_threshold",
                    "model_persistence_threshold",
                )
            ),
            switch("cpu_offload", EQUIVALENT, {OFFLOAD: True}, "shards, gradients and state in host memory"),
            switch("cpu_offload_params", EXACT, {OFFLOAD: True}, "shards, gradients and state in host memory"),
        ),
        rule(
            "bf16.enabled",
            Case("auto", DROPPED, {}, "the Trainer's own value: give precision.mode"),
            Case(True, EQUIVALENT, {MODE: "PURE", DTYPE: "bfloat16"}, _LOW),
            Case(False, EXACT, {}, "the default"),
            names=("bfloat16.enabled",),
        ),
        rule(
            "fp16.enabled",
            Case("auto", DROPPED, {}, "the Trainer's own value: give precision.mode"),
            Case(
                True, EQUIVALENT, {MODE: "PURE", DTYPE: "float16"}, f"{_LOW}; scale the loss with fullshard.GradScaler"
            ),
            Case(False, EXACT, {}, "the default"),
        ),
        *(dropped(f"fp16.{name}", "an argument of fullshard.GradScaler") for name in _SCALER),
        dropped("fp16.auto_cast", "inputs of units are cast anyway"),
        dropped("bf16.immediate_grad_update", "of DeepSpeed's own optimizer"),
        rule(
            "communication_data_type",
            Case("fp32", EXACT, {REDUCE: "float32"}, "dtype in which gradients are averaged"),
            Case("bf16", EXACT, {REDUCE: "bfloat16"}, "dtype in which gradients are averaged"),
            Case("bfp16", EXACT, {REDUCE: "bfloat16"}, "dtype in which gradients are averaged"),
            Case("fp16", EXACT, {REDUCE: "float16"}, "dtype in which gradients are averaged"),
            Case(None, EXACT, {}, "that of compute"),
        ),
        rule(
            "train_micro_batch_size_per_gpu",
            _AUTO,
            Case(WHOLE, EXACT, {MICRO: GIVEN}, "samples of a rank in one forward"),
        ),
        rule(
            "train_batch_size",
            _AUTO,
            Case(WHOLE, EQUIVALENT, {}, "give each step this many samples over all ranks", trains={BATCH: GIVEN}),
        ),
        rule(
            "gradient_accumulation_steps",
            _AUTO,
            Case(1, EXACT, {}, "a step for each micro-batch"),
            Case(
                WHOLE,
                LOSSY,
                {},
                "no setting accumulates: give fullshard.MicroBatches this many micro-batches in one batch",
            ),
        ),
        rule(
            "gradient_clipping",
            _AUTO,
            Case(0, EXACT, {}, "the default: nothing is clipped"),
            Case(0.0, EXACT, {}, "the default: nothing is clipped"),
            Case(
                NUMBER,
                LOSSY,
                {},
                "no setting clips: call fullshard.clip_grad_norm_(model.parameters(), value) before the step",
                trains={CLIP: GIVEN},
            ),
        ),
        rule(
            "gradient_predivide_factor",
            Case(1.0, EXACT, {}, "the default"),
            Case(1, EXACT, {}, "the default"),
            Case(NUMBER, LOSSY, {}, "see set_gradient_divide_factor: docs/reductions.md"),
        ),
        switch("prescale_gradients", EQUIVALENT, {}, "gradients are summed and divided once, in precision.reduce"),
        rule(
            "sparse_gradients",
            Case(True, UNSUPPORTED, {}, "sparse gradients are not reduced"),
            Case(False, EXACT, {}, "the default"),
        ),
        rule(
            "activation_checkpointing", Case(TABLE, LOSSY, {}, "an API of DeepSpeed's; see activation_checkpointing.at")
        ),
        dropped("optimizer", "built by your program, before or after sharding"),
        dropped("scheduler", "built by your program"),
        *(
            dropped(name, "of DeepSpeed's own output")
            for name in (
                "steps_per_print",
                "wall_clock_breakdown",
                "dump_state",
                "tensorboard",
                "wandb",
                "csv_monitor",
                "comms_logger",
                "flops_profiler",
                "memory_breakdown",
            )
        ),
        *(
            dropped(name, "any optimizer over shards works")
            for name in ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer")
        ),
        rule("amp", Case(TABLE, UNSUPPORTED, {}, "apex; give precision.mode")),
        rule(
            "elasticity", Case(TABLE, UNSUPPORTED, {}, "checkpoints load at any number of ranks: docs/checkpoints.md")
        ),
        dropped("aio", "of disks"),
        dropped("checkpoint", "checkpoints load at any number of ranks: docs/checkpoints.md"),
        dropped("data_types", "gradients are accumulated in precision.reduce"),
        dropped("seq_parallel_communication_data_type", "of another parallelism"),
        dropped("disable_allgather", "done without it"),
        dropped("fp32_allreduce", "set precision.reduce"),
    ),
    signs=("zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer"),
)
