"""One small test, or a few, for each rule [Rn] of schedule/rules.py, in the order of a step. No torch."""

from __future__ import annotations

import pytest

from fullshard.schedule import Full, Phase
from tests.pure.test_lifecycle_worlds import Report, Trait, World, evaluation, forward, model, setting, step


def say(world: World, text: str) -> list[str]:
    """Report `KIND UNIT FLAG...`; the commands that followed."""
    kind, unit, *flags = text.split()
    return world.report(Report(kind, unit, tuple(flags)))


def says(world: World, *texts: str) -> list[str]:
    """Report several; the commands of all of them."""
    return [command for text in texts for command in say(world, text)]


def before_backward(*names: str, **options: object) -> World:
    """A world in which each unit ran once; the backward is next."""
    world = World(*names, **options)  # type: ignore[arg-type]
    say(world, "pre_forward root")
    for name in names:
        says(world, f"pre_forward {name}", f"post_forward {name} inputs outputs")
    say(world, "post_forward root outputs")
    return world


# ---- forward ------------------------------------------------------------------------------------------------


def test_r1_recomputation_gathers_again_and_changes_nothing_else() -> None:
    """[R1] Its own backward began before; another use's backward may have freed the unit."""
    world = before_backward("a")
    says(world, "pre_backward root", "pre_backward a")
    assert say(world, "pre_forward a in_backward") == []
    assert say(world, "inputs_reached a") == ["reshard a", "reduce a"]
    before = world.state
    assert say(world, "pre_forward a in_backward") == ["unshard a", "wait a"]
    assert world.state == before | {"a.full": Full.FULL}


def test_r1_is_for_units_whose_backward_began() -> None:
    """[R1] Before that, recomputation is a forward: of this unit, with its phase."""
    world = before_backward("a", "b")
    says(world, "pre_backward root")
    assert say(world, "pre_forward a in_backward") == ["unshard a", "wait a"]
    assert world["a"].phase is Phase.FORWARD and world.run.forward_root is None
    assert say(world, "post_forward a in_backward inputs outputs") == []
    assert world["a"].phase is Phase.IDLE and world.run.forward_root is None


def test_r36_what_is_frozen_is_needed_again_in_recomputation() -> None:
    """[R36] Gradients of the second of two re-entrant uses come before its frozen weights were read for the last time;
    a unit without frozen weights is through with them."""
    for frozen in (True, False):
        world = before_backward("a")
        world["a"].plan.frees_late = frozen
        says(world, "pre_backward root", "pre_backward a", "inputs_reached a", "pre_forward a in_backward")
        assert say(world, "grads_ready a") == ([] if frozen else ["reshard a"])
        assert world["a"].full is (Full.FULL if frozen else Full.SHARDED)


def test_r2_kept_parameters_are_not_used_once_their_shards_changed() -> None:
    """[R2] Freed and gathered again, from both states that keep memory; not when nothing changed."""
    for prepare in (step("a"), evaluation("a")):
        world = World("a", reshard=False)
        world.feed(setting("reshard_after_backward", False, "root", "a") + prepare)
        assert world.full() == {"root", "a"}
        say(world, "pre_forward root")
        assert say(world, "pre_forward a stale") == ["reshard a", "unshard a", "wait a"]
        say(world, "post_forward a inputs outputs")
        assert say(world, "pre_forward a") == []


def test_r2_a_gather_in_flight_is_not_used_once_its_shards_changed() -> None:
    """[R2] It may be that of a pass that guessed wrong and that no backward followed: what travels is what was."""
    world = World("a", "b", depth=1)
    world.feed(evaluation("a", "b") + evaluation())
    assert world["a"].full is Full.PENDING
    say(world, "pre_forward root")
    assert say(world, "pre_forward a stale") == ["cancel a", "unshard a", "wait a"]


