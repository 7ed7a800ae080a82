"""Units of several modules, forwards inside forwards, and weights that backward does not read: R21 to R25. No torch.

The unit `h` has two modules. `more` says that one of them did not run yet.
"""

from __future__ import annotations

import pytest

from fullshard.schedule import Phase
from tests.pure.test_lifecycle_rules import before_backward, say, says
from tests.pure.test_lifecycle_worlds import World, setting, step

# ---- R21: forwards inside forwards ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "root"])
def test_r21_a_forward_inside_a_method_of_the_unit_is_part_of_it(name: str) -> None:
    """[R21] Weights stay until the method is over, whatever it calls in between; one use, one place in the order."""
    world = World("a")
    assert says(world, f"pre_forward {name}") == [f"unshard {name}", f"wait {name}"]
    log = list(world.run.forward_log)
    for _ in range(2):
        assert says(world, f"pre_forward {name} nested", f"post_forward {name} nested outputs") == []
    assert world[name].phase is Phase.FORWARD and world.run.forward_root is world[name]
    assert world.run.forward_log == log and world.run.order == []
    assert say(world, f"post_forward {name} inputs outputs") == [f"reshard {name}"]
    assert world.run.order == [world[name]] and world.run.forward_root is None


def test_r21_a_forward_inside_finds_weights_that_were_freed_meanwhile() -> None:
    """[R21] By the user's reshard(), in the middle of a method."""
    world = World("a")
    says(world, "pre_forward a", "reshard a")
    assert say(world, "pre_forward a nested") == ["unshard a", "wait a"]


def test_r21_a_nested_forward_that_failed_ends_nothing() -> None:
    """[R21] The method around it may catch the exception, and is still running."""
    world = World("a", reshard=False)
    says(world, "pre_forward a", "pre_forward a nested", "forward_failed a nested")
    assert world["a"].phase is Phase.FORWARD
    assert say(world, "reshard a") == [], "a unit that is to stay full stays so in its forward"


# ---- R22, R23: several modules inside the forward of the model -----------------------------------------------


def test_r22_one_gather_serves_all_modules_of_a_unit() -> None:
    """[R22] From the first to the last that runs, and one use for all."""
    world = World("h")
    say(world, "pre_forward root")
    assert says(world, "pre_forward h", "post_forward h inputs outputs more") == ["unshard h", "wait h"]
    assert world["h"].phase is Phase.FORWARD and world["h"].uses == []
    assert says(world, "pre_forward h", "post_forward h inputs outputs") == ["reshard h"]
    assert not world["h"].pass_open and world.run.open_passes == []
    assert say(world, "post_forward root outputs") == ["reshard root"]
    assert world["h"].uses == [0] and world.run.order == [world["h"], world["root"]]


def test_r22_an_output_of_the_first_module_is_enough_for_a_backward() -> None:
    """[R22] The last one may have none that requires a gradient: with reshard_after_forward=False weights stay."""
    world = World("h", reshard=False)
    says(world, "pre_forward root", "pre_forward h", "post_forward h outputs more")
    assert says(world, "pre_forward h", "post_forward h", "post_forward root outputs") == []
    world = World("h", reshard=False)
    says(world, "pre_forward root", "pre_forward h", "post_forward h more")
    assert says(world, "pre_forward h", "post_forward h") == ["shelve h"]


def test_r23_modules_that_did_not_run_are_not_waited_for() -> None:
    """[R23] The pass ends with the outermost forward, before it; the next one begins anew."""
    world = World("h", "a")
    says(world, "pre_forward root", "pre_forward h", "post_forward h inputs outputs more")
    assert world["h"].pass_open and world.run.open_passes == [world["h"]]
    assert says(world, "pre_forward a", "post_forward a inputs outputs")[-1] == "reshard a"
    assert say(world, "post_forward root outputs") == ["reshard h", "reshard root"]
    assert world.run.order == [world["a"], world["h"], world["root"]]
    assert not world["h"].pass_open and not world["h"].pass_outputs and world["h"].phase is Phase.IDLE
    assert says(world, "pre_backward root", "pre_backward h")[2:4] == ["unshard h", "wait h"]


def test_r23_an_evaluation_with_modules_that_did_not_run_leaves_nothing() -> None:
    """[R23] No weights, no place in the order."""
    world = World("h")
    says(world, "pre_forward root", "pre_forward h", "post_forward h more", "post_forward root")
    assert not world.full() and world.run.order == [] and world["h"].uses == []


# ---- R24: a module of several by itself ----------------------------------------------------------------------

CHUNK = ("pre_forward h", "post_forward h inputs outputs more")


def test_r24_chunks_of_a_loss_share_a_gather_and_a_place() -> None:
    """[R24] The unit stays full from the first chunk to the end of the backward of all."""
    world = World("h")
    assert says(world, *CHUNK, *CHUNK, *CHUNK) == ["unshard h", "wait h"]
    assert world.run.order == [world["h"]] and world["h"].uses == [0] and world.run.forward_root is None
    assert says(world, "pre_backward h", "pre_backward h") == []
    world.arrived.add("h")
    assert says(world, "inputs_reached h", "backward_end root") == ["reshard h", "reduce h", "finish root"]
    assert not world["h"].pass_open and world.run.open_passes == []


