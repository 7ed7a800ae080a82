"""Waits beside those of a step: first contacts, sync_module_states, materialize, settings of one rank, the limit."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

from tests.faults.actions import Action, send_signal, throw
from tests.faults.cases import PLAIN, Case, Equal, Moment, Outcome, Raises, Setup, at
from tests.faults.deeds import waits as do

TO_DO = r"; [a-z]+"
SILENCE = 4.0
# What is left to silence: some seconds to begin to wait, to see it, and to tell.
AFTER_SILENCE = SILENCE + 6.0
LISTENS = Setup(environment=(("FULLSHARD_SILENCE", f"{SILENCE:g}"),))
# A process group whose own limit is short, and a rank that is alive and does not come.
LIMIT = 9.0
SHORT = Setup(group_seconds=LIMIT)
ASLEEP = do.sleep(25.0)
PLACE = r"waits\.py:\d+"


def _case(name: str, does: str, expected: Outcome, *struck: Any, **more: Any) -> Case:
    return Case(
        f"waits/{name}", does, expected, struck, more.pop("setup", Setup()), limit=more.pop("limit", 20.0), **more
    )


# What comes with a fate of rank 1: a silence that is noticed, or one that is left to the process group's limit.
DEAD: dict[str, Any] = {"deaths": (1,)}
SILENT: dict[str, Any] = {"deaths": (1,), "setup": LISTENS, "within": AFTER_SILENCE}
UNHEARD: dict[str, Any] = {"setup": SHORT, "within": LIMIT + 6.0, "limit": 35.0}
ALIVE: dict[str, Any] = {**UNHEARD, "error": "RuntimeError"}


def _fate(
    name: str, does: str, place: Moment, action: Action, *words: str, call: Action | None = None, **more: Any
) -> Case:
    """Rank 1 does `action` where the others make `call`, and where it would have, too; they hear of it."""
    struck = [*more.pop("before", ()), at(*place, action, rank=1)]
    if call is not None:
        # On rank 1 as well, where it gets there.
        struck += [at(*place, call)]
    error, on, within = more.pop("error", "PeerFailed"), more.pop("on", (0,)), more.pop("within", 5.0)
    return _case(name, does, Raises(error, ("rank 1", *words), on=on, within=within), *struck, **more)


KILLED, STOPPED = send_signal(signal.SIGKILL), send_signal(signal.SIGSTOP)
RAISES = throw(ValueError, "injected")


def _fates(name: str, what: str, place: Moment, call: Action, before: tuple[Any, ...] = ()) -> tuple[Case, ...]:
    """Four fates of rank 1 at a call that the others make."""
    same: dict[str, Any] = {"call": call, "before": before}
    for_long = f"rank 1 sleeps before {what}, for longer than the process group's limit"
    return (
        _fate(f"{name}_killed", f"rank 1 is killed before {what}", place, KILLED, **same, **DEAD, setup=LISTENS),
        _fate(f"{name}_raises", f"rank 1 raises before {what}", place, RAISES, "injected", **same),
        _fate(f"{name}_stopped", f"rank 1 is stopped before {what}", place, STOPPED, **same, **SILENT),
        _fate(f"{name}_asleep", for_long, place, ASLEEP, PLACE, **same, **ALIVE),
    )


META = (at(-1, "built", do.on_meta),)

COLLECTIVES = (
    # Once before, so that there is a sign of life to miss.
    *_fates("sync", "sync_module_states", (-1, "built"), do.synchronise, before=(at(-1, "built", do.synchronise),)),
    _fate(
        "sync_left_out",
        "rank 1 leaves sync_module_states out",
        (-1, "built"),
        do.sleep(0.0),
        "sync_module_states",
        TO_DO,
        error="RanksDisagree",
        before=(at(-1, "built", do.synchronise, rank=0),),
        within=8.0,
    ),
    _case(
        "sync_late",
        "rank 1 comes to sync_module_states three seconds late",
        Equal(),
        at(-1, "built", rank=1, stall=3.0),
        at(-1, "built", do.synchronise),
    ),
    *_fates("materialize", "materialize", (-1, "wrapped"), do.materialize, before=META),
    _fate(
        "materialize_left_out",
        "rank 1 writes values itself where the others call materialize",
        (-1, "wrapped"),
        do.write_values,
        "materialize",
        TO_DO,
        error="RanksDisagree",
        before=(*META, at(-1, "wrapped", do.materialize, rank=0)),
        within=8.0,
    ),
    _case(
        "materialize_late",
        "rank 1 comes to materialize three seconds late",
        PLAIN,
        *META,
        at(-1, "wrapped", rank=1, stall=3.0),
        at(-1, "wrapped", do.materialize),
    ),
    *_fates("full_params", "full_params", (1, "step"), do.full_params),
    *_fates("guard", "the end of a guarded block", (1, "step"), do.guard),
    *_fates("clip", "clip_grad_norm_", (1, "gradients"), do.clip),
    _fate("check_killed", "rank 1 is killed before check_gradients", (1, "gradients"), KILLED, call=do.check, **DEAD),
    _fate("drift_killed", "rank 1 is killed before find_drift", (1, "step"), KILLED, call=do.find_drift, **DEAD),
    _fate("drift_raises", "rank 1 raises before find_drift", (1, "step"), RAISES, "injected", call=do.find_drift),
    _fate(
        "buffers_killed",
        "rank 1 is killed before buffers are synchronised",
        (1, "step"),
        KILLED,
        call=do.synchronise_buffers,
        **DEAD,
    ),
    _case(
        "guard_on_one",
        "rank 1 alone has a guarded block",
        Raises("RanksDisagree", ("rank 1", "guard", TO_DO), within=8.0),
        at(1, "step", do.guard, rank=1),
    ),
    _case(
        "drift_on_one",
        "rank 1 alone looks for drift",
        Raises("RanksDisagree", ("rank 1", "drift|buffers|unsharded", TO_DO), within=8.0),
        at(1, "step", do.find_drift, rank=1),
    ),
)

FIRST = (
    _fate(
        "first_killed",
        "rank 1 is killed before it touches the library: there is no sign of life to miss, and the limit counts",
        (-1, "start"),
        KILLED,
        **UNHEARD,
        **DEAD,
    ),
    _fate("first_raises", "rank 1 raises before it builds a model", (-1, "start"), RAISES, "injected", fast=True),
    _fate("first_ends", "rank 1 ends well before it builds a model", (-1, "start"), do.leave),
    _fate(
        "first_stopped",
        "rank 1 is stopped before it touches the library: likewise",
        (-1, "start"),
        STOPPED,
        **UNHEARD,
        **DEAD,
    ),
    _fate(
        "first_asleep",
        "rank 1 never builds a model, and is alive: it has said nothing of itself",
        (-1, "start"),
        ASLEEP,
        "has not begun to train",
        **ALIVE,
    ),
    _fate("first_asleep_built", "rank 1 builds a model, and never runs it", (-1, "ready"), ASLEEP, PLACE, **ALIVE),
    _fate(
        "first_half_killed",
        "rank 1 is killed between two calls of fully_shard",
        (-1, "built"),
        do.half_built(KILLED),
        **SILENT,
    ),
    _fate(
        "first_half_raises",
        "rank 1 raises between two calls of fully_shard",
        (-1, "built"),
        do.half_built(RAISES),
        "injected",
    ),
    _fate(
        "first_refused",
        "fully_shard refuses an argument of rank 1 alone",
        (-1, "built"),
        do.fails_in_fully_shard,
        "reshard_after_forward",
    ),
    _fate("first_raises_built", "rank 1 raises after fully_shard", (-1, "ready"), RAISES, "injected"),
    _fate("first_stopped_built", "rank 1 is stopped after fully_shard", (-1, "ready"), STOPPED, **SILENT),
    _fate(
        "first_of_three",
        "rank 1 of three raises before it builds a model",
        (-1, "start"),
        RAISES,
        "injected",
        setup=Setup(world=3),
        on=(0, 2),
    ),
    _case("first_late", "rank 1 builds its model three seconds later", Equal(), at(-1, "start", rank=1, stall=3.0)),
    _case("first_late_built", "rank 1 runs its model four seconds later", Equal(), at(-1, "ready", rank=1, stall=4.0)),
    _case(
        "first_again",
        "rank 1's build fails, and it builds again",
        Equal(),
        at(-1, "built", do.throw_once, rank=1),
        program=do.begun_twice,
    ),
    _case(
        "first_model_more",
        "rank 1 builds a model more, which nobody runs",
        Equal(),
        at(-1, "built", do.second_model, rank=1),
        fast=True,
    ),
    _case(
        "first_model_more_trained",
        "rank 1 runs another model first, which the others have not",
        Raises("RuntimeError", ("rank", TO_DO), within=8.0),
        at(-1, "ready", do.train_second_model, rank=1),
    ),
    _case(
        "first_full_params",
        "rank 1 enters full_params where the others run their first forward",
        Raises("RanksDisagree", ("rank 1", "full_params", TO_DO), within=8.0),
        at(-1, "ready", do.full_params, rank=1),
    ),
    _case(
        "first_guard",
        "rank 1 enters a guard where the others run their first forward",
        Raises("RanksDisagree", ("rank 1", "guard", TO_DO), within=8.0),
        at(-1, "ready", do.guard, rank=1),
    ),
    _case(
        "first_evaluation",
        "rank 1 evaluates first, the others train",
        Raises("RanksDisagree", ("rank 1", TO_DO), within=8.0),
        at(-1, "ready", do.forward, rank=1),
    ),
)


def _setting(name: str, does: str, *words: str, on: Any = (0,), error: str = "RanksDisagree", **values: str) -> Case:
    """Of rank 1 alone, which those who compare settings are told."""
    expected = Raises(error, ("rank 1", *words, TO_DO), on=on)
    return _case(name, does, expected, at(-1, "start", do.set_environment(**values), rank=1))


def _everywhere(name: str, does: str, *environment: tuple[str, str], expected: Outcome = PLAIN) -> Case:
    return _case(name, does, expected, setup=Setup(environment=environment))


SETTINGS = (
    _setting("guard_off", "rank 1 alone has FULLSHARD_GUARD=off", "FULLSHARD_GUARD", r"\boff\b", FULLSHARD_GUARD="off"),
    _setting(
        "guard_structure",
        "rank 1 alone has FULLSHARD_GUARD=structure",
        "FULLSHARD_GUARD",
        "structure",
        FULLSHARD_GUARD="structure",
    ),
    _case(
        "guard_unknown",
        "rank 1 has FULLSHARD_GUARD=nothing, which is no setting",
        Raises("PeerFailed", ("rank 1", "FULLSHARD_GUARD"), on=(0,)),
        at(-1, "start", do.set_environment(FULLSHARD_GUARD="nothing"), rank=1),
    ),
    _case(
        "local_ranks",
        "rank 1 alone has LOCAL_WORLD_SIZE=1, which nothing of ours reads",
        PLAIN,
        at(-1, "start", do.set_environment(LOCAL_WORLD_SIZE="1"), rank=1),
    ),
    _setting(
        "messages", "rank 1 alone has FULLSHARD_COMMUNICATION=torch", "communication", FULLSHARD_COMMUNICATION="torch"
    ),
    _everywhere("guard_off_everywhere", "all ranks have FULLSHARD_GUARD=off", ("FULLSHARD_GUARD", "off")),
    _everywhere(
        "guard_structure_everywhere", "all ranks have FULLSHARD_GUARD=structure", ("FULLSHARD_GUARD", "structure")
    ),
    _everywhere(
        "old_agree",
        "FULLSHARD_AGREE is set, which is no setting",
        ("FULLSHARD_AGREE", "none"),
        expected=Raises("ValueError", ("FULLSHARD_AGREE", "FULLSHARD_GUARD")),
    ),
    _everywhere(
        "old_order",
        "FULLSHARD_ORDER is set, which is no setting",
        ("FULLSHARD_ORDER", "trust"),
        expected=Raises("ValueError", ("FULLSHARD_ORDER", "FULLSHARD_GUARD")),
    ),
)

LIMITS = (
    _fate(
        "limit_forward",
        "rank 1 sleeps in a forward, for longer than the process group's limit",
        (1, "before layers.1"),
        ASLEEP,
        PLACE,
        **ALIVE,
    ),
    _fate(
        "limit_between",
        "rank 1 sleeps between two steps, for longer than the process group's limit",
        (1, "step"),
        ASLEEP,
        PLACE,
        **ALIVE,
    ),
    _fate(
        "limit_of_three",
        "rank 1 of three sleeps in its backward, for longer than the process group's limit",
        (1, "backward layers.1"),
        ASLEEP,
        PLACE,
        on=(0, 2),
        **{**ALIVE, "setup": replace(SHORT, world=3)},
    ),
    _case(
        "limit_nearly",
        "rank 1 sleeps for nearly as long as the process group's limit",
        Equal(),
        at(1, "step", rank=1, stall=6.0),
        setup=SHORT,
    ),
)

CASES: tuple[Case, ...] = (*COLLECTIVES, *FIRST, *SETTINGS, *LIMITS)
