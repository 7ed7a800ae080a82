"""A rank of several is in a collective of torch's own, over a process group that no line of ours stands in for."""

from __future__ import annotations

from typing import Any

from tests.faults.actions import Action
from tests.faults.cases import PLAIN, Case, Raises, Setup, at
from tests.faults.deeds import divergence as do

# Who waits has waited for a second, the beat of the other one has seen it twice, and a step is under way before that.
WITHIN = 8.0


def _elsewhere(name: str, does: str, step: int, event: str, action: Action, *words: str, **more: Any) -> Case:
    """Rank 1 waits in a collective of torch's that the others do not take. They are told; it ends when they do."""
    expected = Raises("RanksDisagree", ("rank 1", *words, r"divergence\.py:\d+", r"rank \d waits"), "others", WITHIN)
    return Case(f"divergence/{name}", does, expected, (at(step, event, action, rank=1),), **more)


ELSEWHERE = (
    _elsewhere("full_tensor", "rank 1 alone asks for a full tensor", 1, "step", do.full_tensor, "full_tensor"),
    _elsewhere(
        "full_state",
        "rank 1 alone makes full tensors of its state dict",
        1,
        "step",
        do.full_state,
        "full_tensor",
        fast=True,
    ),
    _elsewhere(
        "full_tensor_first",
        "rank 1 alone asks for a full tensor before the first step",
        -1,
        "ready",
        do.full_tensor,
        "full_tensor",
    ),
    _elsewhere(
        "full_tensor_of_three",
        "rank 1 of three asks for a full tensor between forward and backward",
        1,
        "loss",
        do.full_tensor,
        "full_tensor",
        setup=Setup(world=3),
    ),
    _elsewhere(
        "gradient_full_tensor",
        "rank 1 alone asks for the full tensor of a gradient",
        1,
        "gradients",
        do.gradient_full_tensor,
        "full_tensor",
        fast=True,
    ),
    _elsewhere(
        "gradient_norm",
        "rank 1 alone asks for the norm of a gradient",
        1,
        "gradients",
        do.gradient_norm,
        "full_tensor",
    ),
    _elsewhere(
        "state_full_tensor",
        "rank 1 alone asks for the full tensor of an optimizer's state",
        1,
        "step",
        do.state_full_tensor,
        "full_tensor",
    ),
    _elsewhere("all_reduce", "rank 1 alone reduces its loss for a log", 1, "loss", do.all_reduce, "all_reduce"),
    _elsewhere("barrier", "rank 1 alone waits at a barrier", 1, "cleared", do.barrier, "barrier", fast=True),
    _elsewhere(
        "barrier_first",
        "rank 1 alone waits at a barrier before the first step",
        -1,
        "ready",
        do.barrier,
        "barrier",
    ),
    _elsewhere(
        "object_gather",
        "rank 1 of three alone gathers objects",
        1,
        "step",
        do.object_gather,
        "all_gather_object",
        setup=Setup(world=3),
    ),
    Case(
        "divergence/replica_gather",
        "one rank of a replica of a 2 x 2 mesh asks for the full tensor of a gradient",
        Raises("RanksDisagree", ("rank 3", "full_tensor", "ranks 2 and 3", "rank 2 waits"), "others", WITHIN),
        (at(1, "gradients", do.gradient_full_tensor, rank=3),),
        setup=Setup(world=4, options=do.hsdp),
    ),
    Case(
        "divergence/all_reduce_of_all",
        "all ranks reduce their loss for a log, one of them late, and one does not wait for it before its forward",
        PLAIN,
        (at(1, "step", do.all_reduce_of_all),),
        setup=Setup(world=3),
    ),
)
