"""The user's calls, forwards that end early, a backward inside a forward: what has no number in rules.py. No torch."""

from __future__ import annotations

from fullshard.schedule import Full, Phase
from tests.pure.test_lifecycle_rules import before_backward, say, says
from tests.pure.test_lifecycle_worlds import Report, World, evaluation, setting

# ---- the user's calls ---------------------------------------------------------------------------------------


def test_unshard_issues_and_wait_unshard_waits() -> None:
    """Each only where something is missing; repeating them changes nothing."""
    world = World("a")
    assert says(world, "unshard a", "unshard a") == ["unshard a"]
    assert says(world, "wait_unshard a", "wait_unshard a", "unshard a") == ["wait a"]
    assert says(world, "reshard a", "reshard a") == ["reshard a"]
    assert say(world, "wait_unshard a") == [], "a forward used and freed them in between"


def test_unshard_finds_kept_memory_unless_shards_changed() -> None:
    """Shelved parameters are put back; what was written since is gathered anew, from both states that keep memory."""
    world = World("a", reshard=False)
    world.feed(evaluation("a"))
    assert says(world, "unshard a", "wait_unshard a") == ["expose a"]
    assert says(world, "unshard a stale", "wait_unshard a") == ["reshard a", "unshard a", "wait a"]
    world.feed(evaluation("a"))
    assert says(world, "unshard a stale", "wait_unshard a") == ["reshard a", "unshard a", "wait a"]


def test_unshard_gathers_again_what_is_in_flight_once_its_shards_changed() -> None:
    """The first gather is waited for all the same: every rank issued it."""
    world = World("a")
    assert says(world, "unshard a", "unshard a stale", "wait_unshard a") == [
        "unshard a",
        "cancel a",
        "unshard a",
        "wait a",
    ]


def test_reshard_frees_drops_and_respects_a_running_forward() -> None:
    """What is in flight is dropped, kept memory is freed, and a unit that is to stay full stays so in its forward."""
    world = World("a", reshard=False)
    assert says(world, "unshard a", "reshard a") == ["unshard a", "cancel a"]
    world.feed(evaluation("a"))
    assert say(world, "reshard a") == ["reshard a"]
    says(world, "pre_forward root", "pre_forward a")
    assert says(world, "reshard a", "reshard root") == []
    world["a"].plan.reshard_after_forward = True
    assert say(world, "reshard a") == ["reshard a"]


# ---- forwards that end early -------------------------------------------------------------------------------


def test_a_forward_that_failed_may_be_caught() -> None:
    """Nothing is freed and no pass ends: the module around it goes on, and the unit may run again."""
    world = World("a")
    says(world, "pre_forward root", "pre_forward a")
    assert say(world, "forward_failed a") == []
    assert world["a"].phase is Phase.IDLE and world.run.forward_root is world["root"]
    assert says(world, "pre_forward a", "post_forward a inputs outputs") == ["reshard a"]


def test_a_recomputation_that_is_cut_short_leaves_nothing_behind() -> None:
    """A non-reentrant checkpoint around two units, of which the loss reaches only the first: the second is recomputed
    until all that is needed is there, and its own backward never begins. The step is a good one: the next one must
    find no leftovers, or it throws the recorded order away, step after step.
    """
    world = before_backward("a", "b")
    says(world, "pre_backward root", "inputs_reached b", "pre_backward a", "pre_forward a in_backward")
    says(world, "post_forward a in_backward inputs outputs", "pre_forward b in_backward")
    say(world, "forward_failed b in_backward")
    world.feed([Report("gradient", "a"), Report("grads_ready", "a"), Report("inputs_reached", "a")])
    say(world, "backward_end root")
    assert world.run.forward_root is None and not world.run.has_leftovers
    assert not world.full() and not any(unit.phase for unit in world.units.values())


def test_a_step_that_did_not_end_is_noticed() -> None:
    """From its first forward or backward on, until it ended: what is left in between is to be abandoned."""
    world = World("a")
    assert not world.run.has_leftovers
    say(world, "pre_forward root")
    assert world.run.has_leftovers
    says(world, "pre_forward a", "post_forward a inputs outputs", "post_forward root outputs")
    assert not world.run.has_leftovers, "a backward may follow, or not"
    say(world, "pre_backward a")
    assert world.run.has_leftovers
    say(world, "backward_end root")
    assert not world.run.has_leftovers


def test_recomputation_after_a_forward_that_failed_ends_no_pass() -> None:
    """The backward of an earlier forward repeats the root, whose last forward failed: the plan is that of good ones."""
    world = before_backward("a")
    says(world, "pre_forward root", "forward_failed root", "pre_forward root in_backward")
    assert say(world, "post_forward root in_backward") == []
    assert [unit.name for unit in world.run.forward_plan] == ["root", "a"]
    assert [unit.name for unit in world.run.order] == ["a", "root"]


def test_whoever_catches_a_failure_outside_of_the_model_finds_sharded_parameters() -> None:
    """Whatever stands full is put aside, kept parts too; what is under way, and the memory, are for `reset`."""
    world = World("a", "b", "c", depth=1)
    world["b"].plan.keeps_secondary = True
    says(world, "pre_forward root", "pre_forward a", "post_forward a inputs outputs")
    says(world, "pre_forward b", "post_forward b inputs outputs", "unshard a", "pre_forward c", "forward_failed c")
    assert world["b"].full is Full.SECONDARY and world["a"].full is Full.PENDING
    assert say(world, "forward_failed root") == ["shelve root", "shelve b", "shelve c"]
    assert world["a"].full is Full.PENDING and world.run.has_leftovers
    assert say(world, "reset root") == ["reshard root", "cancel a", "reshard b", "reshard c", "reset root"]


def test_a_loss_from_before_a_forward_that_failed_has_its_backward() -> None:
    """What was put aside is found again."""
    world = before_backward("a")
    says(world, "pre_forward root", "forward_failed root")
    assert say(world, "pre_backward root") == ["expose root", "unshard a"]


def test_a_backward_that_failed_leaves_sharded_parameters() -> None:
    """But for those whose forward it was a part of, and which goes on."""
    world = before_backward("a", "b")
    says(world, "pre_backward root", "pre_backward b")
    assert say(world, "backward_failed root") == ["shelve root", "shelve b"]
    assert world.run.has_leftovers and world["a"].full is Full.PENDING
    says(world, "reset root", "pre_forward root", "pre_forward a", "post_forward a inputs outputs", "pre_forward b")
    says(world, "pre_backward a")
    assert say(world, "backward_failed root") == ["shelve a"]
    assert world["b"].full is world["root"].full is Full.FULL


# ---- a backward inside a forward ------------------------------------------------------------------------------


def test_a_backward_inside_an_evaluation_may_be_one_of_several() -> None:
    """The use that the inner backward took is not forgotten a second time when the evaluation ends."""
    world = World("a")
    world.feed(setting("is_last", False))
    says(world, "pre_forward root", "pre_forward a", "post_forward a inputs outputs")
    says(world, "pre_backward a", "inputs_reached a", "backward_end root", "post_forward root")
    assert world.run.order == [] and world["a"].uses == []
