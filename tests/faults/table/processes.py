"""Processes that are killed, stopped, slow or gone: who is left is told which rank, in time."""

from __future__ import annotations

import signal
from typing import Any

from tests.faults.actions import Action, evaluate, leave, send_signal, stop_for
from tests.faults.cases import Case, Equal, Raises, Setup, at
from tests.faults.deeds import processes as do

# Silence, which is a third of the group's limit here, and some seconds.
STOPPED_SECONDS = 36.0
OF_3 = Setup(world=3)


def _dies(name: str, does: str, event: str, action: Action | None = None, step: int = 1, **more: Any) -> Case:
    """Its peers raise, within five seconds, and name it."""
    rank = more.pop("rank", 1)
    fault = at(step, event, action, rank=rank, kill=action is None)
    wanted = Raises("PeerFailed", (f"rank {rank}",), on="others", within=more.pop("within", 5.0))
    return Case(f"processes/{name}", does, wanted, (fault,), deaths=(rank,), **more)


def _harmless(name: str, does: str, event: str, action: Action | None = None, step: int = 1, **more: Any) -> Case:
    """Nobody may raise anything, and the result is bitwise the undisturbed one."""
    rank, stall = more.pop("rank", 1), more.pop("stall", 0.0)
    return Case(f"processes/{name}", does, Equal(), (at(step, event, action, rank=rank, stall=stall),), **more)


CASES: tuple[Case, ...] = (
    _dies("killed_before_step", "rank 1 is killed between two steps", "step", fast=True),
    _dies("killed_in_forward", "rank 1 is killed in the forward of layers.1", "before layers.1"),
    _dies("killed_in_backward", "rank 1 is killed in the backward of layers.1", "backward layers.1", fast=True),
    _dies("killed_before_update", "rank 1 is killed between backward and update", "gradients"),
    _dies("killed_behind_update", "rank 1 is killed after its update", "updated"),
    _dies("killed_in_first_forward", "rank 1 is killed in the very first forward", "before layers.0", step=0),
    _dies("killed_before_first_forward", "rank 1 is killed after fully_shard", "ready", step=-1),
    _dies(
        "killed_in_recomputation",
        "rank 1 is killed while it recomputes a block",
        "again layers.1.up",
        setup=Setup(recompute=True),
    ),
    Case(
        "processes/killed_in_evaluation",
        "rank 1 is killed in an evaluation",
        Raises("PeerFailed", ("rank 1",), on=(0,)),
        (at(1, "step", evaluate, rank=0), at(1, "step", rank=1, kill=True)),
        deaths=(1,),
    ),
    _dies("killed_rank_0", "rank 0 is killed in forward", "before layers.1", rank=0),
    _dies("killed_of_three", "rank 1 of three is killed in backward", "backward layers.1", setup=OF_3),
    _dies("killed_last_of_three", "rank 2 of three is killed in forward", "before layers.2", rank=2, setup=OF_3),
    _dies(
        "killed_of_a_mesh",
        "rank 3 of a 2 x 2 mesh is killed in backward",
        "backward layers.1",
        rank=3,
        setup=Setup(world=4, options=do.hsdp),
    ),
    Case(
        "processes/two_killed",
        "ranks 1 and 2 of three are killed in forward",
        Raises("PeerFailed", ("rank [12]",), on=(0,)),
        (at(1, "before layers.1", rank=1, kill=True), at(1, "before layers.1", rank=2, kill=True)),
        OF_3,
        deaths=(1, 2),
    ),
    _dies("killed_in_guard", "rank 1 is killed at the end of a guard", "gradients", setup=Setup(guard=True)),
    Case(
        "processes/killed_in_retry",
        "rank 1 raises, and is killed when all try again",
        Raises("PeerFailed", ("rank 1",), on="others"),
        (at(1, "before layers.1", rank=1), at(1, "before layers.1", rank=1, kill=True)),
        Setup(catches=1),
        deaths=(1,),
    ),
    _dies("segfault", "rank 1 ends by SIGSEGV", "before layers.1", send_signal(signal.SIGSEGV)),
    _dies("abort", "rank 1 ends by SIGABRT, as C++ code does", "before layers.1", send_signal(signal.SIGABRT)),
    _dies(
        "terminated", "rank 1 gets SIGTERM, which it does not handle", "before layers.1", send_signal(signal.SIGTERM)
    ),
    _dies("left", "rank 1 leaves by os._exit(0), without a word", "before layers.1", leave(0)),
    Case(
        "processes/exit",
        "rank 1 calls sys.exit(3) in forward",
        Raises("PeerFailed", ("rank 1",), on="others"),
        (at(1, "before layers.1", do.exit_in_forward, rank=1),),
    ),
    _dies(
        "stopped_in_forward",
        "rank 1 is stopped in forward and stays so",
        "before layers.1",
        send_signal(signal.SIGSTOP),
        within=STOPPED_SECONDS,
        limit=40.0,
    ),
    _dies(
        "stopped_in_backward",
        "rank 1 is stopped in backward and stays so",
        "backward layers.1",
        send_signal(signal.SIGSTOP),
        within=STOPPED_SECONDS,
        limit=40.0,
    ),
    _dies(
        "stopped_between_steps",
        "rank 1 of three is stopped between steps",
        "step",
        send_signal(signal.SIGSTOP),
        within=STOPPED_SECONDS,
        limit=40.0,
        setup=OF_3,
    ),
    _harmless(
        "stopped_for_a_while", "rank 1 is stopped for three seconds and continues", "before layers.1", stop_for(3.0)
    ),
    _harmless("slow_forward", "rank 1 needs four seconds for a forward", "before layers.1", stall=4.0, fast=True),
    _harmless("slow_backward", "rank 1 needs four seconds for a backward", "backward layers.1", stall=4.0),
    _harmless("slow_between_steps", "rank 1 needs seven seconds between steps", "step", stall=7.0),
    _harmless("slow_every_step", "rank 1 needs 0.7 s more in each forward", "step", do.slow_every_step, step=0),
    _harmless("very_slow", "rank 1 needs 26 seconds between steps, alive all the time", "step", stall=26.0, limit=50.0),
    _harmless("busy", "rank 1's Python is busy for three seconds", "before layers.1", do.busy),
    _harmless(
        "holds_the_lock",
        "rank 1 is in C code for three seconds and lets no thread run",
        "before layers.1",
        do.hold_the_lock,
    ),
    _harmless("failing_thread", "a thread of the user's raises on rank 1", "before layers.1", do.failing_thread),
    _harmless("forks", "rank 1 forks a process that ends at once", "step", do.fork_worker),
    _harmless("child_killed", "a child of rank 1 is killed", "step", do.fork_killed_worker),
    _harmless("data_loader", "a data loader's worker comes and goes", "step", do.loader),
    _harmless("handled_signal", "rank 1 gets a signal that it handles", "before layers.1", do.ignored_signal),
    Case(
        "processes/own_group",
        "all ranks make, use and end a process group of their own",
        Equal(),
        (at(1, "step", do.new_group),),
    ),
    Case(
        "processes/barriers",
        "all ranks meet in a barrier between forward and backward",
        Equal(),
        (at(1, "loss", do.barrier),),
    ),
    Case(
        "processes/network",
        "all connections of rank 1 are cut",
        Raises("RuntimeError", ("rank|peer|connection",), on="all"),
        (at(1, "before layers.1", do.close_sockets, rank=1),),
    ),
    Case(
        "processes/no_descriptors",
        "rank 1 can open no more files, and trains on",
        Equal(),
        (at(1, "step", do.no_descriptors, rank=1),),
    ),
)
