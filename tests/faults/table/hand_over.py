"""Hand-over: transfers and weights, averages, sleep, and steps of whole matrices on their owners."""

from __future__ import annotations

import signal
from typing import Any

from tests.faults.actions import Action, leave, no_update, send_signal, throw
from tests.faults.cases import Case, Equal, Outcome, Raises, Recovers, Setup, at
from tests.faults.deeds import hand_over as do
from tests.faults.table.waits import AFTER_SILENCE, LISTENS, TO_DO

KILLED, STOPPED = send_signal(signal.SIGKILL), send_signal(signal.SIGSTOP)
RAISES = throw(ValueError, "injected")
THREE = Setup(world=3)
REPLICAS = Setup(options=do.replicas)
MUON = Setup(optimizer=do.muon)


def _case(name: str, does: str, expected: Outcome, *struck: Any, **more: Any) -> Case:
    setup = more.pop("setup", Setup())
    return Case(f"hand_over/{name}", does, expected, struck, setup, limit=more.pop("limit", 20.0), **more)


def _call(name: str, does: str, call: Action, before: Action | None, error: str, *words: str, **more: Any) -> Case:
    """All ranks call it between two steps; rank 1 does something before."""
    expected = Raises(error, words, on=more.pop("on", "all"), within=more.pop("within", 5.0))
    first = more.pop("first", ())
    struck = (*first, *((at(1, "cleared", before, rank=1),) if before is not None else ()), at(1, "cleared", call))
    return _case(name, does, expected, *struck, **more)


def _dies(name: str, does: str, call: Action, before: Action, **more: Any) -> Case:
    """Rank 1 comes to its end in the call, and the others hear of it."""
    more = {"on": (0,), "deaths": (1,), **more}
    return _call(name, does, call, before, "PeerFailed", "rank 1", **more)


def _legal(name: str, does: str, *struck: Any, **more: Any) -> Case:
    return _case(name, does, Equal("undisturbed"), *struck, **more)


TRANSFERS = (
    _legal("transfer", "all ranks hand the model over, and take it back", at(1, "cleared", do.hand_over)),
    _dies(
        "transfer_killed",
        "rank 1 is killed in the middle of a transfer",
        do.hand_over,
        do.in_a_message(KILLED),
        fast=True,
    ),
    _call(
        "transfer_ends",
        "rank 1 of three ends in the middle of a transfer",
        do.hand_over,
        do.in_a_message(leave(3)),
        "PeerFailed",
        "rank 1",
        on=(0, 2),
        deaths=(1,),
        setup=THREE,
    ),
    _dies(
        "transfer_stopped",
        "rank 1 is stopped in the middle of a transfer",
        do.hand_over,
        do.in_a_message(STOPPED),
        setup=LISTENS,
        within=AFTER_SILENCE,
    ),
    _call(
        "transfer_raises",
        "rank 1 raises in the middle of a transfer",
        do.hand_over,
        do.in_a_message(RAISES),
        "PeerFailed",
        "rank 1",
        "transfer",
        "injected",
        on=(0,),
    ),
    _legal(
        "transfer_again",
        "rank 1 raises in the middle of a transfer, and the next one restores the target",
        at(1, "cleared", do.in_a_message(RAISES), rank=1),
        at(1, "cleared", do.hand_over_twice),
    ),
    _call(
        "transfer_left_out",
        "rank 1 leaves a transfer out, and trains on",
        lambda run: do.hand_over(run) if run.rank != 1 else None,
        None,
        "RuntimeError",
        "rank 1|ranks? .*1",
        on=(0,),
        within=8.0,
    ),
    _call(
        "transfer_name",
        "rank 1 leaves a name out",
        do.hand_over,
        do.a_name_less,
        "ValueError",
        "rank 1",
        r"layers\.1\.up\.weight",
        "not in the source",
    ),
    _call(
        "transfer_dtypes",
        "the target of rank 1 has another dtype",
        do.hand_over,
        do.half_the_target,
        "ValueError",
        "float16",
        "float32",
        "rank",
    ),
    _call(
        "transfer_limit",
        "rank 1 has another limit",
        do.hand_over,
        do.given(limit_nbytes=128),
        "ValueError",
        "limit_nbytes",
    ),
    _call(
        "transfer_overflow",
        "rank 1 has a value that is none in the dtype of the messages",
        do.hand_over,
        do.large_value,
        "TransferError",
        "rank 1",
        r"layers\.1\.up\.weight",
        "float16",
        "unchanged",
        first=(at(1, "cleared", do.given(dtype=do.torch.float16)),),
        fast=True,
    ),
    _call(
        "transfer_room",
        "rank 1 has no room for a message",
        do.hand_over,
        do.without_room,
        "TransferError",
        "rank 1",
        "2 GiB",
        "unchanged",
    ),
)

