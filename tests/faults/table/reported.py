"""Programs that people reported of FSDP2, rebuilt small: right, or an error with the object and the cure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tests.faults.actions import Action, poison
from tests.faults.cases import PLAIN, Case, Equal, Outcome, Raises, Setup, Warns, at
from tests.faults.deeds import pipelines
from tests.faults.deeds import reported as do
from tests.faults.program import Run
from tests.faults.table.misuse import BF16, BF16_PLAIN, MIXED
from tests.threads.programs import of_blocks

IGNORED = Setup(ignored=("head.bias",), averaged=True)
HEADED = Setup(model=do.Headed, units=("body", "head"))


def _case(name: str, does: str, expected: Outcome, setup: Setup, *struck: Any, fast: bool = False) -> Case:
    return Case(f"reported/{name}", does, expected, struck, setup, fast=fast)


def _program(
    name: str,
    does: str,
    expected: Outcome,
    program: Callable[[Run], None],
    *struck: Any,
    setup: Setup = Setup(),  # noqa: B008, it is frozen
) -> Case:
    return Case(f"reported/{name}", does, expected, struck, setup, program)


def _refused(
    name: str,
    does: str,
    event: str,
    action: Action,
    error: str,
    *words: str,
    setup: Setup = Setup(),  # noqa: B008, it is frozen
    step: int = -1,
    fast: bool = False,
) -> Case:
    return _case(name, does, Raises(error, words), setup, at(step, event, action), fast=fast)


def _notes(write: Any, make: Any, wanted: Any, after: Any = None) -> Setup:
    return replace(BF16, model=do.noting(write, after), loss=do.notes_are(make, wanted))


def _a_list() -> Any:
    return [torch.zeros(1)]


CONTAINERS = (
    _case(
        "list_of_losses",
        "each block appends its balance loss to a list with a float32 tensor, bfloat16",
        BF16_PLAIN,
        _notes(do.append, _a_list, lambda notes: len(notes) == 4),
        fast=True,
    ),
    _case(
        "counter_in_a_dataclass",
        "each block counts in a dataclass with a float32 tensor, bfloat16",
        BF16_PLAIN,
        _notes(do.count, lambda: do.State(torch.zeros(1)), lambda notes: notes.seen == 3),
    ),
    _case(
        "cache_in_a_dict",
        "each block reads what the block before wrote into a dict, bfloat16",
        BF16_PLAIN,
        _notes(do.hand_on, lambda: {"table": torch.zeros(1)}, lambda notes: len(notes) == 4),
    ),
    _case(
        "cast_tensor_edited",
        "a block edits the cast tensor in a list in place",
        Raises("RuntimeError", ("root", r"notes\[0\]", "assign a new tensor", "cast_forward_inputs=False")),
        _notes(do.edit, _a_list, lambda notes: True),
    ),
    _case(
        "argument_edited",
        "a block edits a cast argument in place",
        Warns(("root", "the tensor notes", "edited in place", "cast_forward_inputs=False")),
        _notes(lambda index, x, notes: notes.add_(1.0), lambda: torch.zeros(1), lambda notes: True),
    ),
)

MODELS = (
    _refused(
        "padding_row",
        "to_empty and reset_parameters, with an embedding that has a row of padding",
        "wrapped",
        do.by_the_guide,
        "RuntimeError",
        r"embedding\.weight: row 0 \(padding_idx\)",
        "materialize",
        setup=Setup(model=do.Padded),
    ),
    _case("first_base_is_abstract", "the first base of the model is an ABC mixin", PLAIN, Setup(model=do.OfMixin)),
    _case("first_base_is_generic", "the first base of the model is Generic", PLAIN, Setup(model=do.OfGeneric)),
    _case("first_base_is_a_protocol", "the first base of the model is a Protocol", PLAIN, Setup(model=do.OfProtocol)),
    _refused(
        "average_of_weights",
        "AveragedModel of a sharded model",
        "ready",
        do.copied_average,
        "AssertionError",
        "deepcopy",
        "before fully_shard|first",
        r"state_dict\(\)",
    ),
    _refused(
        "copy_in_a_list",
        "copy.deepcopy of a list with a sharded model",
        "ready",
        do.copied_list,
        "AssertionError",
        "deepcopy",
        r"state_dict\(\)",
    ),
    _refused(
        "ddp_around",
        "DistributedDataParallel around the sharded model",
        "wrapped",
        do.ddp(""),
        "RuntimeError",
        r"embedding\.weight",
        "fully_shard on the whole model",
        "mesh of two axes",
        fast=True,
    ),
    _refused(
        "ddp_around_a_part",
        "DistributedDataParallel around one of its units",
        "wrapped",
        do.ddp("layers.1"),
        "RuntimeError",
        r"norm\.weight|up\.weight",
        "fully_shard on the whole model",
    ),
)

WEIGHTS = (
    _case(
        "weight_after_forward",
        "a loss reads the head's weight after the forward of the model",
        Raises("RuntimeError", (MIXED, r"head\.weight of unit head", "unit_open")),
        replace(HEADED, loss=do.after_forward),
        fast=True,
    ),
    _case(
        "weight_after_forward_guarded",
        "the same inside of a guard",
        Raises("RuntimeError", (MIXED, r"head\.weight of unit head", "unit_open")),
        replace(HEADED, loss=do.after_forward, guard=True),
    ),
    _case("weight_of_an_open_unit", "the same with its unit open", PLAIN, replace(HEADED, loss=do.opened)),
)

OPTIMIZERS = (
    *(
        _case(
            f"{how}_over_both",
            f"a step with {how}=True over plain and sharded parameters",
            Raises(
                "RuntimeError", (r"AdamW\.step", r"embedding\.weight", r"head\.bias", "step_on_shards", f"{how}=False")
            ),
            replace(IGNORED, optimizer=do.adamw(**{how: True})),
        )
        for how in ("foreach", "fused")
    ),
    _case("foreach_on_shards", "the same after step_on_shards", PLAIN, replace(IGNORED, optimizer=do.on_shards)),
    _refused(
        "torch_clip_of_both",
        "torch's clip_grad_norm_ over plain and sharded parameters",
        "gradients",
        do.torch_clip,
        "RuntimeError",
        MIXED,
        r"embedding\.weight is sharded, and .*head\.bias",
        r"fullshard\.clip_grad_norm_",
        setup=IGNORED,
        step=1,
    ),
    _refused(
        "torch_clip_of_values_of_both",
        "torch's clip_grad_value_ over plain and sharded parameters",
        "gradients",
        do.torch_clip_values,
        "RuntimeError",
        MIXED,
        r"embedding\.weight is sharded, and .*head\.bias",
        setup=IGNORED,
        step=1,
    ),
    _case("clip_of_both", "fullshard's clip_grad_norm_ over the same", PLAIN, replace(IGNORED, clip=True)),
    _case(
        "muon_over_one_row",
        "torch's Muon over a matrix of one row",
        Raises("RuntimeError", (r"Muon\.step", r"layers\.0\.gate\.weight", "AdamW", "shard dim 1")),
        Setup(model=of_blocks(do.Gated), optimizer=do.muon),
    ),
    Case(
        "reported/no_loss_on_a_rank",
        "rank 1 has no labels, and a zero of its own as loss",
        Raises(
            "RuntimeError", (r"AdamW\.step", "found none after a forward", r"\(output \* 0\)\.sum\(\)"), on="struck"
        ),
        (at(1, "loss", do.fresh_zero, rank=1),),
    ),
    Case(
        "reported/parameters_beside_the_model",
        "the optimizer has a second model that nothing shards",
        Raises("RanksDisagree", (r"Linear\.weight", "beside the model", "fully_shard"), within=20.0),
        (at(-1, "ready", do.other_head),),
        Setup(steps=20, loss=do.into_other_head),
    ),
    _refused(
        "adapters_added_after",
        "adapters are added to a frozen base after fully_shard, and nothing averages their gradients",
        "wrapped",
        do.adapted,
        "RanksDisagree",
        r"layers\.0\.up\.b\.weight",
        r"and .*layers\.1\.up\.b\.weight",
        "get_peft_model first",
        "average its gradients",
        fast=True,
    ),
    _case(
        "adapters_averaged",
        "the same where the loop averages their gradients",
        PLAIN,
        Setup(averaged=True),
        at(-1, "wrapped", do.adapted),
    ),
)

NUMBERS = (
    _program(
        "nan_in_one_rank_s_rows",
        "the loop skips an update where it counts NaN in gradients, and rank 1's rows have one",
        Raises("RanksDisagree", ("optimizer step", "rank 1", r"fullshard\.grad_stats", "isnan")),
        do.own_loop(do.no_nan_here),
        at(1, "gradients", poison("head.weight", float("nan")), rank=1),
    ),
    _program(
        "figures_of_gradients",
        "the loop asks fullshard.grad_stats for NaN, and scales each gradient by its norm of there",
        PLAIN,
        do.own_loop(do.clipped_by_figures),
    ),
)

PIPED = Setup(world=4, model=pipelines.stages)
KEPT = (r"splits the backward", r"reshard_after_forward=False")
PIPELINES = (
    _program(
        "dual_pipe_v",
        "a pipeline by DualPipeV, over stages that are freed after forward",
        Raises("RuntimeError", KEPT, on=(0, 1)),  # a stage's neighbours get what gloo says of a closed connection
        pipelines.trains("ScheduleDualPipeV"),
        setup=PIPED,
    ),
    _program(
        "dual_pipe_v_kept",
        "the same over stages that stay full",
        PLAIN,
        pipelines.trains("ScheduleDualPipeV", reshard=False),
        setup=PIPED,
    ),
    _program(
        "looped_bfs",
        "a pipeline by LoopedBFS, over stages that are freed after forward",
        PLAIN,
        pipelines.trains("ScheduleLoopedBFS"),
        setup=PIPED,
    ),
    _program(
        "clip_in_a_pipeline",
        "clip_grad_norm_ in a pipeline, which nothing is said of",
        PLAIN,
        pipelines.trains("ScheduleInterleaved1F1B", clip=pipelines.clip),
        setup=PIPED,
    ),
    _program(
        "clip_over_an_axis",
        "the same with the pipeline's axis in groups=",
        PLAIN,
        pipelines.trains("ScheduleInterleaved1F1B", clip=pipelines.clip_over_the_axis),
        setup=PIPED,
    ),
    _program(
        "clip_of_each_stage",
        "a call of clip_grad_norm_ for each of two stages of a rank",
        Warns(("clip_grad_norm_", "all 2 stages", "pass the parameters of all of them in one call")),
        pipelines.trains("ScheduleInterleaved1F1B", clip=pipelines.clip_each_stage),
        setup=PIPED,
    ),
    _program(
        "checkpoint_of_a_pipeline",
        "a pipeline's checkpoint, loaded by the whole model on four ranks",
        Equal(),
        pipelines.trains("ScheduleInterleaved1F1B"),
        at(2, "trained", pipelines.load_in_one_piece),
        setup=PIPED,
    ),
)

CASES: tuple[Case, ...] = (*CONTAINERS, *MODELS, *WEIGHTS, *OPTIMIZERS, *NUMBERS, *PIPELINES)