def test_r3_what_is_needed_first_is_gathered_first() -> None:
    """[R3] Own gather, own wait, then those ahead, in the order in which they will be needed, before any compute."""
    world = World("a", "b", "c", depth=2)
    world.feed(step("a", "b", "c"))
    assert say(world, "pre_forward root") == ["unshard root", "wait root", "unshard a", "unshard b"]
    assert say(world, "pre_forward a") == ["wait a", "unshard c"]


def test_r3_recomputation_gathers_only_what_the_user_listed() -> None:
    """[R3] It follows no recorded order of forwards, and is no part of one."""
    world = before_backward("a", "b", "c", depth=1)
    world.feed(step("a", "b", "c"))
    says(world, "pre_backward root")
    log = list(world.run.forward_log)
    assert say(world, "pre_forward a in_backward") == ["unshard a", "wait a"]
    assert world.run.forward_log == log
    world["b"].plan.forward_prefetch = (world["c"],)
    assert say(world, "pre_forward b in_backward") == ["unshard b", "wait b", "unshard c"]


def test_r4_the_end_of_recomputation_frees_nothing() -> None:
    """[R4] The backward that asked for it reads the weights next. Phase and hooks are those of the first use."""
    world = before_backward("a")
    says(world, "pre_backward root", "pre_backward a", "pre_forward a in_backward")
    before = world.state
    assert say(world, "post_forward a in_backward outputs") == []
    assert world.state == before and world["a"].phase is Phase.BACKWARD
    assert say(world, "inputs_reached a") == ["reshard a", "reduce a"]


def test_r4_recomputation_may_begin_before_its_backward() -> None:
    """[R4] However it ends, the end of the backward frees its weights: no forward runs any more."""
    for end in ("post_forward a in_backward outputs", "forward_failed a in_backward"):
        world = before_backward("a")
        says(world, "pre_backward root", "pre_forward a in_backward", "pre_backward a", end)
        assert "reshard a" in says(world, "inputs_reached a", "backward_end root")
        assert not world.full()


def test_recomputation_has_no_place_in_the_order() -> None:
    """A forward in backward frees nothing, is no use of its own, and ends no pass: with or without outputs."""
    for flags in ("in_backward inputs outputs", "in_backward"):
        world = before_backward("a", "b")
        says(world, "pre_backward root", "pre_forward a in_backward")
        uses, order, plan = list(world["b"].uses), list(world.run.order), list(world.run.forward_plan)
        assert say(world, f"post_forward a {flags}") == []
        assert (world["b"].uses, world.run.order, world.run.forward_plan) == (uses, order, plan)


def test_r5_memory_is_given_back_after_forward() -> None:
    """[R5] Unless the unit is to stay full."""
    world = World("a", "b")
    world["b"].plan.reshard_after_forward = False
    says(world, "pre_forward root", "pre_forward a")
    assert say(world, "post_forward a inputs outputs") == ["reshard a"]
    says(world, "pre_forward b")
    assert say(world, "post_forward b inputs outputs") == []
    assert world["b"].full is Full.FULL


def test_r6_without_a_backward_users_find_sharded_parameters() -> None:
    """[R6] The memory stays for a next use, which needs no gather; a unit that is to free it does."""
    world = World("a", "b", reshard=False)
    world["b"].plan.reshard_after_forward = True
    says(world, "pre_forward root", "pre_forward a")
    assert say(world, "post_forward a") == ["shelve a"]
    assert say(world, "pre_forward a") == ["expose a"]
    says(world, "pre_forward b")
    assert say(world, "post_forward b") == ["reshard b"]


def test_r20_what_was_kept_for_a_backward_is_freed_when_none_comes() -> None:
    """[R20] The root, by default; where memory was asked for, it stays (R6), and where a backward may come, too."""
    world = World("a", reshard=None, root_kept=False)
    says(world, "pre_forward root")
    assert say(world, "post_forward root") == ["reshard root"]
    assert says(world, "pre_forward root", "post_forward root outputs") == ["unshard root", "wait root"]
    assert world["root"].full is Full.FULL
    world = World("a", reshard=None, root_kept=True)
    assert says(world, "pre_forward root", "post_forward root")[-1] == "shelve root"


