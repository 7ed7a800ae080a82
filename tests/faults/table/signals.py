"""Signals that reach a rank while it waits in an agreement: Ctrl-C, handlers that raise, stops and kills."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

from tests.faults.actions import Action
from tests.faults.cases import Case, Equal, Outcome, Raises, Recovers, Setup, at
from tests.faults.deeds import checkpoints as kept
from tests.faults.deeds import signals as do
from tests.faults.deeds import waits as calls
from tests.faults.table.waits import AFTER_SILENCE, LISTENS

# Rank 0 comes so much later than rank 1, which is struck in between.
LATE = 2.0
CATCHES = Setup(catches=6)
GUARDED = replace(CATCHES, guard=True)
UPDATES = replace(CATCHES, guard="step")
CLIPS = replace(CATCHES, clip=True)


def _waiting(name: str, does: str, expected: Outcome, place: tuple[int, str], action: Action, **more: Any) -> Case:
    """Rank 1 begins to wait at a place to which rank 0 comes two seconds later; `action` strikes in between."""
    step, event = place
    call = more.pop("call", None)
    struck = [*more.pop("before", ()), at(step, event, action, rank=1), at(step, event, rank=0, stall=LATE)]
    if call is not None:
        struck.append(at(step, event, call))
    return Case(f"signals/{name}", does, expected, tuple(struck), limit=more.pop("limit", 25.0), **more)


def _caught(name: str, where: str, place: tuple[int, str], **more: Any) -> tuple[Case, Case]:
    """Rank 1 catches what the signal raised and tries again; whoever hears of it hears of rank 1, and does, too."""
    setup = more.pop("setup", CATCHES)
    # Rank 0 is struck as well, by being late.
    expected = more.pop("expected", Equal())
    return (
        _waiting(
            f"{name}_interrupt", f"Ctrl-C reaches rank 1 {where}", expected, place, do.interrupt(), setup=setup, **more
        ),
        _waiting(
            f"{name}_handler",
            f"a handler of SIGTERM raises on rank 1 {where}",
            expected,
            place,
            do.terminate(),
            setup=setup,
            **more,
        ),
    )


def _ended(name: str, where: str, place: tuple[int, str], **more: Any) -> tuple[Case, Case]:
    """Nobody catches it: rank 0, which comes later, hears of rank 1."""
    return tuple(
        _waiting(
            f"{name}_{how}",
            f"{what} reaches rank 1 {where}, and nobody catches it",
            Raises("RuntimeError", ("rank 1", text), on=(0,), within=5.0 + LATE),
            place,
            action,
            **more,
        )
        for how, what, text, action in (
            ("interrupt", "Ctrl-C", "KeyboardInterrupt", do.interrupt()),
            ("handler", "a signal whose handler raises", "Terminated|injected", do.terminate()),
        )
    )  # type: ignore[return-value]


def _gone(name: str, where: str, place: tuple[int, str], **more: Any) -> tuple[Case, Case]:
    """Rank 1 is killed, or stopped, while it waits."""
    setup = replace(more.pop("setup", Setup()), environment=LISTENS.environment)
    return (
        _waiting(
            f"{name}_killed",
            f"rank 1 is killed {where}",
            Raises("RuntimeError", ("rank 1",), on=(0,), within=5.0 + LATE),
            place,
            do.send(signal.SIGKILL),
            deaths=(1,),
            setup=setup,
            **more,
        ),
        _waiting(
            f"{name}_stopped",
            f"rank 1 is stopped {where}",
            Raises("RuntimeError", ("rank 1",), on=(0,), within=AFTER_SILENCE + LATE),
            place,
            do.send(signal.SIGSTOP),
            deaths=(1,),
            setup=setup,
            **more,
        ),
    )


META = (at(-1, "built", calls.on_meta),)
SAVED = (at(0, "updated", kept.save),)

CASES: tuple[Case, ...] = (
    *_caught("gather", "while it waits for a gather of step 1", (1, "step")),
    *_caught("first", "while it waits in the first forward", (0, "step")),
    *_caught("backward", "while it waits for a reduction", (1, "loss")),
    *_caught("guard", "while it waits at the end of a guard", (1, "gradients"), setup=GUARDED),
    *_caught("update", "while it waits in the update of a guarded step", (1, "gradients"), setup=UPDATES),
    *_caught(
        "clip",
        "while it waits in clip_grad_norm_, outside of a guard: rank 0 takes its step",
        (1, "gradients"),
        setup=CLIPS,
        expected=Raises("RanksDisagree", ("rank 0", "rank 1", "load a checkpoint"), within=12.0),
    ),
    *_caught(
        "clip_guarded",
        "while it waits in clip_grad_norm_, in a guarded step",
        (1, "gradients"),
        setup=replace(UPDATES, clip=True),
    ),
    *_caught("full_params", "while it waits in full_params", (1, "step"), call=do.tried_again(calls.full_params)),
    *_caught("drift", "while it waits in find_drift", (1, "step"), call=do.tried_again(calls.find_drift)),
    *_caught("sync", "while it waits in sync_module_states", (-1, "built"), call=do.tried_again(calls.synchronise)),
    *_caught("save", "while it waits in a save, and saves again", (1, "step"), call=do.tried_again(kept.save)),
    *_caught(
        "load",
        "while it waits in a load, and loads again",
        (0, "cleared"),
        call=do.tried_again(kept.load),
        before=SAVED,
    ),
    *_ended("ends_in_sync", "in sync_module_states", (-1, "built"), call=calls.synchronise),
    *_ended("ends_in_materialize", "in materialize", (-1, "wrapped"), call=calls.materialize, before=META),
    *_ended("ends_in_first", "in the first forward", (0, "step")),
    *_ended("ends_in_save", "in a save", (1, "step"), call=kept.save),
    *_ended("ends_in_load", "in a load", (1, "step"), call=kept.load, before=SAVED),
    *_ended("ends_in_guard", "at the end of a guard", (1, "gradients"), setup=Setup(guard=True)),
    *_gone("sync", "in sync_module_states", (-1, "built"), call=calls.synchronise),
    *_gone("materialize", "in materialize", (-1, "wrapped"), call=calls.materialize, before=META),
    *_gone("first", "while it waits in the first forward", (0, "step")),
    *_gone("full_params", "while it waits in full_params", (1, "step"), call=calls.full_params),
    *_gone("guard", "while it waits at the end of a guard", (1, "gradients"), setup=Setup(guard=True)),
    *_gone("save", "in a save", (1, "step"), call=kept.save),
    *_gone("load", "in a load", (1, "step"), call=kept.load, before=SAVED),
    _waiting("noted", "rank 1 gets a signal that it notes while it waits", Equal(), (1, "step"), do.noted, fast=True),
    _waiting(
        "noted_in_save",
        "rank 1 gets a signal that it notes while it saves",
        Equal(),
        (1, "step"),
        do.noted,
        call=kept.save,
    ),
    _waiting("alarms", "rank 1 gets a signal every five milliseconds while it waits", Equal(), (1, "step"), do.alarms),
    _waiting(
        "alarms_first",
        "rank 1 gets a signal every five milliseconds in its first forward",
        Equal(),
        (0, "step"),
        do.alarms,
    ),
    _waiting(
        "paused", "rank 1 is stopped for two seconds while it waits", Equal(), (1, "step"), do.stopped_for_a_while
    ),
    _waiting(
        "paused_in_save",
        "rank 1 is stopped for two seconds while it saves",
        Equal(),
        (1, "step"),
        do.stopped_for_a_while,
        call=kept.save,
    ),
    Case(
        "signals/interrupt_of_all",
        "Ctrl-C reaches all ranks, at different places of a step",
        Equal(),
        (
            at(1, "before layers.1", do.interrupt(0.2)),
            at(1, "before layers.1", rank=0, stall=0.5),
            at(1, "backward layers.1", rank=1, stall=0.5),
        ),
        CATCHES,
        limit=25.0,
    ),
    Case(
        "signals/interrupt_of_one",
        "Ctrl-C reaches rank 1 alone while both wait for nobody",
        Recovers("RuntimeError", ("rank 1",), within=8.0),
        (at(1, "before layers.1", do.interrupt(0.2), rank=1), at(1, "before layers.1", rank=1, stall=0.6)),
        CATCHES,
        limit=25.0,
    ),
)
