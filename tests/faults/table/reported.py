"""Programs that people reported of FSDP2, rebuilt small: right, or an error with the object and the cure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.faults.actions import Action
from tests.faults.cases import PLAIN, Case, Outcome, Raises, Setup, Warns, at
from tests.faults.deeds import reported as do
from tests.faults.table.misuse import BF16, BF16_PLAIN, MIXED
from tests.threads.programs import of_blocks

IGNORED = Setup(ignored=("head.bias",), averaged=True)
HEADED = Setup(model=do.Headed, units=("body", "head"))


def _case(name: str, does: str, expected: Outcome, setup: Setup, *struck: Any, fast: bool = False) -> Case:
    return Case(f"reported/{name}", does, expected, struck, setup, fast=fast)


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
)

CASES: tuple[Case, ...] = (*CONTAINERS, *MODELS, *WEIGHTS, *OPTIMIZERS)
