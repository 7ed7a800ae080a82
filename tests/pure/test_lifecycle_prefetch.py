"""Which unit is gathered ahead: along the recorded order, along the user's lists, and how far. No torch."""

from __future__ import annotations

import pytest

from fullshard.schedule import Full
from tests.pure.test_lifecycle_rules import before_backward, say, says
from tests.pure.test_lifecycle_worlds import (
    Program,
    Report,
    Trait,
    Use,
    World,
    backward,
    evaluation,
    forward,
    model,
    setting,
    step,
)

ABC = ("a", "b", "c")


def issued(world: World, program: Program) -> dict[str, list[str]]:
    """For each forward in `program`, by its unit: the units whose gather was issued during its `pre_forward`."""
    found: dict[str, list[str]] = {}
    for report in program:
        commands = world.report(report)
        if report.kind == "pre_forward":
            gathered = [command.removeprefix("unshard ") for command in commands if command.startswith("unshard ")]
            found[report.unit] = gathered
    return found


# ---- forward, along the recorded order ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "second"),
    [
        (0, {"root": ["root"], "a": ["a"], "b": ["b"], "c": ["c"]}),
        (1, {"root": ["root", "a"], "a": ["b"], "b": ["c"], "c": []}),
        (2, {"root": ["root", "a", "b"], "a": ["c"], "b": [], "c": []}),
        (9, {"root": ["root", "a", "b", "c"], "a": [], "b": [], "c": []}),
    ],
)
def test_the_first_pass_records_and_the_next_ones_gather_ahead(depth: int, second: dict[str, list[str]]) -> None:
    """As many units ahead as the depth says, each once, never behind the end of the pass."""
    world = World(*ABC, depth=depth)
    when_needed = {unit: [unit] for unit in ("root", *ABC)}
    assert issued(world, step(*ABC)) == when_needed
    assert issued(world, step(*ABC)) == second
    assert issued(world, step(*ABC)) == second


def test_evaluation_records_and_is_prefetched_too() -> None:
    """What a pass did is the plan of the next one, whether a backward follows or not."""
    world = World(*ABC, depth=1)
    assert issued(world, evaluation(*ABC))["a"] == ["a"]
    assert issued(world, evaluation(*ABC))["a"] == ["b"]
    assert issued(world, step(*ABC))["a"] == ["b"]


def test_a_changed_order_falls_back_to_gathering_when_needed() -> None:
    """From the first deviation on, for the rest of this pass; the next pass follows the new order."""
    world = World(*ABC, depth=1)
    world.feed(step(*ABC))
    assert issued(world, step("a", "c", "b")) == {"root": ["root", "a"], "a": ["b"], "c": ["c"], "b": []}
    assert issued(world, step("a", "c", "b")) == {"root": ["root", "a"], "a": ["c"], "c": ["b"], "b": []}


def test_after_a_deviation_nothing_of_the_old_plan_is_followed() -> None:
    """Also where the pass comes back to the old order by position."""
    world = World("a", "b", "c", "d", depth=1)
    world.feed(step("a", "b", "c", "d"))
    assert issued(world, step("b", "a", "c", "d")) == {
        "root": ["root", "a"],
        "b": ["b"],
        "a": [],
        "c": ["c"],
        "d": ["d"],
    }


def test_a_longer_pass_falls_back_and_a_shorter_one_leaves_a_gather_to_be_dropped() -> None:
    """Behind the end of the plan nothing is guessed; a wrong guess lasts until the end of the backward, then goes."""
    world = World(*ABC, depth=1)
    world.feed(step("a"))
    assert issued(world, step(*ABC)) == {"root": ["root", "a"], "a": [], "b": ["b"], "c": ["c"]}
    commands = world.feed(step("a"))
    assert commands.count("unshard b") == commands.count("cancel b") == 1
    assert world.full() == set()


def test_a_wrong_guess_is_used_by_a_later_pass() -> None:
    """Where no backward comes between, it is waited for, not gathered again."""
    world = World(*ABC, depth=1)
    world.feed(evaluation(*ABC) + evaluation("a"))
    assert world["b"].full is Full.PENDING
    assert issued(world, evaluation(*ABC)) == {"root": ["root", "a"], "a": [], "b": [], "c": ["c"]}


def test_a_module_called_on_its_own_is_a_pass_of_its_own() -> None:
    """It records what it ran; the model's next pass has the model's plan, which is not lost in between."""
    world = World(*ABC, depth=1)
    world.feed(step(*ABC))
    alone = Use("b", (Use("c"),))
    for expected in ({"b": ["b"], "c": ["c"]}, {"b": ["b", "c"], "c": []}):
        assert issued(world, [*forward(alone, {}), *backward([alone], {}), Report("backward_end")]) == expected
        assert [unit.name for unit in world.run.forward_plan] == ["b", "c"]
        assert issued(world, step(*ABC)) == {"root": ["root", "a"], "a": ["b"], "b": ["c"], "c": []}


