"""A rank of several is in a collective of torch's own, over a process group that no line of ours stands in for."""

from __future__ import annotations

from typing import Any

from tests.faults.actions import Action
from tests.faults.cases import IN_STEP, PLAIN, Case, Moment, Raises, Setup, at
from tests.faults.deeds import divergence as do

# Who waits has waited for a second, the beat of the other one has seen it twice, and a step is under way before that.
WITHIN = 8.0


def _elsewhere(name: str, does: str, action: Action, *words: str, when: Moment = IN_STEP, **more: Any) -> Case:
    """Rank 1 waits in a collective of torch's that the others do not take. They are told; it ends when they do."""
    expected = Raises("RanksDisagree", ("rank 1", *words, r"divergence\.py:\d+", r"rank \d waits"), "others", WITHIN)
    return Case(f"divergence/{name}", does, expected, (at(*when, action, rank=1),), **more)


ELSEWHERE = (
    _elsewhere("full_tensor", "rank 1 alone asks for a full tensor", do.full_tensor, "full_tensor"),
    _elsewhere(
        "full_state", "rank 1 alone makes full tensors of its state dict", do.full_state, "full_tensor", fast=True
    ),
    _elsewhere(
        "full_tensor_first",
        "rank 1 alone asks for a full tensor before the first step",
        do.full_tensor,
        "full_tensor",
        when=(-1, "ready"),
    ),
    _elsewhere(
        "full_tensor_of_three",
        "rank 1 of three asks for a full tensor between forward and backward",
        do.full_tensor,
        "full_tensor",
        when=(1, "loss"),
        setup=Setup(world=3),
    ),
    _elsewhere(
        "gradient_full_tensor",
        "rank 1 alone asks for the full tensor of a gradient",
        do.gradient_full_tensor,
        "full_tensor",
        when=(1, "gradients"),
        fast=True,
    ),
    _elsewhere(
        "gradient_norm",
        "rank 1 alone asks for the norm of a gradient",
        do.gradient_norm,
        "full_tensor",
        when=(1, "gradients"),
    ),
    _elsewhere(
        "state_full_tensor",
        "rank 1 alone asks for the full tensor of an optimizer's state",
        do.state_full_tensor,
        "full_tensor",
    ),
    _elsewhere("all_reduce", "rank 1 alone reduces its loss for a log", do.all_reduce, "all_reduce", when=(1, "loss")),
    _elsewhere("barrier", "rank 1 alone waits at a barrier", do.barrier, "barrier", when=(1, "cleared"), fast=True),
    _elsewhere(
        "barrier_first",
        "rank 1 alone waits at a barrier before the first step",
        do.barrier,
        "barrier",
        when=(-1, "ready"),
    ),
    _elsewhere(
        "object_gather",
        "rank 1 of three alone gathers objects",
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
