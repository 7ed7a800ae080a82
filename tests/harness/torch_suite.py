# ruff: noqa: E501  (a table)
"""Torch's own test classes of FSDP2, what their tests check, and which tests here check it for both implementations.

The classes are those of pytorch's test/distributed/_composable/fsdp. Nothing of theirs is copied: the tests here were
written from what they are about. `docs/torch-suite.md` is written from this table, `python -m tests.harness.torch_suite
--write`; tests/pure/test_torch_suite.py holds it against the tests that are there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "torch-suite.md"


@dataclass(frozen=True)
class Row:
    """`both`: tests here that run for torch and for ours; `ours`: for ours alone, and `why`."""

    area: str
    theirs: str
    checks: str
    both: tuple[str, ...]
    ours: tuple[str, ...] = ()
    why: str = ""


_BASIC, _TRAINING = "threads/test_conformance_basic.py::test_", "threads/test_conformance_training.py::test_"
_STATE, _SUITE = "threads/test_conformance_basic.py::test_", "threads/test_conformance_suite.py::test_"
_SURFACE, _CALLS = "fake/test_conformance_surface.py::test_", "threads/test_surface_calls.py::test_"
_MESSAGES = "procs/test_conformance_messages.py::test_"
_CONTROLS, _HSDP = "threads/test_reduction_controls.py::test_", "threads/test_hsdp.py::test_"
_DICTS, _TP = "threads/test_state_dicts.py::test_", "threads/test_tensor_parallel.py::test_"
_PROGRAMS = "threads/test_programs.py::test_equals_the_plain_model"
_PRIVATE = "functions inside of torch: there is no such thing to call here"

ROWS = (
    # training
    Row("training", "ForwardInputs", "inputs of the root go to the device", (_STATE + "inputs_are_left_alone_when_asked",),
        ("gpu/test_one_device.py::test_training_equals_the_plain_model",),
        "on a CPU there is nowhere to go; on the simulated device and on a GPU, ours alone"),
    Row("training", "RegisteredParams", "which parameters are registered after forward and after backward",
        (_BASIC + "registered_parameters_between_forward_and_backward", _BASIC + "set_reshard_after_forward_and_backward")),
    Row("training", "CastAfterInit", "`.to(float64)` after sharding", ("threads/test_initialisation.py::test_conversions_after_sharding",)),
    Row("training", "1DTrainingCore",
        "parity in one group and several, any dim, offload, units gathered explicitly, units inside run alone, a module run "
        "several times, prefetch lists, the optimizer's event",
        (_TRAINING + "training_with_adamw_equals_the_plain_model", "threads/test_strategies.py::test_strategies",
         "threads/test_shard_dims.py::test_any_dim_trains_clips_and_saves_as_plain_training",
         "threads/test_offload.py::test_on_a_cpu_mesh_offload_changes_nothing", _SUITE + "units_gathered_by_hand",
         _SUITE + "a_unit_inside_runs_alone", _PROGRAMS,
         _BASIC + "explicit_prefetch_changes_no_value", _CALLS + "the_event_of_the_optimizer_is_used_once")),
    Row("training", "1DTrainingCompose", "activation checkpointing, by function and by wrapper",
        (_PROGRAMS, "threads/test_at_home.py::test_checkpoint_wrapper")),
    Row("training", "ShardPlacementFn", "placements by shape; parameters and gradients are contiguous",
        ("threads/test_shard_dims.py::test_any_dim_trains_clips_and_saves_as_plain_training", _SUITE + "shards_are_contiguous",
         "threads/test_shard_dims.py::test_wrong_answers_are_refused")),
    Row("training", "SharedParams", "shared modules and weights train as plain ones",
        (_TRAINING + "training_with_adamw_equals_the_plain_model", "threads/test_surface_lists.py::test_a_list_holds_tied_weights_together")),
    Row("training", "GradientAccumulation", "accumulation with and without messages, and in a pipeline's order",
        (_TRAINING + "accumulation_without_synchronisation", _HSDP + "accumulation_without_all_reduce",
         _SUITE + "one_forward_one_backward", _CALLS + "a_pipeline_stage_reduces_by_hand", _CALLS + "set_is_last_backward")),
    Row("training", "NDTraining, HSDP3DTraining", "beside tensor parallelism, with replicas too",
        (_TP + "training_with_tensor_parallelism_is_that_of_the_plain_model",
         "threads/test_full_mesh.py::test_hybrid_sharding_and_tensor_parallelism")),
    Row("training", "PerParamMesh (in PerParamMeshOverlap and PerParamMeshMemory)", "parameters of a unit on meshes of their own; overlap and memory of their messages",
        ("threads/test_shard_meshes.py::test_experts_average_over_their_own_mesh", "threads/test_strategies.py::test_a_mesh_per_parameter"),
        ("procs/test_overlap.py::test_gradients_travel_while_the_next_unit_computes", "device/test_memory.py::test_the_peak_is_what_the_report_says"),
        "overlap and memory: as below, Overlap and Memory"),
    Row("training", "HSDPTraining", "parity on meshes that replicate",
        (_HSDP + "training_equals_the_plain_model", _HSDP + "mixed_precision")),
    Row("training", "CustomForwardMethod", "registered methods",
        ("threads/test_surface_calls.py::test_a_registered_method_trains",
         "threads/test_surface_calls.py::test_a_registered_method_casts_and_runs_without_gradients")),
    Row("training", "ShareCommContext", "roots that share", (_CALLS + "models_that_share_train_as_before",)),
    Row("training", "WorldSize1", "one rank trains as the plain model",
        (_TRAINING + "training_with_adamw_equals_the_plain_model", _SUITE + "gradients_in_a_world_of_one")),
    # communication
    Row("communication", "CollectiveOps", "copies into and out of messages", (), ("threads/test_numbers.py::test_",), _PRIVATE),
    Row("communication", "Communication", "how many messages a step takes; explicit resharding; divide factors",
        (_MESSAGES + "messages_of_a_step", _MESSAGES + "messages_of_accumulation", _MESSAGES + "messages_of_a_frozen_unit",
         _MESSAGES + "resharded_by_hand", _CONTROLS + "the_former_name_of_the_divide_factor")),
    Row("communication", "Prefetch", "lists take effect; units that are unused or change their order are gathered and freed",
        (_CALLS + "prefetch_lists_have_an_effect", _BASIC + "explicit_prefetch_changes_no_value",
         _SUITE + "units_that_change_their_order"),
        ("fake/test_prefetch_trace.py::test_a_backward_issues_the_next_gather_before_its_own_compute",),
        "torch's events are private; ours are read from the trace"),
    Row("communication", "Unshard", "`unshard` at any time, asynchronous, without parameters, before the first forward",
        (_BASIC + "unshard_and_reshard", _SUITE + "unshard_without_parameters", _SUITE + "units_gathered_by_hand")),
    Row("communication", "AllocFromPG", "messages in memory of the process group; messages of one's own",
        (_CONTROLS + "custom_messages",), (_CONTROLS + "messages_in_memory_of_the_process_group",),
        "no group of a CPU allocates; a simulated one is used for ours"),
    Row("communication", "ForceSumReduction, ReduceOpWorldSize1", "sums instead of averages; a world of one",
        (_SUITE + "gradients_in_a_world_of_one", _CONTROLS + "separate_reduce_scatter_group", _CONTROLS + "all_reduce_hook"),
        (_CONTROLS + "scales_are_those_of_torch",), "compares both itself"),
    # state dict
    Row("state dict", "StateDictMultiProcess", "saving and loading, sharded and full, with offload, replicas and tensor parallelism",
        (_STATE + "state_dict_is_sharded_and_needs_no_communication",
         _DICTS + "the_next_steps_after_loading_are_those_of_plain_training",
         "threads/test_tensor_parallel.py::test_full_state_dicts_go_out_and_come_back")),
    Row("state dict", "StateDictMultiThread", "state dicts at any moment; full ones on rank 0 alone",
        (_DICTS + "state_dicts_are_sharded_at_any_moment_without_a_message", _DICTS + "saved_values_are_those_of_this_rank_and_no_more"),
        ("procs/test_state_dcp.py::test_a_checkpoint_is_read_on_another_world_and_by_the_other_library",), "uses both libraries itself"),
    # clip
    Row("clip", "ClipGradNorm (1-D, 2-D)", "the global norm and what is left, over one axis and two",
        (_TRAINING + "clipping_by_the_global_norm", _HSDP + "clipping", "threads/test_at_home.py::test_clipping_functions_of_torch")),
    # frozen
    Row("frozen", "Frozen", "frozen in a unit, across units, run twice, recomputed; nothing of them is reduced",
        (_SUITE + "frozen_parts_that_run_twice", _TRAINING + "requires_grad_may_be_switched_between_steps",
         _MESSAGES + "messages_of_a_frozen_unit", "threads/test_precision.py::test_a_frozen_parameter_of_another_dtype"),
        (_SUITE + "frozen_parts_in_reentrant_recomputation",), "torch's gradients are wrong there"),
    # extensions
    Row("extensions", "AllGatherExtensions", "tensor subclasses with pre- and post-all-gather: parity, replicas, offload",
        ("threads/test_extensions.py::test_training_through_the_methods", "threads/test_combinations.py::test_extensions_on_a_mesh_that_replicates",
         "threads/test_combinations.py::test_extensions_and_offload")),
    # mixed precision
    Row("mixed precision", "MixedPrecisionTraining", "dtypes of computing and reducing, accumulation in the reduce dtype",
        (_STATE + "mixed_precision_dtypes", _STATE + "reduction_in_float32_of_bfloat16_gradients",
         _SUITE + "held_gradients_add_up_in_the_reduce_dtype", "threads/test_precision.py::test_the_fields_of_a_policy")),
    Row("mixed precision", "MixedPrecisionCasts", "one unit in another dtype, inputs from outside, norms, inputs in containers",
        (_SUITE + "one_unit_in_float16", _SUITE + "norms_in_float32", _STATE + "inputs_are_left_alone_when_asked",
         "threads/test_precision.py::test_inputs_and_outputs_are_cast_in_any_container")),
    Row("mixed precision", "GradientScaler", "an overflow on one rank is a skipped step on all",
        ("threads/test_precision.py::test_inf_on_one_shard_skips_on_all_ranks",)),
    # init
    Row("init", "DeviceTensor, DeviceDTensor, MeshArg", "what is refused: devices, meshes without names, too many axes",
        (_SURFACE + "error_types", _SURFACE + "other_error_types", _SURFACE + "the_axes_of_a_mesh_that_replicates_want_names")),
    Row("init", "ManagedModulesAndStates, ParamModuleInfos", "which modules and parameters a unit takes", (),
        ("fake/test_report.py::test_",), _PRIVATE + "; seen from outside by every test of values"),
    Row("init", "ShardedParameterTensor, ShardedParameterDTensor", "shards of plain tensors and of DTensors; scalars and strides that are refused",
        (_BASIC + "parameters_are_dtensors_cut_as_torch_chunk_cuts", _SURFACE + "error_types"),
        (_TP + "placements_and_values_are_those_of_torch",), "compares both itself"),
    Row("init", "LazyInit", "roots are found at the first forward, and names with them",
        (_SUITE + "a_unit_inside_runs_alone", _SURFACE + "other_error_types")),
    Row("init", "MetaDeviceInit", "meta device, one axis and two, values of rank 0 alone",
        ("threads/test_initialisation.py::test_the_flow_of_torch_s_users",
         "threads/test_tensor_parallel.py::test_meta_device_then_both_parallelisms_then_memory"),
        ("procs/test_state_dcp.py::test_what_is_set_is_trained_on",), "broadcast from rank 0, by torch's functions"),
    Row("init", "ProcessGroupInit", "meshes made from process groups", (_SUITE + "meshes_from_process_groups",)),
    Row("init", "HSDPBroadcast", "values sent along the replicas", (_SUITE + "values_sent_along_replicas",)),
    Row("init", "State", "the class, states, what cannot be sharded, copies",
        (_SURFACE + "the_class_is_swapped_in_place", _SURFACE + "slicing_a_sharded_container_gives_a_plain_one",
         _DICTS + "copies_of_parameters_and_refusals_of_copies_of_models")),
    Row("init", "OldImport", "the import of older versions", (), ("threads/test_at_home.py::test_an_unmodified_program_runs_on_fullshard",),
        "`install()` puts ours there"),
    # autograd
    Row("autograd", "Autograd", "unused outputs and modules, outputs in containers",
        (_SUITE + "an_output_that_is_not_used", _SUITE + "units_that_change_their_order",
         _TRAINING + "outputs_in_any_container_reach_backward", _TRAINING + "a_parameter_that_no_rank_used_has_no_gradient")),
    Row("autograd", "PostAccGradHook", "hooks after accumulation; an optimizer in backward",
        (_TRAINING + "hooks_on_sharded_parameters_see_the_reduced_gradient", "threads/test_parameter_hooks.py::test_an_optimizer_in_backward")),
    # 2-D
    Row("2-D", "2DTraining", "beside tensor parallelism: parity, checkpoints in between, offload, clipping",
        (_TP + "training_with_tensor_parallelism_is_that_of_the_plain_model", _TP + "programs_around_tensor_parallelism",
         "threads/test_strategies.py::test_tensor_parallelism")),
    Row("2-D", "2DStateDict", "full state dicts of both parallelisms",
        ("threads/test_tensor_parallel.py::test_full_state_dicts_go_out_and_come_back",)),
    Row("2-D", "DTensor", "`dp_mesh_dims` on a mesh that has all axes: parity, placements, refusals; unused DTensor parameters",
        ("threads/test_full_mesh.py::test_training_on_a_full_mesh",
         "threads/test_hsdp.py::test_replicas_on_a_full_mesh", "threads/test_full_mesh.py::test_refusals",
         _CONTROLS + "reduce_scatter_unused_params")),
    # torch.func
    Row("torch.func", "(no class)", "functional_call, vmap, grad, vjp, jvp, jacrev of a sharded model",
        ("threads/test_programs.py::test_a_use_equals_the_plain_model",),
        ("threads/test_programs.py::test_a_use_equals_the_plain_model_where_torch_fails",
         "threads/test_programs.py::test_forward_mode_equals_the_plain_model_where_torch_fails"),
        "torch fails in some of them, which docs/compatibility.md names"),
    # the rest
    Row("others", "IgnoreParams", "parameters that stay outside, beside DistributedDataParallel",
        (_BASIC + "ignored_parameters_stay_as_they_are",), ("procs/test_at_home_gloo.py::test_fully_shard_of_a_part_under_ddp",),
        "what another data parallelism averages has to be named; torch takes it without a word"),
    Row("others", "Overlap", "messages travel while units compute", (),
        ("procs/test_overlap.py::test_in_forward_the_next_unit_travels_while_this_one_computes",
         "procs/test_overlap.py::test_gradients_travel_while_the_next_unit_computes"),
        "torch's works are synchronous on gloo; streams are tested on the simulated device"),
    Row("others", "Memory", "peaks; a deleted model leaves nothing",
        ("threads/test_models_go.py::test_a_model_that_nobody_holds_is_gone",),
        ("device/test_memory.py::test_the_peak_is_what_the_report_says",), "a CPU has no allocator that tells; the peak is ours on the simulated device"),
    Row("others", "Logging", "torch's log of its units", (), ("fake/test_report.py::test_",), "no such log; `report` and `record` say it"),
    Row("others", "Compile", "blocks and models compiled", (), ("procs/test_compile.py::test_blocks", "procs/test_compile.py::test_whole_models"),
        "compared with plain training; torch's compiled backward is another program"),
)  # fmt: skip


def tests(kind: str = "both") -> Iterator[str]:
    """Ids of all tests of the table; of "both" implementations, or "ours"."""
    for row in ROWS:
        for test in getattr(row, kind):
            yield f"tests/{test}"


def page() -> str:
    lines = [
        "# Torch's tests of FSDP2, and ours",
        "",
        "<!-- Written by `python -m tests.harness.torch_suite --write`: change the table there, not this page. -->",
        "",
        "Each class of pytorch's `test/distributed/_composable/fsdp` (`TestFullyShard...`), what its tests check, and the tests here that",
        "check it: *both* runs for torch's `fully_shard` and for ours from one source, with default settings, ranks being threads and",
        "processes (`make test-full`); *ours* for fullshard alone, for the reason given.",
        "",
    ]
    for area in dict.fromkeys(row.area for row in ROWS):
        lines += [f"## {area[0].upper()}{area[1:]}", "", "| class | checks | both | ours | |", "|---|---|---|---|---|"]
        for row in ROWS:
            if row.area == area:
                both, ours = (", ".join(_link(test) for test in kind) for kind in (row.both, row.ours))
                lines.append(f"| {row.theirs} | {row.checks} | {both} | {ours} | {row.why} |")
        lines.append("")
    return "\n".join(lines)


def _link(test: str) -> str:
    path, _, name = test.partition("::")
    return f"[{name if name != 'test_' else path.rpartition('/')[2]}](../tests/{path})"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(f"usage: python -m tests.harness.torch_suite --write    (writes {PAGE})")
    PAGE.write_text(page())