def test_r7_each_use_has_its_own_place_in_the_order() -> None:
    """[R7] In the order in which the forwards ended. A unit without parameters has none."""
    world = World("a", "b", empty=["b"])
    says(world, "pre_forward root")
    for name in ("a", "b", "a"):
        says(world, f"pre_forward {name}", f"post_forward {name} inputs outputs")
    say(world, "post_forward root outputs")
    assert [unit.name for unit in world.run.order] == ["a", "a", "root"]
    assert (world["a"].uses, world["b"].uses, world["root"].uses) == ([0, 1], [], [2])


def test_a_forward_inside_another_ends_no_pass() -> None:
    """Only the outermost one does: the order of the whole pass is the plan."""
    world = World("a", "b")
    world.feed(step("a", "b"))
    assert [unit.name for unit in world.run.forward_plan] == ["root", "a", "b"]


# ---- backward -----------------------------------------------------------------------------------------------


def test_r8_a_second_output_of_one_use_brings_nothing_ahead() -> None:
    """[R8] The first one took the use's place in the order; weights that were freed in between are gathered again."""
    world = before_backward("a", "b", "c")
    says(world, "pre_backward root", "pre_backward c")
    uses = list(world["b"].uses)
    assert say(world, "pre_backward c") == []
    assert say(world, "reshard c") == ["reshard c"]
    assert say(world, "pre_backward c") == ["unshard c", "wait c"]
    assert world["b"].uses == uses and world["a"].full is Full.SHARDED


def test_r8_another_use_is_another_backward() -> None:
    """[R8] After the gradients of one use were handed over, the next one counts: its own place, its prefetch."""
    world = World("a", "b")
    says(world, "pre_forward root")
    for name in ("a", "b", "a"):
        says(world, f"pre_forward {name}", f"post_forward {name} inputs outputs")
    say(world, "post_forward root outputs")
    assert say(world, "pre_backward root") == ["unshard root", "wait root", "unshard a"]
    assert says(world, "pre_backward a", "inputs_reached a") == ["wait a", "unshard b", "reshard a"]
    assert says(world, "pre_backward b", "inputs_reached b") == ["wait b", "unshard a", "reshard b", "reduce b"]
    assert says(world, "pre_backward a", "inputs_reached a") == ["wait a", "reshard a", "reduce a"]


def test_r9_the_next_unit_of_the_backward_travels_while_this_one_computes() -> None:
    """[R9] After the own gather and wait, before the compute."""
    world = before_backward("a", "b")
    assert say(world, "pre_backward root") == ["unshard root", "wait root", "unshard b"]
    assert say(world, "pre_backward b") == ["wait b", "unshard a"]
    assert say(world, "pre_backward a") == ["reduce b", "wait a"]


def test_r10_a_frozen_weight_waits_for_the_gradient_of_the_inputs() -> None:
    """[R10] All gradients are ready, but the frozen weight may still be read."""
    world = before_backward("a", traits={"a": Trait("mixed")})
    says(world, "pre_backward root", "pre_backward a", "gradient a")
    assert say(world, "grads_ready a") == []
    assert world["a"].full is Full.FULL
    assert say(world, "inputs_reached a") == ["reshard a", "reduce a"]


def test_r10_waits_for_the_end_where_no_input_reports() -> None:
    """[R10] The inputs need no gradient, but an inner unit may be reached through the frozen weight."""
    world = World("a", traits={"a": Trait("mixed", inputs=False)})
    says(world, "pre_forward root", "pre_forward a", "post_forward a outputs", "post_forward root outputs")
    says(world, "pre_backward root", "pre_backward a", "gradient a")
    assert say(world, "grads_ready a") == []
    assert {"reshard a", "reduce a"} <= {*say(world, "backward_end root")}