WEIGHTS = (
    _legal("weights", "all ranks take full tensors", at(1, "cleared", do.take_weights)),
    _call(
        "weights_raises",
        "rank 1 raises with a bucket in its hands",
        do.take_weights,
        do.in_the_loop(RAISES),
        "RuntimeError",
        "rank 1",
        "weights",
        on=(0,),
    ),
    _call(
        "weights_break",
        "rank 1 leaves the loop of buckets early",
        do.take_weights,
        do.in_the_loop(do.breaks),
        "RuntimeError",
        "rank 1",
        "weights",
        on=(0,),
    ),
    _dies("weights_killed", "rank 1 is killed with a bucket in its hands", do.take_weights, do.in_the_loop(KILLED)),
    _dies(
        "weights_stopped",
        "rank 1 is stopped with a bucket in its hands",
        do.take_weights,
        do.in_the_loop(STOPPED),
        setup=LISTENS,
        within=AFTER_SILENCE,
    ),
    _call(
        "weights_overflow",
        "rank 1 has a value that is none in the dtype of the weights",
        do.take_weights,
        do.large_value,
        "OverflowError",
        r"layers\.1\.up\.weight",
        "float16",
        TO_DO,
        first=(at(1, "cleared", do.in_half),),
    ),
)

AVERAGES = (
    _legal(
        "average",
        "all ranks evaluate with an average",
        at(0, "cleared", do.average),
        at(1, "cleared", do.average),
        at(1, "cleared", do.evaluate_with_the_average),
    ),
    _call(
        "average_stepped",
        "all ranks step while the average is applied",
        do.step_with_the_average,
        None,
        "RuntimeError",
        "average is applied",
        TO_DO,
        first=(at(0, "cleared", do.average),),
    ),
    _call(
        "average_on_one",
        "rank 1 alone evaluates with the average",
        do.evaluate,
        do.apply_for_the_evaluation,
        "RanksDisagree",
        "rank 1",
        first=(at(0, "cleared", do.average), at(1, "cleared", do.average)),
        within=8.0,
    ),
)

