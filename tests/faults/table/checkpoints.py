"""Checkpoints of several ranks: who does not save, or something else; loads from other places; ends in between."""

from __future__ import annotations

import signal
from typing import Any

from tests.faults.actions import Action, send_signal, throw
from tests.faults.cases import Case, Equal, Outcome, Raises, Setup, at
from tests.faults.deeds import checkpoints as do
from tests.faults.deeds import waits
from tests.faults.table.waits import ASLEEP, DEAD, LISTENS, PLACE, SILENT, TO_DO, UNHEARD

KILLED, STOPPED = send_signal(signal.SIGKILL), send_signal(signal.SIGSTOP)
RAISES = throw(ValueError, "injected")
# Two checkpoints: of the state as it is, and of other values.
TWO = (at(0, "updated", do.save_to("first")), at(0, "updated", do.save_moved("second")))
SAVED = (at(0, "updated", do.save),)


def _case(name: str, does: str, expected: Outcome, *struck: Any, **more: Any) -> Case:
    setup = more.pop("setup", Setup(steps=4))
    return Case(f"checkpoints/{name}", does, expected, struck, setup, limit=more.pop("limit", 20.0), **more)


def _disagree(name: str, does: str, *struck: Any, words: tuple[str, ...], **more: Any) -> Case:
    expected = Raises("RuntimeError", ("rank", *words), on=more.pop("on", "all"), within=8.0)
    return _case(name, does, expected, *struck, **more)


def _fate(name: str, does: str, action: Action, call: Action, *words: str, **more: Any) -> Case:
    """Rank 1 comes to its end where all ranks save or load."""
    expected = Raises("RuntimeError", ("rank 1", *words), on=more.pop("on", (0,)), within=more.pop("within", 5.0))
    struck = (*more.pop("before", ()), at(1, "step", action, rank=1), at(1, "step", call))
    return _case(name, does, expected, *struck, **more)


def _fates(name: str, what: str, call: Action, before: tuple[Any, ...] = ()) -> tuple[Case, ...]:
    for_long = f"rank 1 sleeps before {what}, for longer than the process group's limit"
    return (
        _fate(f"{name}_killed", f"rank 1 is killed before {what}", KILLED, call, before=before, setup=LISTENS, **DEAD),
        _fate(f"{name}_raises", f"rank 1 raises before {what}", RAISES, call, "injected", before=before),
        _fate(f"{name}_ends", f"rank 1 ends well before {what}", do.leave, call, before=before),
        _fate(f"{name}_stopped", f"rank 1 is stopped before {what}", STOPPED, call, before=before, **SILENT),
        _fate(f"{name}_asleep", for_long, ASLEEP, call, PLACE, before=before, **UNHEARD),
    )


ALONE = (
    _disagree("save_on_one", "rank 1 alone saves", at(1, "step", do.save, rank=1), words=("save", TO_DO)),
    _disagree("save_on_rank_0", "rank 0 alone saves", at(1, "step", do.save, rank=0), words=("save", TO_DO)),
    _disagree(
        "save_on_one_of_three",
        "rank 1 of three alone saves",
        at(1, "step", do.save, rank=1),
        words=("save", "rank 1", TO_DO),
        setup=Setup(steps=4, world=3),
    ),
    _disagree(
        "save_left_out_by_one",
        "rank 1 of three does not save",
        at(1, "step", do.save, rank=0),
        at(1, "step", do.save, rank=2),
        words=("save", "rank 1", TO_DO),
        setup=Setup(steps=4, world=3),
    ),
    _disagree("load_on_one", "rank 1 alone loads", *SAVED, at(1, "step", do.load, rank=1), words=("load", TO_DO)),
    _disagree(
        "load_beside_save",
        "rank 1 loads where the others save",
        *SAVED,
        at(1, "step", do.save, rank=0),
        at(1, "step", do.load, rank=1),
        words=("load", "save", TO_DO),
    ),
    _disagree(
        "async_on_one",
        "rank 1 alone begins an asynchronous save, and waits for it",
        at(1, "step", do.begin_and_finish, rank=1),
        words=("save", TO_DO),
    ),
    _disagree(
        "save_beside_evaluation",
        "rank 1 saves where the others run a forward",
        at(1, "step", waits.forward, rank=0),
        at(1, "step", do.save, rank=1),
        words=("save", TO_DO),
    ),
    _disagree(
        "save_without_the_others",
        "rank 1 saves by itself (no_dist) what the others save together",
        at(1, "step", do.save, rank=0),
        at(1, "step", do.save_without_the_others, rank=1),
        words=("save", TO_DO),
        on=(0,),
    ),
    _disagree(
        "save_before_first",
        "rank 1 alone saves before the first step",
        at(-1, "ready", do.save, rank=1),
        words=("save", TO_DO),
    ),
)