def test_r10_does_not_wait_for_what_will_not_come() -> None:
    """[R10] The gradients came by a way that no output announced; or nothing is frozen."""
    world = before_backward("a", traits={"a": Trait("mixed")})
    assert says(world, "pre_backward root", "gradient a", "grads_ready a") == ["unshard root", "wait root", "unshard a"]
    assert world["a"].phase is Phase.DONE
    assert "reduce a" in say(world, "backward_end root")

    world = before_backward("a")
    says(world, "pre_backward root", "pre_backward a", "gradient a")
    assert say(world, "grads_ready a") == ["reshard a", "reduce a"]


def test_r11_the_end_of_the_backward_takes_what_is_left() -> None:
    """[R11] Units not handed over are freed; gradients not handed over are sent; what is done is left alone."""
    world = before_backward("a", "b", "c", reshard=False)
    says(world, "pre_backward root", "pre_backward c", "gradient c", "grads_ready c", "inputs_reached c")
    says(world, "pre_backward b", "inputs_reached b", "gradient b", "gradient root")
    assert world["b"].phase is world["c"].phase is Phase.DONE
    assert say(world, "backward_end root") == ["reshard root", "reduce root", "reshard a", "reduce b", "finish root"]
    assert all(unit.phase is Phase.IDLE and not unit.in_backward for unit in world.units.values())


def test_r11_what_was_gathered_once_more_behind_its_gradients_is_freed() -> None:
    """[R11] Recomputation may come for the sake of an inner unit, when the own gradients were handed over already."""
    world = before_backward("a")
    says(world, "pre_backward root", "pre_backward a", "gradient a", "grads_ready a")
    assert says(world, "pre_forward a in_backward", "post_forward a in_backward outputs") == ["unshard a", "wait a"]
    assert say(world, "backward_end root") == ["reshard root", "reduce root", "reshard a", "finish root"]


def test_the_end_of_a_backward_ends_what_it_began() -> None:
    """Hooks of inputs, a graph that was recorded: the next backward has its own."""
    world = before_backward("a")
    says(world, "pre_backward root create_graph", "pre_backward a create_graph", "backward_end root")
    assert not world.run.in_backward and not world.run.keep_full
    assert not world["a"].in_backward and world["a"].phase is Phase.IDLE


def test_r12_a_gather_that_nobody_needed_is_waited_for_and_dropped() -> None:
    """[R12] At the end of the last backward; before that, it may still be of use."""
    world = before_backward("a", "b")
    world.feed(setting("is_last", False))
    assert says(world, "pre_backward root")[-1] == "unshard b"
    says(world, "inputs_reached b", "backward_end root")
    assert world["b"].full is Full.PENDING
    world.feed(setting("is_last", True))
    assert says(world, "pre_backward root", "backward_end root")[-2:] == ["cancel b", "finish root"]


def test_r13_each_step_has_an_order_of_its_own() -> None:
    """[R13] Emptied with all places in it; kept while backwards of the same step are to follow."""
    world = before_backward("a", "b")
    world.feed(setting("is_last", False))
    says(world, "pre_backward root", "pre_backward b", "backward_end root")
    assert [unit.name for unit in world.run.order] == ["a", "b", "root"]
    assert (world["a"].uses, world["b"].uses) == ([0], [])
    # A use whose backward never came: in the next step units would wait for it.
    assert len(world["a"].sending.open) == 1
    world.feed(setting("is_last", True))
    says(world, "pre_backward root", "backward_end root")
    assert world.run.order == [] and world["a"].uses == [] and world["a"].sending.open == []


# ---- failure ------------------------------------------------------------------------------------------------


def test_r14_nothing_of_an_abandoned_step_is_left() -> None:
    """[R14] In flight: dropped; full or shelved: freed; and the records are those of a fresh world."""
    world = World("a", "b", "c", reshard=False, depth=1)
    world.feed(evaluation("c"))
    world.feed(step("a", "b"))
    # Not the first forward since the last backward: the order has a mark.
    says(world, "pre_forward root", "pre_forward a", "post_forward a inputs outputs", "post_forward root outputs")
    says(world, "pre_forward root", "pre_forward a", "unshard b", "pre_backward a create_graph")
    assert {world["b"].full, world["a"].full} == {Full.PENDING, Full.FULL} and world.run.order_mark
    assert say(world, "reset root") == ["reshard root", "reshard a", "cancel b", "reset root"]
    fresh = World("a", "b", "c", reshard=False, depth=1)
    assert world.state == fresh.state
    assert world.run.generation == 1


