"""All programs of small worlds, up to a size, and arbitrary ones: what must hold whatever the program is. No torch.

While a program runs, `World` checks that each command is legal, that weights are full wherever they are read, and that
the records say what the commands did. Here:

    when a backward ended       nothing is in flight; nothing is full but what policy keeps; no gradient is forgotten
    in plain programs           at most two units have memory beside the root (one and the prefetch depth, in forward),
                                and as many more as were gathered by a wrong guess
    two worlds, equal reports   equal commands
    abandoned at any point      the records are fresh ones, and the next step is that of a fresh world
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fullshard.schedule import Full
from tests.pure.test_lifecycle_worlds import (
    PLAIN,
    Program,
    Report,
    Trait,
    Traits,
    Use,
    World,
    backward,
    evaluation,
    forward,
    model,
    setting,
    step,
)

RESHARD = (True, False, None, 2)
DEPTHS = (0, 1, 2)
NESTED = Use("a", (Use("b"),))
# Every order of up to three uses of two units, every order of three units, units inside units, and nothing at all.
ORDERS: list[tuple[Use | str, ...]] = [
    (),
    *(order for length in (1, 2, 3) for order in product("ab", repeat=length)),
    *permutations("abc"),
    (NESTED,),
    (NESTED, "c"),
    ("c", NESTED),
    (NESTED, NESTED),
    (NESTED, "b"),
    (Use("a", (Use("b", (Use("c"),)),)),),
    (Use("a", (Use("b"), Use("c"))), "b"),
]
NAMES = ("a", "b", "c")


def is_plain(order: tuple[Use | str, ...]) -> bool:
    """No unit inside another one."""
    return all(isinstance(use, str) for use in order)


def run_to_the_end(world: World, program: Program) -> None:
    """Feed a program that ends with a backward or without gradients, and check what has to hold behind it."""
    world.feed(program)
    assert not world.arrived, "a gradient was neither reduced nor held"
    assert not world.run.order and not any(unit.uses for unit in world.units.values())
    assert not world.run.has_leftovers and not world.run.keep_full
    assert not any(unit.in_backward or unit.phase for unit in world.units.values())
    if program[-1].kind == "backward_end":
        kept = {unit.name for unit in world.units.values() if not unit.plan.reshard_after_backward}
        assert world.full() <= kept
        assert not [unit for unit in world.units.values() if unit.full is Full.PENDING]


# ---- exhaustive -----------------------------------------------------------------------------------------------


# None differs from True in the root alone.
@pytest.mark.parametrize(("reshard", "depth"), [*product((True, False), DEPTHS), (None, 1), (2, 1)])
@pytest.mark.sample(2)
def test_every_order_after_every_other(reshard: bool | int | None, depth: int) -> None:
    """Two steps, then an evaluation: the second step has the plan of the first, which may be wrong."""
    for first, second in product(ORDERS, repeat=2):
        bound = None
        if reshard is not False and is_plain(first) and is_plain(second):
            # Where the plan is wrong, what it brought stays until the end of the backward.
            bound = 1 + max(depth, 1) + (0 if first == second else depth)
        world = World(*NAMES, reshard=reshard, depth=depth, max_full=bound, root_kept=False)
        for program in (step(*first), step(*second), evaluation(*second)):
            run_to_the_end(world, program)
        if reshard is None and depth == 1:
            twin = World(*NAMES, reshard=reshard, depth=depth, root_kept=False)
            twin.feed([*step(*first), *step(*second), *evaluation(*second)])
            assert twin.log == world.log


TRAITS = [
    Trait(gradients, inputs, recompute)
    for gradients in ("all", "none", "mixed", "some")
    for inputs in (True, False)
    for recompute in ("", "whole", "cut", "reentrant")
]
INPUTS_FIRST = [replace(trait, inputs_first=True) for trait in TRAITS if trait.inputs and trait.gradients != "none"]
PAIRS = [*product(TRAITS, repeat=2), *product(INPUTS_FIRST, (PLAIN, Trait("some"))), *product((PLAIN,), INPUTS_FIRST)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("order", [("a", "b"), ("b", "a", "b"), (NESTED,)], ids=["ab", "bab", "b in a"])
@pytest.mark.parametrize("reshard", [True, False, 2])
def test_every_kind_of_unit_beside_every_other(reshard: bool | int, order: tuple[Use | str, ...]) -> None:
    """Frozen, partly reached, without gradients of inputs, recomputed in three ways: each with each, two steps."""
    for a, b in PAIRS:
        traits: Traits = {"a": a, "b": b}
        world, program = World("a", "b", reshard=reshard, depth=1, traits=traits), step(*order, traits=traits)
        for _ in range(2):
            run_to_the_end(world, program)


@pytest.mark.parametrize("reshard", RESHARD)
def test_every_set_of_units_that_the_loss_reaches(reshard: bool | int | None) -> None:
    """Units whose forward ran and whose backward did not are freed all the same."""
    for order in ORDERS:
        for reached in product((True, False), repeat=len(NAMES)):
            units = frozenset(name for name, is_reached in zip(NAMES, reached, strict=True) if is_reached)
            world = World(*NAMES, reshard=reshard, depth=1)
            for _ in range(2):
                run_to_the_end(world, step(*order, reached=units | {"root"}))


@pytest.mark.parametrize("reshard", RESHARD)
def test_every_split_of_forwards_into_backwards(reshard: bool | int | None) -> None:
    """Three forwards; their backwards together, one by one, in both orders, or in groups."""
    groupings = [[[0, 1, 2]], [[0], [1], [2]], [[2], [1], [0]], [[0, 1], [2]], [[0], [1, 2]], [[1], [0, 2]]]
    for order, groups in product(ORDERS, groupings):
        uses = [model(*order) for _ in range(3)]
        program = [report for use in uses for report in forward(use, {})]
        program += setting("is_last", False)
        for group in groups[:-1]:
            program += [*backward([uses[i] for i in group], {}), Report("backward_end")]
        program += setting("is_last", True)
        program += [*backward([uses[i] for i in groups[-1]], {}), Report("backward_end")]
        run_to_the_end(World(*NAMES, reshard=reshard, depth=1), program)


def test_every_window_of_micro_batches() -> None:
    """Synchronised or not, kept full or not, in every order over three steps; the last one sends what is left."""
    for windows in product(product((True, False), repeat=2), repeat=3):
        world = World("a", "b", depth=1)
        for order, (sync, frees) in zip((("a", "b"), ("a",), ("b", "a")), windows, strict=True):
            world.feed(setting("sync", sync, "root", "a", "b"))
            world.feed(setting("reshard_after_backward", frees, "root", "a", "b"))
            run_to_the_end(world, step(*order))
        world.feed(setting("sync", True, "root", "a", "b") + setting("reshard_after_backward", True, "root", "a", "b"))
        run_to_the_end(world, step("a"))
        assert not world.held


# ---- failure at any point -------------------------------------------------------------------------------------


def failures(program: Program) -> Iterator[Program]:
    """`program` cut at every point, with and without the reports of the forwards that an exception ends."""
    for end in range(1, len(program)):
        yield program[:end]
        running: list[Report] = []
        for kind, unit, flags in program[:end]:
            if kind == "pre_forward":
                running.append(Report("forward_failed", unit, flags))
            elif kind in ("post_forward", "forward_failed"):
                running.pop()
        if running:
            yield program[:end] + running[::-1]


FAILING: list[tuple[tuple[Use | str, ...], Traits]] = [
    (("a", "b"), {}),
    (("a", "b", "a"), {}),
    ((NESTED, "c"), {}),
    (("a", "b"), {"a": Trait("some"), "b": Trait("mixed")}),
    (("a", "b"), {"a": Trait(recompute="whole"), "b": Trait(recompute="cut")}),
    ((NESTED,), {"a": Trait(recompute="cut"), "b": Trait("none", recompute="reentrant")}),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("order", "traits"), FAILING)
@pytest.mark.parametrize("reshard", RESHARD)
def test_nothing_is_left_of_a_step_that_failed_at_any_point(
    reshard: bool | int | None, order: tuple[Use | str, ...], traits: Traits
) -> None:
    """In the first step, in one with a plan, and with a graph being recorded: abandoned, it was never tried."""

    def fresh() -> World:
        return World(*NAMES, reshard=reshard, depth=1, traits=traits)

    good = step(*order, traits=traits)
    world = fresh()
    run_to_the_end(world, good)
    commands = world.commands
    # As soon as a backward begins it is recorded.
    graph = [Report(k, u, (*f, "create_graph") if k == "pre_backward" else f) for k, u, f in good]
    for before in ([], good, evaluation("a"), setting("is_last", False) + step("b")):
        for failed in (*failures(good), *failures(graph)):
            world = fresh()
            world.feed(before + failed + [Report("reset")])
            assert world.state == fresh().state
            assert not world.full() and not world.arrived and world.run.generation == 1
            start = len(world.commands)
            run_to_the_end(world, setting("is_last", True) + good)
            assert world.commands[start:] == commands


# ---- arbitrary ------------------------------------------------------------------------------------------------


class AnyProgram(RuleBasedStateMachine):
    """Reports in any order that modules and autograd could make, and many that they could not: overlapping forwards and
    backwards, gradients that nothing announced, the user's calls and settings at any moment.
    """

    @initialize(
        reshard=st.sampled_from(RESHARD),
        depth=st.sampled_from(DEPTHS),
        empty=st.sets(st.sampled_from("abc"), max_size=1),
    )
    def begin(self, reshard: bool | int | None, depth: int, empty: set[str]) -> None:
        # Two worlds that hear the same: two ranks.
        self.worlds = [World(*NAMES, reshard=reshard, depth=depth, empty=empty) for _ in range(2)]
        # Units whose forward runs, innermost last, with whether it is a repetition in backward.
        self.running: list[tuple[str, bool]] = []

    @property
    def world(self) -> World:
        return self.worlds[0]

    def hear(self, *reports: Report) -> None:
        for world in self.worlds:
            world.feed(reports)

    names = st.sampled_from(("root", *NAMES))
    yes = st.booleans()

    @rule(name=names, again=yes, stale=yes)
    def pre_forward(self, name: str, again: bool, stale: bool) -> None:
        again = again and self.world.run.in_backward
        stale = stale and self.world[name].full is not Full.SHARDED
        flags = (("in_backward",) if again else ()) + (("stale",) if stale else ())
        self.running.append((name, again))
        self.hear(Report("pre_forward", name, flags), Report("compute", name))

    @precondition(lambda self: self.running)
    @rule(inputs=yes, outputs=yes)
    def post_forward(self, inputs: bool, outputs: bool) -> None:
        name, again = self.running.pop()
        flags = ("in_backward",) * again + ("inputs",) * inputs + ("outputs",) * outputs
        self.hear(Report("post_forward", name, flags))

    @precondition(lambda self: self.running)
    @rule()
    def forward_failed(self) -> None:
        name, again = self.running.pop()
        self.hear(Report("forward_failed", name, ("in_backward",) * again))

    @rule(name=names, graph=yes)
    def pre_backward(self, name: str, graph: bool) -> None:
        self.hear(Report("pre_backward", name, ("create_graph",) * graph), Report("compute", name))

    @precondition(lambda self: self.world.run.in_backward)
    @rule(name=names, ready=yes)
    def gradient(self, name: str, ready: bool) -> None:
        if not self.world[name].empty:
            self.hear(Report("gradient", name))
            if ready:
                self.hear(Report("grads_ready", name))

    @precondition(lambda self: self.world.run.in_backward)
    @rule(name=names)
    def inputs_reached(self, name: str) -> None:
        self.hear(Report("inputs_reached", name))

    @precondition(lambda self: self.world.run.in_backward)
    @rule()
    def backward_end(self) -> None:
        keeps_full = self.world.run.keep_full
        self.hear(Report("backward_end"))
        world = self.world
        assert not world.arrived and not world.run.in_backward
        allowed = {n for n, u in world.units.items() if keeps_full or not u.plan.reshard_after_backward}
        allowed |= {name for name, _ in self.running}
        allowed |= {name for name, unit in world.units.items() if unit.pins.count and unit.full is not Full.FULL}
        if world.run.ending.ends_step:
            assert world.full() <= allowed
            assert not any(unit.full is Full.PENDING for unit in world.units.values())
            assert not world.run.order and not any(unit.uses for unit in world.units.values())

    @rule(call=st.sampled_from(("unshard", "wait_unshard", "reshard")), name=names)
    def the_user_calls(self, call: str, name: str) -> None:
        self.hear(Report(call, name))

    @rule(
        name=names,
        field=st.sampled_from(
            (
                "sync",
                "reshard_after_forward",
                "reshard_after_backward",
                "keeps_secondary",
                "frees_late",
                "is_last",
                "keeps_in_evaluation",
            )
        ),
        value=yes,
    )
    def the_user_sets(self, name: str, field: str, value: bool) -> None:
        # A backward inside a forward is always the last one of what it is about.
        if field != "is_last" or value or not self.running:
            self.hear(*setting(field, value, name))

    @rule(
        name=names, field=st.sampled_from(("forward_prefetch", "backward_prefetch")), listed=st.lists(names, max_size=2)
    )
    def the_user_lists(self, name: str, field: str, listed: list[str]) -> None:
        for world in self.worlds:
            setattr(world[name].plan, field, tuple(world[other] for other in listed))

    @rule()
    def reset(self) -> None:
        self.hear(Report("reset"))
        self.running.clear()
        assert self.world.state == World(*NAMES).state
        assert not self.world.full()

    @invariant()
    def ranks_agree(self) -> None:
        if hasattr(self, "worlds"):
            first, second = self.worlds
            assert first.log == second.log
            assert not any(unit.full for unit in first.units.values() if unit.empty)


# Explaining a failure takes far longer than finding and shrinking it.
AnyProgram.TestCase.settings = settings(phases=(Phase.generate, Phase.shrink))
test_any_program = pytest.mark.hang_after(300)(AnyProgram.TestCase)
