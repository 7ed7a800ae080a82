"""Exceptions at every point of a step, on all ranks and on one: what is caught leaves nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.faults.actions import Action, out_of_memory, throw
from tests.faults.cases import Case, Equal, Raises, Recovers, Setup, at
from tests.faults.deeds import exceptions as do

CATCHES = Setup(catches=8)
WINDOW = Setup(catches=8, micros=2)
HELD = replace(WINDOW, hold=True)


def _everywhere(name: str, does: str, event: str, action: Action | None = None, step: int = 1, **more: Any) -> Case:
    setup = more.pop("setup", CATCHES)
    return Case(f"exceptions/{name}", does, Equal(), (at(step, event, action),), setup, **more)


ALL = (
    _everywhere("before_root", "all ranks raise in a hook before the root's forward", "before "),
    _everywhere("before_layer", "all ranks raise before the forward of layers.1", "before layers.1", fast=True),
    _everywhere("before_linear", "all ranks raise inside layers.1, before its second linear", "before layers.1.down"),
    _everywhere("before_head", "all ranks raise before the head, with all units recorded", "before head"),
    _everywhere("after_layer", "all ranks raise in a hook after layers.2, which is freed already", "after layers.2"),
    _everywhere("after_embedding", "all ranks raise after the embedding, the root full", "after embedding"),
    _everywhere("loss", "all ranks raise between forward and backward", "loss"),
    _everywhere("backward_root", "all ranks raise as the backward begins", "backward "),
    _everywhere("backward_layer", "all ranks raise in the backward of layers.1", "backward layers.1", fast=True),
    _everywhere("backward_linear", "all ranks raise in the backward inside layers.0", "backward layers.0.up"),
    _everywhere("backward_embedding", "all ranks raise at the end of the backward", "backward embedding"),
    _everywhere("gradients", "all ranks raise after backward, before the update", "gradients"),
    _everywhere("first_forward", "the very first forward raises", "before layers.1", step=0),
    _everywhere("first_backward", "the very first backward raises", "backward layers.1", step=0),
    Case(
        "exceptions/twice_in_a_row",
        "forward raises, and so does the backward of the second attempt",
        Equal(),
        (at(1, "before layers.1"), at(1, "backward layers.2")),
        CATCHES,
    ),
    Case(
        "exceptions/every_step",
        "each step fails once, at another place",
        Equal(),
        (at(0, "after layers.0"), at(1, "backward layers.2"), at(2, "before head")),
        CATCHES,
    ),
    _everywhere("keyboard_interrupt", "Ctrl-C in forward", "before layers.1", throw(KeyboardInterrupt), fast=True),
    _everywhere("keyboard_interrupt_backward", "Ctrl-C in backward", "backward layers.1", throw(KeyboardInterrupt)),
    _everywhere("system_exit", "SystemExit in forward, caught", "before layers.1", throw(SystemExit)),
    _everywhere("out_of_memory", "OutOfMemoryError in forward", "after layers.1", throw(torch.OutOfMemoryError)),
    _everywhere(
        "out_of_memory_backward", "OutOfMemoryError in backward", "backward layers.1", throw(torch.OutOfMemoryError)
    ),
    _everywhere("allocator", "the CPU's allocator refuses memory in backward", "backward layers.1", out_of_memory),
    _everywhere("stop_iteration", "StopIteration in forward", "before layers.1", throw(StopIteration)),
    _everywhere(
        "recomputation",
        "all ranks raise while a block is recomputed in backward",
        "again layers.1.up",
        setup=replace(CATCHES, recompute=True),
        fast=True,
    ),
    _everywhere(
        "tensor_hook", "a hook on a sharded parameter's gradient raises", "step", do.grow("layers.1.up.weight")
    ),
    _everywhere("accumulation_hook", "a hook after accumulation of a gradient raises", "step", do.post_hook),
    _everywhere("module_backward_hook", "a full backward hook of a block raises", "step", do.backward_hook),
    _everywhere("optimizer_hook", "a hook before the optimizer's update raises", "step", do.optimizer_hook),
    _everywhere("evaluation", "an evaluation forward raises between steps", "step", do.failing_evaluation("before")),
    _everywhere("evaluation_after", "an evaluation raises after a linear", "loss", do.failing_evaluation("after")),
    _everywhere("full_params", "a block inside full_params raises", "step", do.in_full_params),
    _everywhere("unshard", "an exception between unshard and a forward", "step", do.in_unshard),
    _everywhere("load_state_dict", "load_state_dict raises of missing keys", "step", do.bad_load),
    _everywhere("two_models", "another sharded model fails inside the step", "loss", do.two_models),
    _everywhere("reset_iter_state", "reset_iter_state() is called after each step", "cleared", do.reset),
    Case(
        "exceptions/reset_after_failure",
        "reset_iter_state() is called after a backward that raised",
        Equal(),
        (at(1, "backward layers.1"), at(1, "step", do.reset)),
        CATCHES,
    ),
    _everywhere(
        "mixed_precision",
        "backward raises, bfloat16 compute and float32 sums",
        "backward layers.1",
        setup=replace(
            CATCHES,
            options=lambda impl: {
                "mp_policy": impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            },
        ),
    ),
    _everywhere(
        "no_reshard",
        "backward raises, parameters kept after forward",
        "backward layers.1",
        setup=replace(CATCHES, options=lambda impl: {"reshard_after_forward": False}),
    ),
    _everywhere(
        "part_kept",
        "backward raises, a part of each unit kept (4 ranks, reshard_after_forward=2)",
        "backward layers.1",
        setup=replace(CATCHES, world=4, options=lambda impl: {"reshard_after_forward": 2}),
    ),
    _everywhere(
        "hsdp",
        "backward raises on a mesh that replicates and shards (2 x 2)",
        "backward layers.1",
        setup=replace(CATCHES, world=4, options=lambda impl: {"mesh": do.hsdp()}),
    ),
    _everywhere(
        "offload",
        "backward raises with CPU offload",
        "backward layers.1",
        setup=replace(
            CATCHES, options=lambda impl: {"offload_policy": impl.namespace.CPUOffloadPolicy(pin_memory=False)}
        ),
    ),
    Case(
        "exceptions/second_micro_batch",
        "the second micro-batch raises in backward and is tried again with the whole window",
        Equal(),
        (at(1, "backward layers.1 #1"),),
        WINDOW,
    ),
    Case(
        "exceptions/second_held_micro_batch",
        "the second micro-batch of a window without synchronisation raises in forward; the window is given up",
        Equal(),
        (at(1, "before layers.1 #1"),),
        HELD,
        fast=True,
    ),
    _everywhere(
        "abandoned_window_optimizer",
        "a micro-batch without synchronisation is given up: optimizer.zero_grad()",
        "step",
        do.abandoned(lambda run: run.optimizer.zero_grad()),
    ),
    _everywhere(
        "abandoned_window_model",
        "a micro-batch without synchronisation is given up: model.zero_grad()",
        "step",
        do.abandoned(lambda run: run.model.zero_grad()),
    ),
    _everywhere(
        "abandoned_window_zeros",
        "a micro-batch without synchronisation is given up: zero_grad(False)",
        "step",
        do.abandoned(lambda run: run.optimizer.zero_grad(set_to_none=False)),
    ),
)


TOLD_BACKWARD = Recovers("PeerFailed", ("rank 1", "step 1", "in its backward"))
# What no hook of a module or of autograd sees is found when that rank is about to do something else than the others.
NAMED = Recovers("RuntimeError", ("rank 1",))
TOLD = Recovers("PeerFailed", ("rank 1", "step", "injected"))


def _one(name: str, does: str, event: str, action: Action | None = None, step: int = 1, **more: Any) -> Case:
    setup = more.pop("setup", CATCHES)
    expected = more.pop("expected", TOLD)
    return Case(f"exceptions/one_{name}", does, expected, (at(step, event, action, rank=1),), setup, **more)


ONE = (
    _one(
        "before_layer", "rank 1 alone raises before layers.1; both catch it and try again", "before layers.1", fast=True
    ),
    _one("first_forward", "rank 1 alone raises in the very first forward", "before layers.1", step=0),
    _one("after_layer", "rank 1 alone raises after layers.0", "after layers.0"),
    _one(
        "backward_layer", "rank 1 alone raises in the backward of layers.1", "backward layers.1", expected=TOLD_BACKWARD
    ),
    _one("backward_root", "rank 1 alone raises as the backward begins", "backward ", expected=NAMED),
    _one("before_forward", "rank 1's data loader raises before the forward", "batch", expected=Equal()),
    _one(
        "out_of_memory",
        "rank 1 alone runs out of memory in forward",
        "after layers.1",
        throw(torch.OutOfMemoryError, "injected"),
    ),
    _one(
        "keyboard_interrupt",
        "Ctrl-C reaches rank 1 alone, in forward",
        "before layers.1",
        throw(KeyboardInterrupt, "injected"),
        expected=NAMED,
    ),
    _one(
        "guard_keyboard_interrupt",
        "Ctrl-C reaches rank 1 alone, in forward, inside a guard",
        "before layers.1",
        throw(KeyboardInterrupt, "injected"),
        setup=replace(CATCHES, guard=True),
    ),
    _one(
        "guard_backward",
        "rank 1 alone raises in the backward of layers.1, inside a guard",
        "backward layers.1",
        setup=replace(CATCHES, guard=True),
    ),
    _one(
        "recomputation",
        "rank 1 alone raises while a block is recomputed",
        "again layers.1.up",
        setup=replace(CATCHES, recompute=True),
        expected=TOLD_BACKWARD,
    ),
    _one(
        "of_three",
        "rank 1 of three raises in backward",
        "backward layers.1",
        setup=replace(CATCHES, world=3),
        expected=TOLD_BACKWARD,
    ),
    _one(
        "mixed_precision",
        "rank 1 alone raises in backward, bfloat16 compute",
        "backward layers.1",
        setup=replace(
            CATCHES,
            options=lambda impl: {
                "mp_policy": impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            },
        ),
        expected=TOLD_BACKWARD,
    ),
    _one(
        "hsdp",
        "rank 1 of a 2 x 2 mesh raises in backward",
        "backward layers.1",
        setup=replace(CATCHES, world=4, options=lambda impl: {"mesh": do.hsdp()}),
        expected=TOLD_BACKWARD,
    ),
    _one(
        "guard_loss",
        "rank 1 alone raises between forward and backward, inside a guard",
        "loss",
        setup=replace(CATCHES, guard=True),
    ),
    _one(
        "guard_gradients",
        "rank 1 alone raises after its backward, inside a guard: no rank updates",
        "gradients",
        fast=True,
        setup=replace(CATCHES, guard=True),
    ),
    _one(
        "guard_backward_end",
        "rank 1 alone raises at the very end of its backward, inside a guard",
        "backward embedding",
        setup=replace(CATCHES, guard=True),
    ),
    _one(
        "guard_window",
        "rank 1 alone raises in the second micro-batch, inside a guard",
        "backward layers.1 #1",
        setup=replace(WINDOW, guard=True),
    ),
    Case(
        "exceptions/one_then_the_other",
        "rank 1 raises in step 1 and rank 0 in step 2",
        Equal(),
        (at(1, "before layers.1", rank=1), at(2, "backward layers.1", rank=0)),
        replace(CATCHES, guard=True),
    ),
    Case(
        "exceptions/one_twice",
        "rank 1 alone raises at the same place in two attempts",
        TOLD,
        (at(1, "before layers.1", rank=1), at(1, "before layers.1", rank=1)),
        CATCHES,
    ),
    Case(
        "exceptions/both_differently",
        "rank 0 raises in forward while rank 1 raises something else further on",
        Equal(),
        (at(1, "before layers.0", rank=0), at(1, "before layers.0", throw(ValueError, "another"), rank=1)),
        CATCHES,
    ),
    *(
        Case(
            f"exceptions/one_uncaught_{name}",
            f"rank 1 alone raises {where} and nobody catches it: its peer ends with an error that names it",
            Raises("PeerFailed", ("rank 1", "step 1.*backward" if name == "backward" else "injected"), on="others"),
            (at(1, event, rank=1),),
            fast=name == "between_steps",
        )
        for name, where, event in (
            ("forward", "in forward", "before layers.1"),
            ("backward", "in backward", "backward layers.1"),
            ("between_steps", "between two steps", "step"),
            ("before_update", "between backward and the update", "gradients"),
        )
    ),
)

CASES: tuple[Case, ...] = (*ALL, *ONE)