def test_r15_an_abandoned_order_is_no_plan() -> None:
    """[R15] The step after gathers when needed, and records anew."""
    world = World("a", "b", depth=1)
    world.feed(step("a", "b") + step("a", "b"))
    says(world, "pre_forward root", "reset root")
    first = World("a", "b", depth=1)
    assert world.feed(step("a", "b")) == first.feed(step("a", "b"))
    assert say(world, "pre_forward root")[-1] == "unshard a"


# ---- shared by the rules ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("full", "commands"),
    [
        (Full.SHARDED, ["unshard a", "wait a"]),
        (Full.PENDING, ["wait a"]),
        (Full.FULL, []),
        (Full.SHELVED, ["expose a"]),
    ],
)
def test_r16_what_is_missing_and_nothing_more(full: Full, commands: list[str]) -> None:
    """[R16] From every state, in forward and in backward."""
    for event in ("pre_forward a", "pre_backward a"):
        world = World("a")
        world["a"].full = world.checker.full["a"] = full
        assert say(world, event) == commands
        assert world["a"].full is Full.FULL


def test_r16_there_is_nothing_to_gather_without_parameters() -> None:
    """[R16] Neither when it is needed, nor ahead, nor for the user."""
    world = World("a", "b", empty=["b"], depth=1)
    world["a"].plan.backward_prefetch = (world["b"],)
    found = world.feed(step("a", "b", traits={"b": Trait("none")}) * 2)
    found += says(world, "unshard b", "wait_unshard b", "reshard b")
    assert not [command for command in found if command.endswith(" b")]


def test_r17_weights_go_before_the_message_comes() -> None:
    """[R17] Free, then reduce; shelved memory too."""
    world = before_backward("a")
    says(world, "pre_backward root", "pre_backward a", "gradient a")
    assert say(world, "grads_ready a") == ["reshard a", "reduce a"]
    world = World("a", reshard=False)
    world.feed(evaluation("a"))
    assert world["a"].full is Full.SHELVED
    assert "reshard a" in says(world, "pre_backward root", "backward_end root")


def test_r17_weights_stay_where_they_are_needed_again() -> None:
    """[R17] The user says so; or the backward records a graph, whose own backward reads them. No gather is dropped."""
    for prepare, flag in ((setting("reshard_after_backward", False, "a"), ""), ([], " create_graph")):
        world = before_backward("a")
        world.feed(prepare)
        says(world, f"pre_backward root{flag}", "pre_backward a", "gradient a")
        assert say(world, "grads_ready a") == ["reduce a"]
        assert world["a"].full is Full.FULL
    world = before_backward("a")
    assert says(world, "pre_backward root", "inputs_reached a", "gradient a")[-1] == "unshard a"
    assert say(world, "inputs_reached a") == []


def recorded(*names: str) -> World:
    """A world whose forward was differentiated with a graph being recorded."""
    world = before_backward(*names)
    says(world, "pre_backward root create_graph", *(f"pre_backward {name}" for name in names), "backward_end root")
    return world


def test_r31_the_backward_through_a_recorded_graph_frees() -> None:
    """[R31] When it ends, also what got no gradients. In between the shards are shown."""
    world = recorded("a")
    assert {unit.full for unit in world.units.values()} == {Full.SHELVED}
    found = says(world, "pre_backward root", "pre_backward a")
    assert "expose root" in found and "expose a" in found
    says(world, "gradient root", "grads_ready root")
    found = say(world, "backward_end root spent")
    assert {"reshard root", "reshard a"} <= set(found) and found[-1] == "finish root"
    assert not any(unit.pins.count for unit in world.units.values())


