"""Ranks that do different things in a step: right where that is legal, otherwise an error that names who does what."""

from __future__ import annotations

from typing import Any

from tests.faults.actions import Action, evaluate, repeat_layer, skip_layer, swap_layers
from tests.faults.cases import IN_STEP, PLAIN, Case, Equal, Moment, Outcome, Raises, Setup, Warns, at
from tests.faults.deeds import divergence as do
from tests.faults.table.elsewhere import ELSEWHERE
from tests.threads.programs import of_blocks

# What follows is within this of the strike: some seconds of waiting, and the other ranks' own steps.
WITHIN = 8.0


def _disagree(*words: str, error: str = "RuntimeError") -> Raises:
    return Raises(error, ("rank", *words), within=WITHIN)


def _one(name: str, does: str, action: Action, expected: Outcome, when: Moment = IN_STEP, **more: Any) -> Case:
    """Rank 1 alone does it."""
    return Case(f"divergence/{name}", does, expected, (at(*when, action, rank=1),), **more)


ORDER = (
    _one(
        "swapped",
        "rank 1 runs layers 0 and 1 in the other order, of equal shapes",
        swap_layers(0, 1),
        _disagree(r"layers\.[01]"),
        fast=True,
    ),
    _one(
        "swapped_later",
        "rank 1 swaps layers 1 and 2 after several equal steps",
        swap_layers(1, 2),
        _disagree(r"layers\.[12]"),
        when=(3, "step"),
        setup=Setup(steps=5),
    ),
    _one(
        "swapped_in_first_step",
        "rank 1 runs layers in another order from the first step on",
        swap_layers(0, 2),
        _disagree(r"layers\.[02]"),
        when=(0, "step"),
    ),
    _one(
        "swapped_unlike",
        "rank 1 runs blocks of different sizes in another order",
        swap_layers(0, 1),
        _disagree(r"layers\.[01]"),
        setup=Setup(model=do.UnlikeModel),
    ),
    _one(
        "swapped_of_three",
        "rank 1 of three runs layers in another order",
        swap_layers(0, 1),
        _disagree(r"layers\.[01]", "rank 1"),
        setup=Setup(world=3),
    ),
    Case(
        "divergence/swapped_in_evaluation",
        "all ranks evaluate, rank 1 with layers in another order",
        _disagree(r"layers\.[01]"),
        (at(2, "step", evaluate, rank=0), at(2, "step", do.swapped_evaluation, rank=1)),
    ),
    _one("skipped", "rank 1 leaves layers.1 out", skip_layer(1), _disagree(r"layers\.[12]"), fast=True),
    _one("skipped_first", "rank 1 leaves layers.0 out", skip_layer(0), _disagree(r"layers\.[01]")),
    _one("skipped_last", "rank 1 leaves the last layer out", skip_layer(2), _disagree(r"layers\.2")),
    _one(
        "skipped_in_first_step",
        "rank 1 leaves layers.1 out in the first step",
        skip_layer(1),
        _disagree(r"layers\.[12]"),
        when=(0, "step"),
    ),
    _one("repeated", "rank 1 runs layers.1 twice", repeat_layer(1), _disagree(r"layers\.[12]")),
    Case(
        "divergence/dropped_by_own_seed",
        "layer drop with another random state on each rank",
        _disagree(r"layers\.[012]"),
        (at(1, "step", do.drop_by_own_seed),),
    ),
    Case(
        "divergence/dropped_by_shared_seed",
        "layer drop with one random state for all ranks",
        PLAIN,
        (at(1, "step", do.drop_by_shared_seed),),
    ),
    Case(
        "divergence/another_order_each_step",
        "another order of layers in each step, the same on all ranks",
        PLAIN,
        (at(1, "step", do.alternate), at(2, "step", do.alternate)),
    ),
    Case(
        "divergence/early_exit",
        "rank 1 leaves the forward after its first layer, once",
        _disagree(r"layers\.[01]"),
        setup=Setup(loss=do.early_exit),
    ),
    _one("recomputed_on_one", "rank 1 alone recomputes a block", do.recompute_one, Equal("undisturbed", 2e-5)),
)

GRADIENTS = (
    _one(
        "part_unused",
        "a linear of layers.1 is unused on rank 1 from step 1 on",
        do.gate_off,
        PLAIN,
        setup=Setup(model=of_blocks(do.Gated), loss=do.gate_plain),
        fast=True,
    ),
    Case(
        "divergence/loss_of_zero",
        "rank 1's loss is zero times its output",
        PLAIN,
        setup=Setup(loss=do.unused_root_part),
    ),
    # Rank 1 raises at its own step, which no gradient reached; rank 0 quotes it.
    _one(
        "no_backward",
        "rank 1 has no backward in step 1",
        do.no_backward,
        Raises("RuntimeError", ("expected gradients, found none",), within=WITHIN),
        when=(1, "loss"),
    ),
    Case("divergence/other_lengths", "ranks have batches of other lengths", Equal(), setup=Setup(loss=do.longer_batch)),
)