def test_units_inside_units_follow_in_the_order_in_which_they_begin() -> None:
    """The outer one begins first."""
    world = World("a", "b", "c", depth=1)
    nested = (Use("a", (Use("b"),)), Use("c"))
    world.feed(step(*nested))
    assert issued(world, step(*nested)) == {"root": ["root", "a"], "a": ["b"], "b": ["c"], "c": []}


def test_a_failed_pass_is_no_plan() -> None:
    """After an exception the next pass gathers when needed, and records anew."""
    world = World(*ABC, depth=1)
    world.feed(step(*ABC) * 2)
    says(world, "pre_forward root", "pre_forward a", "forward_failed a", "forward_failed root", "reset root")
    assert world.run.forward_plan == []
    assert issued(world, step(*ABC)) == {unit: [unit] for unit in ("root", *ABC)}
    assert issued(world, step(*ABC))["a"] == ["b"]


# ---- what evaluation leaves ---------------------------------------------------------------------------------


def test_evaluation_loops_do_not_let_the_order_grow() -> None:
    """Nor the places; and what stood in the order before the loop is untouched."""
    world = World(*ABC)
    pending = model(*ABC)
    world.feed(forward(pending, {}))
    order, uses = list(world.run.order), {unit.name: list(unit.uses) for unit in world.run.units}
    world.feed(evaluation(*ABC) * 50 + evaluation("a", "a", "c"))
    assert world.run.order == order and {unit.name: unit.uses for unit in world.run.units} == uses
    commands = world.feed([*backward([pending], {}), Report("backward_end")])
    assert commands[:6] == ["unshard root", "wait root", "unshard c", "wait c", "unshard b", "reshard c"]


def test_only_evaluation_is_forgotten() -> None:
    """A forward whose outputs require a gradient stays in the order until a backward ends."""
    world = World(*ABC)
    world.feed([*forward(model("a"), {}), *forward(model("b"), {})])
    assert [unit.name for unit in world.run.order] == ["a", "root", "b", "root"]


# ---- backward -----------------------------------------------------------------------------------------------


def test_backward_follows_the_order_of_this_step_in_reverse() -> None:
    """Always one unit ahead, whatever the depth of the forward; the first unit of the order brings nothing."""
    for depth in (0, 1, 2):
        world = World(*ABC, depth=depth)
        says(world, "pre_forward root")
        for name in ("b", "a", "c"):
            says(world, f"pre_forward {name}", f"post_forward {name} inputs outputs")
        say(world, "post_forward root outputs")
        ahead = [say(world, f"pre_backward {name}")[-1] for name in ("root", "c", "a", "b")]
        assert ahead == ["unshard c", "unshard a", "unshard b", "wait b"]


def test_two_forwards_are_taken_back_youngest_first() -> None:
    """Each use brings what ran before it, not what ran before another use."""
    world = World("a", "b")
    second = model("b", "a")
    world.feed([*forward(model("a", "b"), {}), *forward(second, {})])
    found = world.feed(backward([second], {}))
    assert [command for command in found if "unshard" in command] == ["unshard root", "unshard a", "unshard b"]


def test_a_second_backward_over_one_forward_gathers_when_needed() -> None:
    """The uses were counted off by the first."""
    world = World("a", "b")
    kept = model("a", "b")
    end = Report("backward_end")
    world.feed([*forward(kept, {}), *backward([kept], {}), end])
    assert world["a"].uses == []
    found = world.feed([*backward([kept], {}), end])
    assert found[:3] == ["unshard root", "wait root", "unshard b"]
    assert found.index("reshard b") < found.index("unshard a")


# ---- the user's lists ---------------------------------------------------------------------------------------


def test_a_forward_list_takes_the_place_of_the_recorded_order() -> None:
    """For its unit, from the first pass on, whatever the depth; other units follow the record."""
    for depth in (0, 1):
        world = World(*ABC, depth=depth)
        world["a"].plan.forward_prefetch = (world["c"], world["b"])
        first = issued(world, step(*ABC))
        assert first == {"root": ["root"], "a": ["a", "c", "b"], "b": [], "c": []}
        second = issued(world, step(*ABC))
        assert second == {"root": ["root"] + ["a"] * depth, "a": ["a", "c", "b"][depth:], "b": [], "c": []}


def test_a_unit_with_a_list_is_part_of_the_record() -> None:
    """The plan knows that it ran, so the units behind it are where they were."""
    world = World(*ABC, depth=1)
    world["a"].plan.forward_prefetch = (world["c"],)
    world.feed(step(*ABC))
    assert [unit.name for unit in world.run.forward_plan] == ["root", *ABC]
    world["a"].plan.forward_prefetch = ()
    assert issued(world, step(*ABC))["a"] == ["b"]


def test_a_backward_list_takes_the_place_of_the_recorded_order() -> None:
    """Each time it is asked; the places are not taken back."""
    world = before_backward(*ABC)
    world["root"].plan.backward_prefetch = (world["b"], world["a"])
    assert say(world, "pre_backward root") == ["unshard root", "wait root", "unshard b", "unshard a"]
    assert world["root"].uses == [3]
    assert say(world, "pre_backward c") == ["unshard c", "wait c"]