def test_r31_gradients_that_were_not_handed_over_count() -> None:
    """[R31] Of a unit with an absent gradient, in a backward that its outputs do not see."""
    world = recorded("a")
    says(world, "pre_backward root", "gradient a", "backward_end root spent")
    assert world.full() == set()


def test_r31_other_backwards_leave_the_weights_of_a_recorded_graph() -> None:
    """[R31] One that brings no gradients or may be repeated, and one of another forward."""
    for others in (
        ["pre_backward root", "pre_backward a", "inputs_reached a", "backward_end root"],
        ["pre_backward root", "pre_backward a", "gradient a", "grads_ready a", "backward_end root"],
        ["unshard a", "wait_unshard a", "gradient root", "grads_ready root", "backward_end root spent"],
    ):
        world = recorded("a")
        says(world, *others)
        assert "a" in world.full() and world["a"].full is Full.SHELVED
    world = recorded("a")
    world.feed(evaluation("a"))
    assert world.full() == {"root", "a"}, "a forward in between"
    world.feed(forward(model("a"), {}))
    says(world, "pre_backward root create_graph", "pre_backward a create_graph", "backward_end root")
    for left in (1, 0):
        says(world, "pre_backward root", "pre_backward a", "gradient root", "gradient a", "backward_end root spent")
        assert world["a"].pins.count == left and world.full() == ({"root", "a"} if left else set())


def test_r31_two_backwards_that_record_graphs_of_one_forward_are_one() -> None:
    """[R31] A jacobian row by row."""
    world = recorded("a")
    says(world, "pre_backward root create_graph", "pre_backward a", "backward_end root")
    assert world["a"].pins.count == 1


def test_r31_what_is_not_in_memory_is_not_pinned() -> None:
    """[R31] A unit that was not used, in a backward that records a graph."""
    world = World("a", "b")
    world.feed(forward(model("a"), {}))
    says(world, "pre_backward root create_graph", "pre_backward a", "backward_end root")
    assert world["b"].pins.count == 0


def test_r31_weights_of_an_opaque_graph_stay_until_the_shards_change() -> None:
    """[R31] Or until the user says so, or the step is given up."""
    for ending in ("pre_forward a stale", "reshard a", "reset root"):
        world = World("a")
        says(world, "pre_forward root", "pre_forward a")
        assert say(world, "post_forward a outputs opaque") == ["shelve a"]
        assert world["a"].pins.count == 1
        assert "reshard a" in say(world, ending)
        assert world["a"].pins.count == 0


def test_r31_a_forward_that_records_a_graph_keeps_its_weights_to_its_end() -> None:
    """[R31] A force inside of a forward: its backward is over, the forward is not; then they are put aside."""
    world = World("a")
    says(world, "pre_forward root", "pre_forward a", "pre_backward a create_graph")
    assert "shelve a" not in say(world, "backward_end root")
    assert world["a"].pins.count == 1 and world["a"].full is Full.FULL
    assert say(world, "post_forward a outputs") == ["shelve a"]


def test_r31_pins_of_a_unit_that_stays_full_anyway() -> None:
    """[R31] Kept by the user, it is not put aside behind a forward that a backward follows, nor behind that."""
    world = World("a", reshard=False)
    world.feed(setting("reshard_after_backward", False, "a"))
    says(world, "pre_forward root", "pre_forward a", "post_forward a outputs opaque")
    assert world["a"].full is Full.FULL
    says(world, "post_forward root outputs", "pre_backward root", "backward_end root")
    assert world["a"].full is Full.FULL