PATHS = (
    _disagree(
        "other_path",
        "each rank saves to another path",
        at(1, "step", do.save_by_rank),
        words=("saved", "rank 1", TO_DO),
        fast=True,
    ),
    _disagree(
        "load_other_path",
        "each rank loads another checkpoint",
        *TWO,
        at(1, "step", do.load_by_rank),
        words=("first|second", "rank 1", TO_DO),
    ),
    _disagree(
        "load_other_path_of_replicas",
        "each rank loads another checkpoint, nothing is sharded",
        *TWO,
        at(1, "step", do.load_by_rank),
        words=("first|second", "rank 1", TO_DO),
        setup=Setup(steps=4, how="replicate"),
    ),
    _disagree(
        "load_not_there",
        "rank 1 loads a checkpoint that is not there",
        *SAVED,
        at(1, "step", do.load, rank=0),
        at(1, "step", do.load_from("nowhere"), rank=1),
        words=("nowhere|path", "rank 1"),
    ),
    _disagree(
        "other_value",
        "a value differs on rank 1 that is saved once",
        at(1, "step", do.save_with(epoch=1), rank=0),
        at(1, "step", do.save_with(epoch=2), rank=1),
        words=("epoch", "rank 1"),
    ),
    _disagree(
        "not_to_be_saved",
        "rank 1 has something in its state that cannot be saved",
        at(1, "step", do.save, rank=0),
        at(1, "step", do.save_what_cannot_be, rank=1),
        words=("lock", "rank 1"),
        on=(0,),
    ),
    _disagree(
        "load_alone_other",
        "each rank loads another checkpoint, by itself (no_dist)",
        *TWO,
        at(1, "step", do.load_alone_by_rank),
        words=("first|second|load|checkpoint", "rank 1", TO_DO),
    ),
    _disagree(
        "disk_full", "rank 1 can write no more to its disk", at(1, "step", do.save_on_a_full_disk), words=("rank 1",)
    ),
    _case(
        "not_a_folder",
        "a file stands where all ranks save",
        Raises("CheckpointError", ("saved",)),
        at(1, "step", do.not_writable),
        at(1, "step", do.save),
    ),
)

FATES = (
    *_fates("save", "a save", do.save),
    *_fates("load", "a load", do.load, SAVED),
    *_fates("async", "an asynchronous save that the others wait for", do.begin_and_finish),
    _case(
        "async_killed_later",
        "rank 1 is killed between the beginning of an asynchronous save and its end",
        Raises("RuntimeError", ("rank 1",), on=(0,)),
        at(1, "step", do.begin),
        at(1, "step", KILLED, rank=1),
        at(1, "step", do.finish, rank=0),
        deaths=(1,),
        setup=LISTENS,
    ),
)


def _legal(name: str, does: str, *struck: Any, **more: Any) -> Case:
    return _case(name, does, Equal(), *struck, **more)


LEGAL = (
    _legal("save_of_all", "all ranks save in each step", *(at(s, "step", do.save) for s in range(4)), fast=True),
    _legal(
        "load_of_all", "all ranks load what they have just saved", at(1, "updated", do.save), at(1, "cleared", do.load)
    ),
    _legal("async_of_all", "all ranks save beside their training", at(1, "step", do.begin), at(3, "step", do.finish)),
    _legal(
        "async_looked_at_by_one",
        "rank 1 alone waits for an asynchronous save of all ranks",
        at(1, "step", do.begin),
        at(3, "step", do.finish, rank=1),
    ),
    _legal(
        "async_beside_save",
        "rank 1 saves asynchronously where the others save, and waits for it",
        at(1, "step", do.save, rank=0),
        at(1, "step", do.begin_and_finish, rank=1),
    ),
    _legal(
        "load_alone",
        "each rank loads the same checkpoint by itself (no_dist), which all have just saved",
        at(1, "updated", do.save_to("first")),
        at(1, "cleared", do.load_alone),
    ),
    _legal(
        "save_late",
        "rank 1 comes to a save three seconds late",
        at(1, "step", rank=1, stall=3.0),
        at(1, "step", do.save),
    ),
    _legal(
        "load_late",
        "rank 1 comes to a load three seconds late",
        at(0, "updated", do.save),
        at(0, "cleared", rank=1, stall=3.0),
        at(0, "cleared", do.load),
    ),
    _legal(
        "saved_alone",
        "each rank saves values of its own by itself (no_dist), at another step",
        at(1, "step", do.save_alone, rank=0),
        at(2, "step", do.save_alone, rank=1),
        at(3, "step", do.load_on_its_own),
    ),
    _legal(
        "looked_at_by_one",
        "rank 1 alone inspects and verifies a checkpoint",
        at(0, "updated", do.save),
        at(1, "step", do.look, rank=1),
    ),
    _legal("state_of_one", "rank 1 alone takes its state without saving it", at(1, "step", do.take_state, rank=1)),
    _legal("in_a_group", "all ranks save over a process group of their own", at(1, "step", do.save_in_group)),
)

CASES: tuple[Case, ...] = (*ALONE, *PATHS, *FATES, *LEGAL)