def test_what_is_there_is_not_gathered_again() -> None:
    """A list may name units that are pending, full or shelved."""
    world = World(*ABC, reshard=False)
    world.feed(evaluation("a"))
    says(world, "unshard b", "unshard c", "wait_unshard c")
    world["root"].plan.forward_prefetch = tuple(world[name] for name in ABC)
    assert say(world, "pre_forward root") == ["expose root"]


def test_no_prefetch_reaches_over_an_accumulation_window() -> None:
    """Micro-batches that do not reduce are steps like others: the order begins anew after each backward."""
    world = World("a", "b")
    world.feed(setting("sync", False, "root", "a", "b") + step("a", "b"))
    assert world.run.order == []
    world.feed(setting("sync", True, "root", "a", "b"))
    found = world.feed(step("a", "b", traits={"a": Trait("some"), "b": Trait("some")}))
    assert [command for command in found if "reduce" in command] == ["reduce b", "reduce a", "reduce root"]


# ---- in bytes -----------------------------------------------------------------------------------------------


def limited(nbytes: int, *names: str, depth: int = 1, **costs: int) -> World:
    """A world in which gathers ahead are limited to `nbytes`; `costs` by unit, 10 unless told."""
    world = World(*names, depth=depth)
    world.run.prefetch_nbytes = nbytes
    for name in ("root", *names):
        world[name].plan.gather_nbytes = costs.get(name, 10)
    return world


def backward_ahead(world: World, *names: str) -> dict[str, list[str]]:
    """For each unit whose backward begins: what is gathered ahead then."""
    world.feed(list(forward(model(*names), {})))
    return {
        name: [
            command.removeprefix("unshard ") for command in say(world, f"pre_backward {name}") if "unshard" in command
        ]
        for name in ("root", *reversed(names))
    }


@pytest.mark.parametrize(
    ("nbytes", "in_forward", "in_backward"),
    [
        (0, [["root"], ["a"], ["b"], ["c"]], [["root"], ["c"], ["b"], ["a"]]),
        (9, [["root"], ["a"], ["b"], ["c"]], [["root"], ["c"], ["b"], ["a"]]),
        (10, [["root", "a"], ["b"], ["c"], []], [["root", "c"], ["b"], ["a"], []]),
        (29, [["root", "a", "b"], ["c"], [], []], [["root", "c", "b"], ["a"], [], []]),
        (999, [["root", "a", "b", "c"], [], [], []], [["root", "c", "b", "a"], [], [], []]),
    ],
)
@pytest.mark.parametrize("depth", [0, 1])
def test_what_fits_is_gathered_ahead_in_forward_and_in_backward(
    nbytes: int, in_forward: list[list[str]], in_backward: list[list[str]], depth: int
) -> None:
    """Gathers under way count. The depth in units says nothing then; 0 bytes: each when it is needed."""
    world = limited(nbytes, *ABC, depth=depth if nbytes else 0)
    assert issued(world, step(*ABC)) == {unit: [unit] for unit in ("root", *ABC)}
    assert list(issued(world, step(*ABC)).values()) == in_forward
    assert list(backward_ahead(limited(nbytes, *ABC, depth=depth), *ABC).values()) == in_backward


def test_nothing_goes_before_one_that_does_not_fit() -> None:
    """A large unit is gathered when it is needed, and only then what is behind it: order is kept."""
    world = limited(20, *ABC, b=30)
    world.feed(step(*ABC))
    assert issued(world, step(*ABC)) == {"root": ["root", "a"], "a": [], "b": ["b", "c"], "c": []}


def test_lists_of_the_user_are_obeyed_whatever_their_bytes() -> None:
    """In forward and in backward."""
    world = limited(0, *ABC)
    world["a"].plan.forward_prefetch = (world["b"], world["c"])
    world["c"].plan.backward_prefetch = (world["b"], world["a"])
    world.feed(step(*ABC))
    assert issued(world, step(*ABC))["a"] == ["a", "b", "c"]
    assert backward_ahead(world, *ABC)["c"] == ["c", "b", "a"]


def test_what_has_its_memory_takes_no_room() -> None:
    """A unit that stayed full in between does not count, and those behind it are reached."""
    world = limited(10, *ABC)
    world["b"].plan.resident = True
    assert backward_ahead(world, *ABC) == {"root": ["root", "c"], "c": ["a"], "b": [], "a": []}


def test_a_unit_whose_backward_gathers_nothing_takes_no_room() -> None:
    world = limited(10, *ABC)
    world["c"].plan.gathers_in_backward = False
    assert backward_ahead(world, *ABC) == {"root": ["root", "b"], "c": [], "b": ["a"], "a": []}


def test_a_unit_that_runs_twice_counts_once() -> None:
    world = limited(20, "a", "b")
    world.feed(step("a", "a", "b"))
    assert issued(world, step("a", "a", "b"))["root"] == ["root", "a", "b"]
