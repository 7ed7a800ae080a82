"""Ranks on which other gradients are absent issue the same messages in the same order. No torch.

Each rank is a world of its own, which hears its own reports: where a gradient is absent, `grads_ready` is missing. What
is compared is what other ranks see: unshard, unshard_secondary, reduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import pytest

from fullshard.schedule import NOWHERE, RunRecord, UnitRecord
from fullshard.schedule import Use as RecordedUse
from fullshard.schedule.record import UNKNOWN, begin_use, end_sending, end_use, settle, visit
from tests.pure.test_lifecycle_exhaustive import NAMES, NESTED, ORDERS
from tests.pure.test_lifecycle_worlds import (
    Program,
    Report,
    Trait,
    Traits,
    Use,
    World,
    backward,
    forward,
    model,
    setting,
    step,
)

MESSAGES = ("unshard", "unshard_secondary", "reduce")
# On a rank: all gradients of a unit, all but one, none of them.
PRESENT = ("all", "some", "absent")


def messages(world: World) -> list[tuple[str, str]]:
    return [command for command in world.commands if command[0] in MESSAGES]


def heard(program: Iterable[Report], present: dict[str, str]) -> Iterator[Report]:
    """What a rank hears of `program` when gradients are there as `present` says, by unit."""
    for report in program:
        what = present.get(report.unit, "all")
        if report.kind == "grads_ready" and what != "all" or report.kind == "gradient" and what == "absent":
            continue
        yield report


def ranks(programs: list[Program], traits: Traits, presents: list[dict[str, str]], **options: object) -> None:
    """One world for each of `presents`; all of them send the same, and every trainable unit that was reached sends."""
    worlds = [World(*NAMES, traits=traits, **options) for _ in presents]  # type: ignore[arg-type]
    for program in programs:
        for world, present in zip(worlds, presents, strict=True):
            world.feed(heard(program, present))
        for world, present in zip(worlds[1:], presents[1:], strict=True):
            assert messages(world) == messages(worlds[0]), present


def combinations(count: int = 2) -> Iterator[dict[str, str]]:
    for chosen in product(PRESENT, repeat=count):
        yield dict(zip(("root", *NAMES), chosen, strict=False))


@pytest.mark.sample(2)
@pytest.mark.parametrize("reshard", [True, False, 2])
@pytest.mark.parametrize("inputs", [True, False])
def test_whatever_is_absent_on_a_rank(inputs: bool, reshard: bool | int) -> None:
    """Root and two units, all orders of up to three uses; with and without the notice that the inputs were reached."""
    traits = {name: Trait(inputs=inputs) for name in NAMES}
    for order in ORDERS:
        program = step(*order, traits=traits)
        ranks([program, program], traits, [{}, *combinations(3)], reshard=reshard, depth=1)


@pytest.mark.parametrize("recompute", ["whole", "cut", "reentrant"])
def test_with_recomputation(recompute: str) -> None:
    """One of the units is recomputed, inside or beside the other."""
    for order, name in product([("a", "b"), (NESTED,), (NESTED, "c")], "ab"):
        traits = {name: Trait(recompute=recompute)}
        program = step(*order, traits=traits)
        ranks([program, program], traits, [{}, *combinations(3)], depth=1)


def test_inputs_that_two_units_share_are_reached_late() -> None:
    """Towers: the gradient of a common input is complete when both are over, and that is when a rank hears of it."""
    for inputs in (True, False):
        traits = {name: Trait(inputs=inputs) for name in NAMES}
        program = step("a", "b", traits=traits)
        late = [report for report in program if report != Report("inputs_reached", "b")]
        if inputs:
            late.insert(late.index(Report("inputs_reached", "a")), Report("inputs_reached", "b"))
        ranks([late, late], traits, [{}, *combinations(3)], depth=1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fifo", [True, False])
@pytest.mark.parametrize("announced", [True, False])
def test_several_forwards_before_their_backwards(announced: bool, fifo: bool) -> None:
    """One backward of both; their backwards one by one, from either side, with and without set_is_last_backward."""
    end = Report("backward_end")
    for order in ORDERS:
        first, second = model(*order), model(*order)
        both = [*forward(first, {}), *forward(second, {})]
        together = [*both, *backward([first, second], {}), end]
        apart = [*both, *(setting("is_last", False) if announced else [])]
        one, other = (first, second) if fifo else (second, first)
        apart += [*backward([one], {}), end, *setting("is_last", True), *backward([other], {}), end]
        ranks([together, together], {}, [{}, *combinations(3)])
        ranks([apart, apart], {}, [{}, *combinations(3)], fifo=fifo)


def test_windows_without_synchronisation_send_the_same() -> None:
    """What is held on one rank alone is sent by all."""
    off, on = (setting("sync", value, "root", *NAMES) for value in (False, True))
    for order in ORDERS:
        program = [*off, *step(*order), *on, *step(*order)]
        ranks([program], {}, [{}, *combinations(3)])


# ---- what can be relied on beyond the order -------------------------------------------------------------------


def test_where_nothing_is_absent_nothing_waits() -> None:
    """Blocks in a row, used once each: a message goes with the event that says that its gradients are there."""
    world = World("a", "b", "c")
    for report in step("a", "b", "c"):
        sent = [command for command in world.report(report) if command.startswith("reduce")]
        assert sent == ([f"reduce {report.unit}"] if report.kind == "grads_ready" else [])


def test_each_reached_unit_sends_once() -> None:
    """Also where no gradient came at all: zeros, so that the others are not left waiting."""
    for present in combinations(3):
        world = World("a", "b")
        world.feed(heard(step("a", "b", "a"), present))
        assert sorted(unit for kind, unit in world.commands if kind == "reduce") == ["a", "b", "root"]


def test_what_was_not_reached_sends_nothing() -> None:
    """As FSDP2: the ranks have to agree on which units the loss reaches."""
    world = World("a", "b")
    world.feed(step("a", "b", reached=frozenset({"root", "a"})))
    assert [unit for kind, unit in world.commands if kind == "reduce"] == ["a", "root"]


def test_a_gradient_that_comes_behind_the_message_is_not_lost() -> None:
    """A weight that was read outside of its unit: a second message, with the end of the backward."""
    world = World("a")
    late = [report for report in step("a") if report.kind != "backward_end"]
    world.feed([*late, Report("gradient", "a"), Report("backward_end")])
    assert [unit for kind, unit in world.commands if kind == "reduce"] == ["a", "root", "a"]


def test_frozen_units_owe_nothing() -> None:
    world = World("a", traits={"a": replace(Trait(), gradients="none")})
    world.feed(step("a", traits={"a": Trait("none")}))
    assert [unit for kind, unit in world.commands if kind == "reduce"] == ["root"]


# ---- the arithmetic -------------------------------------------------------------------------------------------


def used(*uses: Use | str) -> tuple[RunRecord, dict[str, UnitRecord]]:
    """Records after the forwards of `uses`, without a root."""
    units = {name: UnitRecord(name, index) for index, name in enumerate(NAMES)}
    run = RunRecord(list(units.values()))

    def go(use: Use) -> None:
        begin_use(run, units[use.unit])
        for inner in use.inner:
            go(inner)
        end_use(run, units[use.unit])

    for use in uses:
        go(Use(use) if isinstance(use, str) else use)
    return run, units


def test_uses_are_numbered_by_the_ends_of_forwards() -> None:
    run, units = used(NESTED, "c", "a")
    assert units["b"].sending.open == [RecordedUse(0, 0)] and units["c"].sending.open == [RecordedUse(2, 2)]
    assert units["a"].sending.open == [RecordedUse(0, 1), RecordedUse(3, 3)] and run.owed.clock == 4


def test_a_use_that_is_not_named_is_the_youngest_one() -> None:
    """As of a weight that was saved by the last of several forwards: backwards come in the reverse order."""
    run, units = used("a", "b", "a")
    a, b = units["a"], units["b"]
    assert visit(run, a, None) == [] and a.sending.visited == RecordedUse(2, 2)
    assert visit(run, b, None) == [] and b.sending.visited == RecordedUse(1, 1), "a is not due: its first use is older"
    assert a.sending.open == [RecordedUse(0, 0)] and end_sending(run) == [b, a]


def test_a_unit_waits_for_what_is_inside_of_it() -> None:
    """Its own gradients may be there first; the inner one goes first all the same."""
    run, units = used(NESTED)
    a, b = units["a"], units["b"]
    assert visit(run, a, a.sending.open[-1]) == [] and settle(run, a) == []
    assert visit(run, b, b.sending.open[-1]) == [] and settle(run, b) == [b, a]
    assert end_sending(run) == [] and run.owed.frontier == NOWHERE


def test_a_unit_is_due_where_one_begins_that_ran_before_it() -> None:
    run, units = used("a", "b")
    a, b = units["a"], units["b"]
    assert visit(run, b, b.sending.open[-1]) == []
    assert visit(run, a, a.sending.open[-1]) == [b]
    assert end_sending(run) == [a]


def test_a_unit_of_which_no_use_is_known_waits_for_the_end() -> None:
    run, units = used("a")
    a, b = units["a"], units["b"]
    assert visit(run, b, None) == [] and b.sending.first == UNKNOWN and settle(run, b) == []
    assert visit(run, a, None) == [] and settle(run, a) == [a] and end_sending(run) == [b]