def test_r32_a_forward_that_differentiates_keeps_its_weights() -> None:
    """[R32] They are read behind that backward too; the end of the forward frees them, also when it raises."""
    for end in ("post_forward a outputs", "forward_failed a"):
        world = World("a", reshard=False)
        says(world, "pre_forward root", "pre_forward a", "pre_backward a needed", "gradient a", "grads_ready a")
        assert say(world, "backward_end root")[-1] == "finish root"
        assert world["a"].full is Full.FULL and world["a"].phase is Phase.FORWARD
        assert say(world, "reshard a") == [], "it is to stay full in forward"
        says(world, end)
        assert world["a"].phase is Phase.IDLE and not world["a"].pins.running
        says(world, "post_forward root", "pre_backward a", "backward_end root")
        assert "a" not in world.full()


def test_r18_gradients_are_sent_or_kept() -> None:
    """[R18] And that there are none is sent, too: another rank may have some."""
    world = before_backward("a", "b")
    world.feed(setting("sync", False, "b"))
    says(world, "pre_backward root", "pre_backward b", "gradient b")
    assert say(world, "grads_ready b") == ["reshard b", "accumulate b"]
    says(world, "pre_backward a", "gradient a")
    assert say(world, "grads_ready a") == ["reshard a", "reduce a"]
    world = before_backward("a")
    assert says(world, "pre_backward root", "pre_backward a", "inputs_reached a")[-1] == "reduce a"


def test_r18_what_was_kept_is_sent_by_the_backward_that_sends() -> None:
    """[R18] Also when that backward does not reach the unit."""
    world = World("a", "b")
    world.feed(setting("sync", False, "root", "a", "b") + step("a", "b") + setting("sync", True, "root", "a", "b"))
    assert world.held == {"root", "a", "b"}
    assert "reduce b" in world.feed(step("a"))
    assert world.held == set()


def test_r19_inputs_reached_by_another_way_mean_nothing() -> None:
    """[R19] The use is not part of this backward; or its gradients were handed over when they were ready."""
    world = before_backward("a", "b", reshard=False)
    say(world, "pre_backward root")
    assert say(world, "inputs_reached b") == [] and world["b"].phase is Phase.IDLE
    says(world, "pre_backward a", "gradient a", "grads_ready a", "unshard a", "wait_unshard a")
    assert say(world, "inputs_reached a") == []
    assert world["a"].full is Full.FULL and world["a"].phase is Phase.DONE


def test_r19_gradients_that_came_unannounced_are_sent_with_the_end() -> None:
    """[R19] No output of the unit was seen, but some of its gradients are there. Where in the order is not known."""
    world = before_backward("a")
    says(world, "pre_backward root", "gradient a")
    assert say(world, "inputs_reached a") == []
    assert world["a"].phase is Phase.DONE
    assert "reduce a" in say(world, "backward_end root")


# ---- an integer reshard_after_forward -----------------------------------------------------------------------


def test_r26_a_part_is_kept_after_forward_while_an_integer_is_set() -> None:
    """[R26] `set_reshard_after_forward` takes its place, from the next forward on."""
    world = before_backward("a", reshard=2)
    assert [unit.full for unit in world.run.units] == [Full.SECONDARY] * 2
    world["a"].plan.keeps_secondary = False
    assert says(world, "pre_forward a", "post_forward a outputs") == ["unshard_secondary a", "wait a", "reshard a"]
    world["a"].plan.keeps_secondary, world["a"].plan.reshard_after_forward = True, False
    assert says(world, "pre_forward a", "post_forward a outputs") == ["unshard a", "wait a"]


def test_r27_after_an_evaluation_shards_stand_on_the_modules_and_parts_are_kept() -> None:
    """[R27] The next forward gathers them; a forward that a backward may follow shows the parts."""
    world = World("a", reshard=2)
    says(world, "pre_forward root", "pre_forward a")
    assert say(world, "post_forward a") == ["reshard_secondary a", "shelve a"]
    assert world["a"].full is Full.SECONDARY
    assert says(world, "pre_forward a", "post_forward a outputs") == [
        "unshard_secondary a",
        "wait a",
        "reshard_secondary a",
    ]


