"""Programs that use autograd and the API in every way: right as plain training is, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.faults.actions import Action, evaluate
from tests.faults.cases import IN_STEP, PLAIN, Case, Equal, Moment, Raises, Setup, at
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


def _deed(name: str, does: str, action: Action, when: Moment = IN_STEP, **more: Any) -> Case:
    """All ranks, and the plain run, do it."""
    return Case(f"misuse/{name}", does, more.pop("expected", PLAIN), (at(*when, action),), **more)


def _refused(name: str, does: str, action: Action, *words: str, **more: Any) -> Case:
    expected = Raises(more.pop("error", "RuntimeError"), words)
    return Case(f"misuse/{name}", does, expected, (at(*more.pop("when", IN_STEP), action),), **more)


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
    _deed("backward_twice", "backward twice, the first with retain_graph", do.backward_again, when=(1, "loss")),
    Case("misuse/by_keyword", "inputs are given by keyword", PLAIN, setup=Setup(loss=do.by_keyword)),
    _deed("edited_weight", "a held parameter is edited in place between steps", do.halve("layers.1.up.weight")),
    _deed(
        "edited_root_weight",
        "the root's head is edited after an evaluation",
        lambda run: (run.look(), do.halve("head.weight")(run), run.look()) and None,
    ),
    _deed("data_in_place", "`p.data *= ...` between steps", do.halve_data_in_place("layers.1.up.weight")),
    _deed(
        "swapped_after_evaluation",
        "weights are swapped after an evaluation, and back",
        do.swap_after_evaluation,
        fast=True,
    ),
    _deed("average", "an average of weights is evaluated instead of them", do.average),
    _deed("functional_call", "functional_call with other weights", do.average_call),
    _deed(
        "optimizer_after_evaluation",
        "an evaluation runs before the optimizer is built",
        evaluate,
        when=(-1, "wrapped"),
        fast=True,
    ),
    _deed("inference_before_training", "inference mode runs before the first step", do.inference, when=(-1, "ready")),
    _deed("inference_between_steps", "inference mode runs between steps", do.inference),
    _deed("evaluation_between", "an evaluation between forward and backward", evaluate, when=(1, "loss")),
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
    _deed(
        "state_dict_in_between", "a state dict is taken between forward and backward", do.state_dict, when=(1, "loss")
    ),
    _deed(
        "frozen_in_between",
        "a block is frozen between forward and backward",
        do.freeze("layers.1", False),
        when=(1, "loss"),
    ),
    _deed("unshard_twice", "unshard and reshard, each twice", do.unshard_twice),
    _deed("load_plain", "a state dict of plain full tensors is loaded between steps", do.load_plain),
    _deed(
        "gradient_by_hand",
        "gradients are scaled and taken away by the program",
        do.gradient_by_hand,
        when=(1, "gradients"),
    ),
    _deed("torch_clip", "torch's clip_grad_norm_ between backward and update", do.torch_s_clip, when=(1, "gradients")),
    _deed("double", "the model is converted to float64 after fully_shard", do.to_double, when=(-1, "ready")),
    _deed(
        "hook_that_changes",
        "a forward hook of the user's changes a block's output",
        do.doubling_hook,
        when=(-1, "ready"),
    ),
    _deed("zero_grad_in_between", "model.zero_grad() between forward and backward", do.zero_between, when=(1, "loss")),
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
        do.inner_first,
        "root",
        "forward",
        when=(-1, "ready"),
    ),
    _refused(
        "spent_graph",
        "backward of a graph that is spent",
        do.backward_of_a_spent_graph,
        "second time",
        "retain_graph",
        when=(1, "gradients"),
    ),
    _refused("nothing_trainable", "backward though everything is frozen", do.all_frozen, "does not require grad"),
    _refused(
        "method",
        "a method of a block is called beside forward",
        do.call_method,
        r"layers\.1",
        "register_fsdp_forward_method|fully_shard",
        setup=Setup(model=do.ModelWithMethod),
        fast=True,
    ),
    _refused(
        "plain_part",
        "a linear inside of a block is called beside forward",
        do.call_linear,
        MIXED,
        r"layers\.1\.up\.(weight|bias) of unit layers\.1",
        "unit_open",
    ),
    _refused(
        "weight_in_linear",
        "a weight is used outside of forward: F.linear",
        do.use_weight,
        MIXED,
        r"layers\.1\.up\.(weight|bias) of unit layers\.1",
        "unit_open",
    ),
    _refused(
        "weight_of_another_unit",
        "the head reads the weight of a layer that is a unit of its own",
        do.weight_of_another_unit,
        MIXED,
        r"layers\.1\.up\.weight of unit",
        "unit_open",
    ),
    _refused(
        "weight_in_arithmetic",
        "a weight is used outside of forward: x @ w.T",
        do.computes,
        MIXED,
        r"head\.weight of unit root",
        "unit_open",
    ),
    _refused(
        "weight_added",
        "a weight is used outside of forward: x + w",
        do.adds,
        MIXED,
        r"layers\.1\.norm\.weight of unit layers\.1",
        "unit_open",
    ),
    _refused(
        "assigned_data",
        "`p.data = ...` between steps",
        do.halve_data("layers.1.up.weight"),
        r"layers\.1\.up\.weight",
        r"copy_|load_state_dict",
    ),
    _refused(
        "data_behind_evaluation",
        "`p.data = ...` of the root's head, between evaluations",
        do.halve_data_behind_evaluation,
        r"head\.weight",
        r"copy_|load_state_dict",
    ),
    _refused(
        "average_by_data",
        "all parameters are averaged by `p.data = ...`",
        do.average_by_data,
        r"embedding\.weight",
        r"copy_|load_state_dict",
        fast=True,
    ),
    _refused(
        "plain_data",
        "a plain tensor is assigned to `p.data`",
        do.plain_data,
        r"layers\.1\.up\.weight",
        r"copy_|load_state_dict",
    ),
    _refused(
        "deepcopy", "the model is copied by copy.deepcopy", do.copied, "deepcopy|copy", "state", error="AssertionError"
    ),
    _refused(
        "pickle", "the model is pickled by torch.save", do.pickle, "pickle|process group", "state", error="Exception"
    ),
    _refused(
        "sync_left_off",
        "synchronisation is left off at optimizer.step()",
        do.sync_left_off,
        "set_requires_gradient_sync",
        fast=True,
    ),
    _refused(
        "wrong_shape", "a state dict has another shape", do.wrong_shape, r"layers\.1\.up\.weight", "size mismatch|shape"
    ),
    _refused("missing_key", "a state dict lacks a key", do.missing_key, r"layers\.1\.up\.weight", "missing"),
    _refused(
        "prefetch_of_a_plain_module",
        "a prefetch list names a module that is no unit",
        do.prefetch_of_a_plain_module,
        "Linear",
        "FSDPModule|fully_shard",
        error="ValueError",
    ),
    _refused("reset_below_root", "reset_iter_state() is called below the root", do.reset_below, "root"),
    _refused(
        "method_that_is_not_there",
        "a forward method is registered that does not exist",
        do.method_that_is_not_there,
        "generate",
        error="ValueError",
    ),
    _refused(
        "grad_of_parameters",
        "torch.autograd.grad for sharded parameters",
        do.grad_of_parameters,
        "not have been used in the graph",
        fast=True,
    ),
    _refused(
        "backward_for_parameters",
        "backward(inputs=sharded parameters), which would train nothing",
        do.backward_for_parameters,
        r"embedding\.weight|layers\.0",
        "requires_grad_",
        when=(1, "loss"),
    ),
)

CASES: tuple[Case, ...] = (*LEGAL, *REFUSED)
