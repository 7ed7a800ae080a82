"""Programs that use autograd and the API in every way: right as plain training is, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.faults.actions import Action, evaluate
from tests.faults.cases import PLAIN, Case, Equal, Raises, Setup, at
from tests.faults.deeds import misuse as do
from tests.threads.programs import PROGRAMS, of_blocks

BF16 = Setup(
    options=lambda impl: {
        "mp_policy": impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    }
)
# bfloat16 has 8 bits; the plain run beside it computes in float32.
BF16_PLAIN = Equal("plain", bound=0.1)


# DTensor's words, which name the operation: its operations do not pass through fullshard's code (ADR 0016). Where the
# exception passes a forward, or nobody catches it, a note names the parameter and cures.
MIXED = "mixed torch.Tensor and DTensor"


def _program(name: str) -> Setup:
    """A program of tests/threads/programs.py."""
    program = PROGRAMS[name]
    return Setup(model=program.model, loss=lambda run, tokens: program.loss(run.model, tokens, max(run.step, 0)))


def _same(name: str, does: str, program: str, fast: bool = False) -> Case:
    return Case(f"misuse/{name}", does, PLAIN, setup=_program(program), fast=fast)


def _deed(name: str, does: str, step: int, event: str, action: Action, **more: Any) -> Case:
    """All ranks, and the plain run, do it."""
    return Case(f"misuse/{name}", does, more.pop("expected", PLAIN), (at(step, event, action),), **more)


def _refused(
    name: str, does: str, event: str, action: Action, error: str, *words: str, step: int = 1, **more: Any
) -> Case:
    return Case(f"misuse/{name}", does, Raises(error, words), (at(step, event, action),), **more)


LEGAL = (
    _same("two_losses", "two losses of one output", "two_losses"),
    _same("two_forwards", "two forwards, one backward", "two_forwards_one_backward"),
    _same("double_backward", "a gradient penalty: backward of a gradient", "gradient_penalty", fast=True),
    _same("view_edited", "a block returns a view, which is edited in place", "edited_view_outputs", fast=True),
    _same("opaque_output", "a block returns an object that no traversal looks into", "outputs_in_objects"),
    _same("intermediate", "the loss is made of an intermediate alone", "loss_on_an_intermediate_only", fast=True),
    _same("intermediate_too", "the loss is made of the output and an intermediate", "loss_on_an_intermediate_too"),
    _same("saved_view", "a function of one's own saves a view of a weight", "intermediate_of_a_saved_view"),
    _same("structured_outputs", "blocks return named tuples with dicts of lists", "outputs_in_structures"),
    _same("inputs_without_gradient", "inputs that need no gradient", "inputs_without_gradient"),
    _same("no_grad_first", "a forward without gradients before each step's", "no_grad_first"),
    _same("inference_first", "a forward in inference mode before each step's", "inference_mode_first"),
    _same("unused_layer", "every other step leaves the last layer out", "unused_layer"),
    _same("recompute_reentrant", "reentrant checkpoints around blocks", "recompute_outside_reentrant"),
    _same("recompute_inside", "checkpoints inside of blocks", "recompute_inside"),
    _same("twice_in_a_segment", "a block runs twice inside one reentrant checkpoint", "twice_in_one_reentrant_segment"),
    _same("shared_blocks", "blocks run twice in a forward", "shared_blocks"),
    _same("tied", "embedding and head are one parameter", "tied_weights"),
    _same("frozen", "a unit, and parts of others, are frozen", "frozen"),
    _same("freeze_every_other_step", "weights are frozen and thawed between steps", "freeze_every_other_step"),
    _same("detached_weight", "a weight is used detached", "detached_weight"),
    _same("two_dtypes", "parameters of two dtypes in one unit", "two_dtypes_in_a_unit"),
    _same("returns_a_parameter", "the model returns one of its parameters", "returns_a_parameter"),
    _deed("backward_twice", "backward twice, the first with retain_graph", 1, "loss", do.backward_again),
    Case("misuse/by_keyword", "inputs are given by keyword", PLAIN, setup=Setup(loss=do.by_keyword)),
    _deed(
        "edited_weight", "a held parameter is edited in place between steps", 1, "step", do.halve("layers.1.up.weight")
    ),
    _deed(
        "edited_root_weight",
        "the root's head is edited after an evaluation",
        1,
        "step",
        lambda run: (run.look(), do.halve("head.weight")(run), run.look()) and None,
    ),
    _deed("data_in_place", "`p.data *= ...` between steps", 1, "step", do.halve_data_in_place("layers.1.up.weight")),
    _deed(
        "swapped_after_evaluation",
        "weights are swapped after an evaluation, and back",
        1,
        "step",
        do.swap_after_evaluation,
        fast=True,
    ),
    _deed("average", "an average of weights is evaluated instead of them", 1, "step", do.average),
    _deed("functional_call", "functional_call with other weights", 1, "step", do.average_call),
    _deed(
        "optimizer_after_evaluation",
        "an evaluation runs before the optimizer is built",
        -1,
        "wrapped",
        evaluate,
        fast=True,
    ),
    _deed("inference_before_training", "inference mode runs before the first step", -1, "ready", do.inference),
    _deed("inference_between_steps", "inference mode runs between steps", 1, "step", do.inference),
    _deed("evaluation_between", "an evaluation between forward and backward", 1, "loss", evaluate),
    Case(
        "misuse/thawed_bf16",
        "a unit is frozen in the first step and thawed, in mixed precision",
        BF16_PLAIN,
        (at(-1, "ready", do.freeze("layers.1", False)), at(1, "step", do.freeze("layers.1", True))),
        BF16,
    ),
    Case(
        "misuse/thawed",
        "a unit is frozen in the first step and thawed",
        PLAIN,
        (at(-1, "ready", do.freeze("layers.1", False)), at(1, "step", do.freeze("layers.1", True))),
    ),
    Case(
        "misuse/unused_last_micro_batch",
        "layers are unused in the last micro-batch of a held window, bfloat16",
        BF16_PLAIN,
        setup=replace(BF16, micros=2, hold=True, loss=do.last_unused),
    ),
    Case("misuse/window", "two micro-batches, the first held", PLAIN, setup=Setup(micros=2, hold=True)),
    _deed("state_dict_in_between", "a state dict is taken between forward and backward", 1, "loss", do.state_dict),
    _deed(
        "frozen_in_between", "a block is frozen between forward and backward", 1, "loss", do.freeze("layers.1", False)
    ),
    _deed("unshard_twice", "unshard and reshard, each twice", 1, "step", do.unshard_twice),
    _deed("load_plain", "a state dict of plain full tensors is loaded between steps", 1, "step", do.load_plain),
    _deed(
        "gradient_by_hand", "gradients are scaled and taken away by the program", 1, "gradients", do.gradient_by_hand
    ),
    _deed("torch_clip", "torch's clip_grad_norm_ between backward and update", 1, "gradients", do.torch_s_clip),
    _deed("double", "the model is converted to float64 after fully_shard", -1, "ready", do.to_double),
    _deed("hook_that_changes", "a forward hook of the user's changes a block's output", -1, "ready", do.doubling_hook),
    _deed("zero_grad_in_between", "model.zero_grad() between forward and backward", 1, "loss", do.zero_between),
)

REFUSED = (
    Case(
        "misuse/edited_in_forward",
        "a module edits a parameter of its own inside forward",
        Raises("RuntimeError", (r"layers\.0", "seen", "buffer|forward")),
        setup=Setup(model=of_blocks(do.EditsItself)),
    ),
    _refused(
        "unit_by_itself_first",
        "a block runs by itself before the model does",
        "ready",
        do.inner_first,
        "RuntimeError",
        "root",
        "forward",
        step=-1,
    ),
    _refused(
        "spent_graph",
        "backward of a graph that is spent",
        "gradients",
        do.backward_of_a_spent_graph,
        "RuntimeError",
        "second time",
        "retain_graph",
    ),
    _refused(
        "nothing_trainable",
        "backward though everything is frozen",
        "step",
        do.all_frozen,
        "RuntimeError",
        "does not require grad",
    ),
    _refused(
        "method",
        "a method of a block is called beside forward",
        "step",
        do.call_method,
        "RuntimeError",
        r"layers\.1",
        "register_fsdp_forward_method|fully_shard",
        setup=Setup(model=do.ModelWithMethod),
        fast=True,
    ),
    _refused(
        "plain_part",
        "a linear inside of a block is called beside forward",
        "step",
        do.call_linear,
        "RuntimeError",
        MIXED,
        r"layers\.1\.up\.(weight|bias) of unit layers\.1",
        "unit_open",
    ),
    _refused(
        "weight_in_linear",
        "a weight is used outside of forward: F.linear",
        "step",
        do.use_weight,
        "RuntimeError",
        MIXED,
        r"layers\.1\.up\.(weight|bias) of unit layers\.1",
        "unit_open",
    ),
    _refused(
        "weight_of_another_unit",
        "the head reads the weight of a layer that is a unit of its own",
        "step",
        do.weight_of_another_unit,
        "RuntimeError",
        MIXED,
        r"layers\.1\.up\.weight of unit",
        "unit_open",
    ),
    _refused(
        "weight_in_arithmetic",
        "a weight is used outside of forward: x @ w.T",
        "step",
        do.computes,
        "RuntimeError",
        MIXED,
        r"head\.weight of unit root",
        "unit_open",
    ),
    _refused(
        "weight_added",
        "a weight is used outside of forward: x + w",
        "step",
        do.adds,
        "RuntimeError",
        MIXED,
        r"layers\.1\.norm\.weight of unit layers\.1",
        "unit_open",
    ),
    _refused(
        "assigned_data",
        "`p.data = ...` between steps",
        "step",
        do.halve_data("layers.1.up.weight"),
        "RuntimeError",
        r"layers\.1\.up\.weight",
        r"copy_|load_state_dict",
    ),
    _refused(
        "data_behind_evaluation",
        "`p.data = ...` of the root's head, between evaluations",
        "step",
        do.halve_data_behind_evaluation,
        "RuntimeError",
        r"head\.weight",
        r"copy_|load_state_dict",
    ),
    _refused(
        "average_by_data",
        "all parameters are averaged by `p.data = ...`",
        "step",
        do.average_by_data,
        "RuntimeError",
        r"embedding\.weight",
        r"copy_|load_state_dict",
        fast=True,
    ),
    _refused(
        "plain_data",
        "a plain tensor is assigned to `p.data`",
        "step",
        do.plain_data,
        "RuntimeError",
        r"layers\.1\.up\.weight",
        r"copy_|load_state_dict",
    ),
    _refused(
        "deepcopy",
        "the model is copied by copy.deepcopy",
        "step",
        do.copied,
        "AssertionError",
        "deepcopy|copy",
        "state",
    ),
    _refused(
        "pickle", "the model is pickled by torch.save", "step", do.pickle, "Exception", "pickle|process group", "state"
    ),
    _refused(
        "sync_left_off",
        "synchronisation is left off at optimizer.step()",
        "step",
        do.sync_left_off,
        "RuntimeError",
        "set_requires_gradient_sync",
        fast=True,
    ),
    _refused(
        "wrong_shape",
        "a state dict has another shape",
        "step",
        do.wrong_shape,
        "RuntimeError",
        r"layers\.1\.up\.weight",
        "size mismatch|shape",
    ),
    _refused(
        "missing_key",
        "a state dict lacks a key",
        "step",
        do.missing_key,
        "RuntimeError",
        r"layers\.1\.up\.weight",
        "missing",
    ),
    _refused(
        "prefetch_of_a_plain_module",
        "a prefetch list names a module that is no unit",
        "step",
        do.prefetch_of_a_plain_module,
        "ValueError",
        "Linear",
        "FSDPModule|fully_shard",
    ),
    _refused(
        "reset_below_root",
        "reset_iter_state() is called below the root",
        "step",
        do.reset_below,
        "RuntimeError",
        "root",
    ),
    _refused(
        "method_that_is_not_there",
        "a forward method is registered that does not exist",
        "step",
        do.method_that_is_not_there,
        "ValueError",
        "generate",
    ),
    _refused(
        "grad_of_parameters",
        "torch.autograd.grad for sharded parameters",
        "step",
        do.grad_of_parameters,
        "RuntimeError",
        "not have been used in the graph",
        fast=True,
    ),
    _refused(
        "backward_for_parameters",
        "backward(inputs=sharded parameters), which would train nothing",
        "loss",
        do.backward_for_parameters,
        "RuntimeError",
        r"embedding\.weight|layers\.0",
        "requires_grad_",
    ),
)

CASES: tuple[Case, ...] = (*LEGAL, *REFUSED)