SLEEP = (
    _legal("sleep", "all ranks sleep and wake", at(1, "cleared", do.sleep_and_wake)),
    _legal(
        "sleep_replicas",
        "replicas sleep, of which each keeps a part",
        at(1, "cleared", do.sleep_with(drop="replicas")),
        at(1, "cleared", do.sleep_and_wake),
        setup=REPLICAS,
    ),
    _dies(
        "sleep_killed", "rank 1 is killed while all are asleep", do.wake, KILLED, first=(at(1, "cleared", do.sleep),)
    ),
    _call(
        "sleep_on_one",
        "rank 1 does not sleep with the others, and trains on",
        lambda run: do.sleep(run) if run.rank != 1 else None,
        None,
        "RuntimeError",
        "sleep",
        "rank",
        within=8.0,
    ),
    _call(
        "sleep_arguments",
        "rank 1 has other arguments of sleep",
        do.sleep,
        do.sleep_with(drop=True),
        "RanksDisagree",
        "sleep",
        "same arguments",
    ),
    _call(
        "sleep_used",
        "rank 1 runs a forward of the sleeping model",
        do.wake,
        lambda run: run.evaluate(),
        "RuntimeError",
        "asleep",
        first=(at(1, "cleared", do.sleep),),
    ),
    _call(
        "wake_room",
        "rank 1 has no room to wake",
        do.wake,
        do.no_room_to_wake,
        "RuntimeError",
        "rank 1",
        "as before",
        TO_DO,
        first=(at(1, "cleared", do.sleep),),
    ),
    _dies(
        "wake_killed",
        "rank 1 is killed while replicas bring back what they keep for each other",
        do.wake,
        do.in_the_waking(KILLED),
        first=(at(1, "cleared", do.sleep_with(drop="replicas")), at(1, "cleared", do.sleep)),
        setup=REPLICAS,
        fast=True,
    ),
    _call(
        "sleep_differ",
        "rank 1 has other values than its replica",
        do.sleep,
        do.differ,
        "RanksDisagree",
        "ranks 0 and 1",
        r"layers\.1\.up\.weight",
        TO_DO,
        first=(at(1, "cleared", do.sleep_with(drop="replicas")),),
        setup=REPLICAS,
    ),
)


def _owners(name: str, does: str, action: Action, *words: str, **more: Any) -> Case:
    """Rank 1 does it before its update; the other ranks learn of it in theirs."""
    expected = Raises(more.pop("error", "PeerFailed"), words, on=more.pop("on", (0,)), within=more.pop("within", 5.0))
    return _case(name, does, expected, at(1, "gradients", action, rank=1), setup=more.pop("setup", MUON), **more)


OWNERS = (
    _case(
        "owners_again",
        "rank 1 raises in its step of the first matrices, and all try again",
        Recovers("PeerFailed", ("rank 1", "injected", "no rank wrote anything")),
        at(1, "gradients", do.in_an_owner_s_step(RAISES), rank=1),
        setup=Setup(optimizer=do.muon, catches=1),
        fast=True,
    ),
    _owners(
        "owners_half",
        "rank 1 raises in its step of the second matrices, when the first are written",
        do.in_an_owner_s_step(RAISES, 2),
        "rank 1",
        "injected",
        "had taken the step",
        "checkpoint",
    ),
    _owners(
        "owners_killed",
        "rank 1 is killed in its step of what it owns",
        do.in_an_owner_s_step(KILLED),
        "rank 1",
        deaths=(1,),
    ),
    _owners(
        "owners_stopped",
        "rank 1 is stopped in its step of what it owns",
        do.in_an_owner_s_step(STOPPED),
        "rank 1",
        deaths=(1,),
        setup=Setup(optimizer=do.muon, environment=LISTENS.environment),
        within=AFTER_SILENCE,
    ),
    _owners(
        "owners_gradient",
        "rank 1 has no gradient of one matrix",
        do.gradient_gone,
        "rank 1",
        r"layers\.1\.up\.weight",
        error="RuntimeError",
        on="all",
    ),
    _owners(
        "owners_left_out",
        "rank 1 leaves out a step of owners",
        no_update,
        "rank 1|ranks? .*1",
        error="RuntimeError",
        within=8.0,
    ),
    _owners(
        "owners_fewer",
        "rank 1's optimizer has a matrix less",
        do.fewer_matrices,
        "rank",
        "matrices",
        error="RanksDisagree",
        on="all",
    ),
    _owners(
        "owners_state",
        "rank 1's state of a matrix is in another dtype",
        do.other_dtype,
        "rank",
        "matrices",
        error="RanksDisagree",
        on="all",
    ),
)

CASES = (*TRANSFERS, *WEIGHTS, *AVERAGES, *SLEEP, *OWNERS)