def test_r24_a_backward_for_each_chunk_makes_each_a_use_of_its_own() -> None:
    """[R24] The backward ends the pass."""
    world = World("h")
    for _ in range(2):
        assert says(world, *CHUNK) == ["unshard h", "wait h"]
        assert world["h"].pass_open
        assert says(world, "pre_backward h", "inputs_reached h", "backward_end root")[0] == "reshard h"
        assert not world["h"].pass_open


def test_r24_the_forward_of_the_model_begins_a_new_pass() -> None:
    """[R24] Although the chunks of the last loss still wait for their backward (1F1B)."""
    world = World("h")
    says(world, *CHUNK, "pre_forward root")
    assert not world["h"].pass_open and not world["h"].pass_outputs
    assert says(world, *CHUNK) == [], "still full"
    assert say(world, "post_forward root outputs") == ["reshard h", "reshard root"]
    assert world["h"].uses == [0, 1]


def test_r24_without_gradients_a_module_by_itself_leaves_nothing_full() -> None:
    """[R24] No backward comes that would free it."""
    world = World("h")
    for _ in range(2):
        assert says(world, "pre_forward h", "post_forward h more") == ["unshard h", "wait h", "reshard h"]
        assert world.run.order == [] and not world["h"].pass_open


def test_r24_a_chunk_without_gradients_after_one_with_them_takes_nothing_away() -> None:
    """[R24] The backward of the first still comes."""
    world = World("h")
    says(world, *CHUNK)
    assert says(world, "pre_forward h", "post_forward h more") == []
    assert world["h"].uses == [0] and world.run.order == [world["h"]]


def test_r24_the_last_module_by_itself_ends_the_pass() -> None:
    """[R24] And keeps the place that the first one took."""
    world = World("h")
    says(world, *CHUNK)
    assert says(world, "pre_forward h", "post_forward h inputs outputs") == ["reshard h"]
    assert world["h"].uses == [0] and not world["h"].pass_open and world.run.open_passes == []


def test_a_pass_of_a_failed_step_is_over() -> None:
    """The next one begins with the first module again."""
    world = World("h")
    says(world, "pre_forward root", *CHUNK, "forward_failed root", "reset root")
    assert not world["h"].pass_open and world.run.open_passes == [] and not world.full()


def test_recomputation_of_several_modules_is_one_pass() -> None:
    """Nothing is freed in between or afterwards: the backward comes next."""
    world = before_backward("h")
    say(world, "pre_backward root")
    says(world, "pre_forward h in_backward", "post_forward h in_backward inputs outputs more")
    assert world["h"].pass_open
    assert says(world, "pre_forward h in_backward", "post_forward h in_backward inputs outputs") == []
    assert not world["h"].pass_open and say(world, "pre_backward h") == []


# ---- R25: weights that backward does not read ----------------------------------------------------------------


def test_r25_backward_does_not_gather_what_it_does_not_read() -> None:
    """[R25] Neither when its turn comes, once for each output, nor ahead; its gradients are sent as ever."""
    world = World("e", "a")
    world.feed(setting("gathers_in_backward", False, "e"))
    program = step("e", "a")
    # In its backward the weights of `e` are not read.
    reads = [i for i, report in enumerate(program) if report.kind == "compute" and report.unit == "e"]
    found = world.feed(report for i, report in enumerate(program) if i != reads[-1])
    forward = [
        "unshard root",
        "wait root",
        "unshard e",
        "wait e",
        "reshard e",
        "unshard a",
        "wait a",
        "reshard a",
        "reshard root",
    ]
    assert found[: len(forward)] == forward
    assert [c for c in found[len(forward) :] if c.endswith(" e")] == ["reduce e"]
    world = before_backward("e")
    world["e"].plan.gathers_in_backward = False
    assert says(world, "pre_backward e", "pre_backward e") == []


def test_r25_a_weight_that_is_read_all_the_same_is_there() -> None:
    """[R25] Where that is noticed: the user was wrong, and the result is right."""
    world = before_backward("e")
    world["e"].plan.gathers_in_backward = False
    assert says(world, "pre_backward e", "pre_backward e needed") == ["unshard e", "wait e"]
    world = before_backward("e")
    world["e"].plan.gathers_in_backward = False
    assert says(world, "pre_backward e needed") == ["unshard e", "wait e"]


def test_r25_recomputation_reads_weights_in_any_case() -> None:
    """[R25] The user speaks of the backward, not of the forward that is repeated in it."""
    world = before_backward("e")
    world["e"].plan.gathers_in_backward = False
    assert says(world, "pre_backward e", "pre_forward e in_backward") == ["unshard e", "wait e"]
