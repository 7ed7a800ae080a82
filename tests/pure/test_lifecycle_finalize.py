"""`finalize_backward` by the rules: what the end of a backward leaves, and what the user's call does. No torch."""

from __future__ import annotations

import pytest

from fullshard.schedule import Full
from tests.pure.test_lifecycle_worlds import Program, Report, World, evaluation, setting, step

MANUAL = setting("manual", True)
END = [Report("finalize"), Report("wait_finalize")]


def kept(*units: str) -> Program:
    """Backwards of these units keep their gradients and their full parameters, as pipeline schedules ask."""
    return [*setting("sync", False, *units), *setting("reshard_after_backward", False, *units)]


def released(*units: str) -> Program:
    return [*setting("sync", True, *units), *setting("reshard_after_backward", True, *units)]


def commands(world: World, program: Program) -> list[str]:
    return [text for report in program for text in world.report(report)]


def test_r38_messages_of_a_backward_are_waited_for_where_the_user_says() -> None:
    """The same messages, in the same order; `finish` comes with the call."""
    automatic, manual = World("a", "b"), World("a", "b")
    manual.feed(MANUAL)
    expected, found = commands(automatic, step("a", "b")), commands(manual, step("a", "b"))
    assert expected[-1] == "finish root" and found == expected[:-1]
    assert manual.run.ending.sent and not manual.run.in_backward
    assert commands(manual, [Report("finalize")]) == []
    assert commands(manual, [Report("wait_finalize")]) == ["finish root"]
    assert not manual.run.ending.sent and manual.run.order == []


def test_r38_a_backward_that_sends_nothing_keeps_its_gradients_at_its_end() -> None:
    """So that a later one that fails leaves them."""
    world = World("a")
    world.feed([*MANUAL, *kept("root", "a")])
    assert commands(world, step("a"))[-1] == "finish root"
    assert not world.run.ending.sent and world.run.ending.active


def test_r39_what_was_kept_is_sent_and_freed_by_the_settings_of_the_call() -> None:
    """In the order of the units, whichever micro-batch brought it."""
    world = World("a", "b")
    world.feed([*MANUAL, *kept("root", "a", "b"), *step("a", "b"), *step("a", "b")])
    assert all(unit.full is not Full.SHARDED for unit in world.units.values())
    world.feed(released("root", "a", "b"))
    assert commands(world, [Report("finalize")]) == [
        "reshard root",
        "reduce root",
        "reshard a",
        "reduce a",
        "reshard b",
        "reduce b",
    ]
    assert world.run.ending.waits
    assert commands(world, [Report("wait_finalize")]) == ["finish root"]
    assert not world.run.ending.waits and world.run.ending.active is None


def test_r39_settings_that_stay_off_send_and_free_nothing() -> None:
    """As in the backward itself."""
    world = World("a")
    world.feed([*MANUAL, *kept("root", "a"), *step("a")])
    assert commands(world, END) == ["finish root"]
    assert world["a"].full is Full.FULL and "a" in world.held


def test_the_order_and_prefetches_of_a_step_last_until_the_call() -> None:
    """A gather that nobody needed is waited for then."""
    world = World("a", "b")
    world.feed(MANUAL)
    program = step("a", "b", reached=frozenset({"root"}))
    world.feed(program)
    assert world["b"].full is Full.PENDING and world.run.order
    assert "cancel b" in commands(world, [Report("finalize")])
    assert world.run.order == [] and all(unit.uses == [] for unit in world.units.values())
    assert all(unit.sending.open == [] for unit in world.units.values())


@pytest.mark.parametrize("manual", [False, True])
def test_the_mode_of_a_step_is_that_of_its_first_backward(manual: bool) -> None:
    world = World("a")
    world.feed(setting("manual", manual))
    *program, end = step("a")
    world.feed(program)
    world.feed(setting("manual", not manual))
    assert (commands(world, [end])[-1:] == ["finish root"]) is not manual


def test_without_it_nothing_is_left_between_steps() -> None:
    """Nor between backwards of one step, of which the first is not the last."""
    world = World("a")
    world.feed(step("a"))
    assert world.run.ending.active is None and not world.run.ending.sent
    world.feed([*setting("is_last", False), *step("a")])
    assert world.run.ending.active is False and not world.run.ending.sent
    world.feed([*setting("is_last", True), *step("a"), *evaluation("a")])
    assert world.run.ending.active is None


def test_a_discarded_step_owes_no_end() -> None:
    """[R14] The mode may change after it."""
    world = World("a")
    world.feed([*MANUAL, *step("a"), Report("finalize"), Report("reset")])
    assert not world.run.ending.sent and not world.run.ending.waits and world.run.ending.active is None


def test_manual_supersedes_is_last_backward() -> None:
    world = World("a", "b")
    world.feed([*MANUAL, *setting("is_last", False), *step("a", "b"), *END])
    assert world.run.order == [] and world.run.ending.active is None
    assert world.run.ending.is_manual and not world.run.ending.ends_step
