"""Children of a rank, models that are collected on some ranks, and ranks that end before others: who takes part."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

from tests.faults.actions import Action
from tests.faults.cases import IN_STEP, PLAIN, Case, Equal, Moment, Outcome, Raises, Setup, at
from tests.faults.deeds import forks as do
from tests.faults.table.waits import AFTER_SILENCE, LISTENS

HOSTED = Setup(hosted=True)
STEPS = (0, 1, 2)


def _case(name: str, does: str, expected: Outcome, *struck: Any, **more: Any) -> Case:
    setup, limit = more.pop("setup", Setup()), more.pop("limit", 20.0)
    return Case(f"forks/{name}", does, expected, struck, setup, limit=limit, **more)


def _legal(name: str, does: str, action: Action, when: Moment = IN_STEP, **more: Any) -> Case:
    """Rank 1 does it, and nobody hears of it."""
    return _case(name, does, Equal(), at(*when, action, rank=1), **more)


def _each_step(name: str, does: str, action: Action, **more: Any) -> Case:
    """All ranks do it in each step."""
    return _case(name, does, Equal(), *(at(step, "step", action) for step in STEPS), **more)


CHILDREN = (
    _legal("ends", "a forked child of rank 1 ends with its exit handlers", do.child(do.nothing, pause=2.0), fast=True),
    _legal(
        "ends_in_forward",
        "a forked child of rank 1 ends in a forward",
        do.child(do.nothing, pause=2.0),
        when=(1, "before layers.1"),
    ),
    _legal(
        "ends_in_backward",
        "a forked child of rank 1 ends in a backward",
        do.child(do.nothing, pause=2.0),
        when=(1, "backward layers.1"),
    ),
    _legal(
        "ends_first",
        "a forked child of rank 1 ends before the first forward",
        do.child(do.nothing, pause=2.0),
        when=(-1, "ready"),
    ),
    _legal(
        "ends_before_all",
        "a forked child of rank 1 ends before anything is built",
        do.child(do.nothing, pause=2.0),
        when=(-1, "start"),
    ),
    _legal("ends_last", "a forked child of rank 1 ends after the last step", do.child(do.nothing), when=(3, "end")),
    _legal("throws", "a forked child of rank 1 ends with an exception", do.child(do.throws, pause=2.0)),
    _legal("leaves", "a forked child of rank 1 leaves by os._exit(3)", do.child(do.leaves(3), pause=2.0)),
    _legal(
        "collects",
        "a forked child of rank 1 gives the model up and ends",
        do.child(do.collects, pause=2.0),
        when=(1, "loss"),
    ),
    _legal(
        "destroys",
        "a forked child of rank 1 destroys the process group and ends",
        do.child(do.destroys_the_group, pause=2.0),
    ),
    _legal("reads", "a forked child of rank 1 reads its shards and ends", do.child(do.reads_shards)),
    _legal("closes", "a forked child of rank 1 closes checkpoints and ends", do.child(do.closes_checkpoints)),
    _legal("lives", "a forked child of rank 1 lives for three seconds beside it", do.in_another_thread(do.sleeps(3.0))),
    _legal(
        "in_a_thread",
        "a thread of rank 1 forks a child in the middle of a step",
        do.in_another_thread(do.nothing),
        when=(1, "before layers.0"),
    ),
    _legal("many", "ten children of rank 1 come and go", do.many_children),
    _legal("subprocess", "rank 1 runs another program", do.subprocesses, fast=True),
    _each_step("workers", "all ranks have worker processes in each step", do.workers),
    _each_step("worker", "all ranks have a worker process in each step", do.worker),
    _each_step("failing_worker", "worker processes of all ranks fail in each step", do.failing_worker),
    _each_step("loader", "all ranks have a data loader with workers in each step", do.loader),
    _each_step("loader_that_stays", "all ranks have a data loader whose workers stay", do.loader_that_stays),
    _each_step("loader_abandoned", "all ranks give a data loader with workers up in each step", do.loader_abandoned),
    _case(
        "orphan_killed",
        "rank 1 is killed, and a child of it, which has its connections, lives on",
        Raises("PeerFailed", ("rank 1",), on="others"),
        at(1, "before layers.1", do.orphan_then(signal.SIGKILL), rank=1),
        setup=LISTENS,
        deaths=(1,),
    ),
    _case(
        "orphan_stopped",
        "rank 1 is stopped, and a child of it lives on",
        Raises("PeerFailed", ("rank 1",), on="others", within=AFTER_SILENCE),
        at(1, "before layers.1", do.orphan_then(signal.SIGSTOP), rank=1),
        setup=LISTENS,
        deaths=(1,),
    ),
)

COLLECTED = (
    _case(
        "state",
        "full values of the state dict of a model that rank 1 has collected",
        PLAIN,
        at(1, "step", do.state_of_a_dropped_model),
        fast=True,
    ),
    _case(
        "parameters",
        "full values of the parameters of a trained model that rank 1 has collected",
        PLAIN,
        at(1, "step", do.parameters_of_a_dropped_model),
    ),
    _case(
        "optimizer",
        "an optimizer outlives its model, which rank 1 has collected",
        PLAIN,
        at(1, "step", do.optimizer_of_a_dropped_model),
    ),
    _case(
        "clipping",
        "gradients are clipped of a model that rank 1 has collected",
        Equal(),
        at(1, "step", do.clipping_of_a_dropped_model),
    ),
    _case("cycle", "a model in a cycle is dropped, and rank 1 collects it", PLAIN, at(1, "step", do.model_in_a_cycle)),
    _case(
        "one_after_the_other",
        "a new model in each step, which rank 1 gives up earlier",
        Equal(),
        *(at(step, "step", do.model_after_model) for step in STEPS),
    ),
    _case(
        "at_random",
        "collections at random points, others on each rank",
        Equal(),
        at(0, "step", do.collections_at_random),
    ),
    _case(
        "failed",
        "a model fails on all ranks and is dropped, and an exception of rank 0 keeps it",
        Equal(),
        at(1, "step", do.failed_model_dropped),
    ),
)


def _rank_0(name: str, does: str, action: Action, *words: str, when: Moment = IN_STEP, **more: Any) -> Case:
    """The rank that serves the store comes to its end; the others are told why, and not of a connection."""
    setup = more.pop("setup", HOSTED)
    expected = Raises("PeerFailed", ("rank 0", *words), on="others", within=more.pop("within", 5.0))
    return _case(name, does, expected, at(*when, action, rank=0), setup=setup, **more)


ENDS = (
    _rank_0("host_raises", "rank 0, which serves the store, raises", do.fails, "injected", fast=True),
    _rank_0(
        "host_raises_in_forward",
        "rank 0, which serves the store, raises in a forward",
        do.fails,
        "injected",
        when=(1, "before layers.1"),
    ),
    _rank_0("host_ends", "rank 0, which serves the store, ends a step earlier", do.ends, "ended", when=(1, "cleared")),
    _rank_0(
        "host_raises_first",
        "rank 0, which serves the store, raises before the first forward",
        do.fails,
        "injected",
        when=(-1, "ready"),
    ),
    _rank_0(
        "host_raises_of_three",
        "rank 0 of three, which serves the store, raises",
        do.fails,
        "injected",
        setup=replace(HOSTED, world=3),
    ),
    _case(
        "host_killed",
        "rank 0, which serves the store, is killed",
        Raises("RuntimeError", ("rank 0|store",), on="others"),
        at(1, "before layers.1", do.killed, rank=0),
        setup=HOSTED,
        deaths=(0,),
    ),
    _case(
        "host_ends_well",
        "rank 0, which serves the store, is done two seconds before rank 1",
        Equal(),
        at(3, "over", rank=1, stall=2.0),
        at(3, "over", do.looks, rank=1),
        setup=HOSTED,
    ),
    _case(
        "host_ends_last",
        "rank 0, which serves the store, is done two seconds after rank 1",
        Equal(),
        at(3, "over", rank=0, stall=2.0),
        at(3, "over", do.looks, rank=0),
        setup=HOSTED,
    ),
    _case(
        "group_destroyed",
        "all ranks destroy the process group at their end, rank 1 late",
        Equal(),
        at(3, "over", rank=1, stall=1.0),
        at(3, "over", do.group_destroyed),
        setup=HOSTED,
    ),
    _case(
        "host_gone",
        "rank 0, which serves the store, is done, and rank 1 runs one forward more",
        Raises("RuntimeError", ("rank 0|store",), on=(1,)),
        at(3, "over", do.one_more_forward, rank=1),
        setup=HOSTED,
    ),
    _case(
        "done_and_gone",
        "rank 0 is done, and rank 1 runs one forward more",
        Raises("PeerFailed", ("rank 0", "ended"), on=(1,)),
        at(3, "over", do.ends, rank=0),
        at(3, "over", do.one_more_forward, rank=1),
    ),
)

CASES: tuple[Case, ...] = (*CHILDREN, *COLLECTED, *ENDS)