def test_r28_what_was_kept_is_gathered_from_those_who_kept_it() -> None:
    """[R28] Until it is stale, freed by its backward, resharded, or abandoned: then from all."""
    world = before_backward("a", reshard=2)
    assert says(world, "pre_backward root", "pre_backward a") == [
        "unshard_secondary root",
        "wait root",
        "unshard_secondary a",
        "wait a",
    ]
    assert say(world, "pre_forward a in_backward") == []
    for end in ("reshard a", "reset root"):
        world = before_backward("a", reshard=2)
        assert "reshard a" in say(world, end)
        assert says(world, "unshard a", "wait_unshard a") == ["unshard a", "wait a"]
    world = before_backward("a", reshard=2)
    assert say(world, "wait_unshard a") == [], "nobody asked for it"
    assert says(world, "pre_forward root stale", "pre_forward a stale") == [
        *("reshard root", "unshard root", "wait root"),
        *("reshard a", "unshard a", "wait a"),
    ]
    world = before_backward("a", reshard=2)
    assert says(world, "unshard a", "reshard a") == ["unshard_secondary a", "cancel a"]


def test_parts_of_units_that_the_loss_did_not_reach_are_freed() -> None:
    """With the end of the backward; a prefetch of them is dropped."""
    world = before_backward("a", "b", reshard=2)
    says(world, "pre_backward root", "inputs_reached root")
    assert say(world, "backward_end root") == ["reduce root", "reshard a", "cancel b", "finish root"]


def resident(*names: str, traits: dict[str, Trait] | None = None, **options: object) -> World:
    """A world in which there is memory for all of `names`."""
    world = World(*names, traits=traits, **options)  # type: ignore[arg-type]
    for name in names:
        world[name].plan.resident = True
    return world


def test_r34_a_resident_unit_is_gathered_once_in_a_step() -> None:
    """[R34] It stays full until its backward, whatever it would keep otherwise, and is freed then."""
    for reshard in (True, 2):
        world = resident("a", reshard=reshard)
        for _ in range(2):
            commands = [command for command in world.feed(step("a")) if command.endswith(" a")]
            assert commands == ["unshard a", "wait a", "reshard a", "reduce a"]


def test_r34_after_an_evaluation_users_find_shards() -> None:
    """[R34] The memory is kept for the next forward."""
    world = resident("a")
    says(world, "pre_forward root", "pre_forward a")
    assert say(world, "post_forward a") == ["shelve a"]
    says(world, "post_forward root", "pre_forward root")
    assert say(world, "pre_forward a") == ["expose a"]


def test_r35_a_frozen_resident_unit_is_gathered_once() -> None:
    """[R35] Between steps users find shards; what was written is gathered again, and `reshard` frees."""
    frozen = {"a": Trait(gradients="none")}
    world = resident("a", traits=frozen)

    def of_a(program: list[Report]) -> list[str]:
        return [command for report in program for command in world.report(report) if command.endswith(" a")]

    assert of_a(step("a", traits=frozen)) == ["unshard a", "wait a", "shelve a"]
    assert of_a(step("a", traits=frozen)) == ["expose a", "shelve a"]
    assert of_a(evaluation("a")) == ["expose a", "shelve a"]
    says(world, "pre_forward root")
    assert say(world, "pre_forward a stale") == ["reshard a", "unshard a", "wait a"]
    says(world, "post_forward a inputs outputs", "post_forward root outputs", "pre_backward root", "pre_backward a")
    assert say(world, "inputs_reached a none") == ["shelve a"]
    world.report(Report("backward_end"))
    assert say(world, "reshard a") == ["reshard a"]


def test_r35_two_uses_of_a_frozen_resident_unit() -> None:
    """[R35] Put aside after the backward of the one, on the module again for that of the other."""
    frozen = {"a": Trait(gradients="none")}
    world = resident("a", "b", traits=frozen)
    program = step("a", "b", "a", traits=frozen)
    commands = [command for report in program for command in world.report(report) if command.endswith(" a")]
    assert commands == ["unshard a", "wait a", "shelve a", "expose a", "shelve a"]