COUNTS = (
    _one(
        "one_micro_batch_more",
        "rank 1 has one micro-batch more, reduced",
        do.one_more_micro_batch,
        _disagree(),
        when=(1, "gradients"),
        fast=True,
    ),
    _one(
        "one_held_micro_batch_more",
        "rank 1 has one micro-batch more, without synchronisation",
        do.one_more_held,
        _disagree(),
    ),
    _one(
        "fewer_micro_batches",
        "rank 1 has one micro-batch less of two",
        do.fewer_micro_batches,
        _disagree(),
        setup=Setup(micros=2),
    ),
    _one(
        "evaluations_more", "rank 1 evaluates two batches that the others do not", do.two_evaluations_more, _disagree()
    ),
    Case(
        "divergence/uneven_evaluation",
        "all ranks evaluate, rank 1 two batches more",
        _disagree(),
        (at(1, "step", do.uneven_evaluation),),
    ),
    Case(
        "divergence/joined_evaluation",
        "all ranks evaluate, rank 1 two batches more, joined",
        Equal(),
        (at(1, "step", do.joined_evaluation),),
        fast=True,
    ),
    _one(
        "update_more",
        "rank 1 calls optimizer.step() once more",
        do.one_step_more,
        _disagree("step"),
        when=(1, "gradients"),
    ),
    _one("update_less", "rank 1 leaves an optimizer.step() out", do.no_step, _disagree("step"), when=(1, "gradients")),
    _one("sync_off", "rank 1 alone turns synchronisation off", do.sync_off, _disagree()),
    _one(
        "forward_more",
        "rank 1 runs a forward without gradients inside a step",
        evaluate,
        _disagree(),
        when=(1, "batch"),
    ),
    _one(
        "ends_early",
        "rank 1 ends its training a step earlier",
        do.stop_here,
        Raises("PeerFailed", ("rank 1",), on=(0,), within=WITHIN),
        when=(1, "cleared"),
    ),
)

SETTINGS = (
    _one(
        "keeps_full",
        "rank 1 alone keeps parameters after forward, from step 1 on",
        do.keep_full,
        _disagree(r"layers\."),
    ),
    _one("freezes", "rank 1 alone freezes a block between steps", do.freeze, _disagree(r"layers\.1")),
    _one("other_dtype", "rank 1 alone converts a block to bfloat16", do.other_sizes, _disagree(r"layers\.1")),
    _one("prefetches", "rank 1 alone gives a prefetch list, in another order", do.prefetch, _disagree(r"layers\.[02]")),
    _one(
        "no_all_reduce",
        "one rank of a 2 x 2 mesh leaves the all-reduce out",
        do.no_all_reduce,
        _disagree(),
        setup=Setup(world=4, options=do.hsdp),
    ),
    _one("clips", "rank 1 alone clips gradients", do.clip, _disagree(), when=(1, "gradients")),
    _one("full_params", "rank 1 alone enters full_params", do.full_params, _disagree()),
    Case(
        "divergence/full_params_beside_evaluation",
        "rank 1 enters full_params where the others evaluate",
        _disagree("full_params"),
        (at(1, "step", do.full_params_beside_evaluation),),
    ),
    Case(
        "divergence/full_state_of_all",
        "all ranks make full tensors of their state dict in each step",
        Equal(),
        tuple(at(step, "step", do.full_state_of_all) for step in range(3)),
    ),
    Case(
        "divergence/full_params_of_all",
        "all ranks enter full_params in some steps",
        Equal(),
        tuple(at(step, "updated", do.full_params_of_all) for step in (0, 2)),
    ),
    Case(
        "divergence/full_state_of_a_replica",
        "one replica of a 2 x 2 mesh makes full tensors of its state dict",
        Equal(),
        tuple(at(1, "step", do.full_state, rank=rank) for rank in (0, 1)),
        setup=Setup(world=4, options=do.hsdp),
    ),
    _one("unshards", "rank 1 alone calls unshard() of a block", do.unshard, _disagree(r"layers\.[01]")),
    _one(
        "state_dict",
        "rank 1 alone takes a state dict between forward and backward",
        do.state_dict,
        Equal(),
        when=(1, "loss"),
    ),
    _one(
        "buffer",
        "a buffer of rank 1 goes another way between steps",
        do.other_buffer,
        Warns((r"layers\.1\.scale", "rank 1")),
        setup=Setup(model=of_blocks(do.Buffered), steps=4),
    ),
    Case(
        "divergence/running_statistics",
        "BatchNorm's running statistics go apart",
        Warns((r"running_mean", "rank")),
        setup=Setup(model=of_blocks(do.Normed), steps=4),
    ),
    _one(
        "zero_grad",
        "rank 1 alone forgets zero_grad()",
        do.zero_grad_left_out,
        Raises("RuntimeError", ("rank 1", "zero_grad|gradient"), within=WITHIN),
        when=(0, "step"),
    ),
)
STANDING = (
    _one(
        "zero_grad_of_a_block",
        "rank 1 alone clears a block's gradients between two micro-batches",
        do.zero_grad_of_a_block,
        _disagree("rank 1", r"layers\.1", "zero_grad"),
        when=(1, "batch #1"),
        setup=Setup(micros=2),
        fast=True,
    ),
    _one(
        "gradient_taken_away",
        "rank 1 alone takes gradients away itself between two micro-batches",
        do.gradient_taken_away,
        _disagree("rank 1", r"layers\.2", "gradient"),
        when=(1, "batch #1"),
        setup=Setup(micros=2),
    ),
    Case("divergence/no_zero_grad_on_all", "no rank calls zero_grad()", PLAIN, (at(0, "step", do.zero_grad_left_out),)),
)
CASES: tuple[Case, ...] = (*ORDER, *GRADIENTS, *COUNTS, *SETTINGS, *STANDING, *ELSEWHERE)
