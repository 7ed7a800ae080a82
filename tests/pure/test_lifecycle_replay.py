"""The golden events of torch's FSDP2, replayed through the rules, give torch's commands under each event. No torch.

The events of torch and ours differ in one place: torch's `grads_ready` is its post-backward of a unit, which runs when
the gradients of the unit's inputs are complete. That is our `inputs_reached`; those that torch's final callback ran
("final") are part of our `backward_end`. Our own `grads_ready` comes before it, when the gradients were counted: both
ways are replayed, and have to give the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from fullshard.schedule import Command, RunRecord, UnitRecord, rules
from tests.golden.parse import Event, by_event
from tests.golden.scenarios import RESHARD
from tests.golden.test_traces import CASES, read
from tests.pure.test_lifecycle_worlds import OURS_ALONE, Uses

# ---- what the scenarios set, beside reshard_after_forward ----------------------------------------------------

# For each backward of the scenario, in order; where it is not named, it is what a fresh record has.
EACH_BACKWARD: dict[str, dict[str, tuple[bool, ...]]] = {
    "accumulation": {"sync": (False, True) * 2},
    "accumulation_keeping_full": {"sync": (False, True) * 2, "reshard_after_backward": (False, True) * 2},
    "keep_after_backward": {"reshard_after_backward": (False, False)},
    "interleaved_micro_batches": {"is_last": (False, False, True)},
}
FORWARD_LISTS = {"root": (0, 1), "layers.0": (1, 2), "layers.1": (2, 3), "layers.2": (3,)}
BACKWARD_LISTS = {"root": (3, 2), "layers.3": (2, 1), "layers.2": (1, 0), "layers.1": (0,)}
LISTS: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "forward_prefetch_lists": ("forward_prefetch", FORWARD_LISTS),
    "forward_prefetch_unused": ("forward_prefetch", FORWARD_LISTS),
    "backward_prefetch_lists": ("backward_prefetch", BACKWARD_LISTS),
}
EMPTY = {"bare_root": "root"}
FROZEN = {"frozen_unit": "layers.1"}
# Neither the inputs of the root nor those of layers.0 need a gradient. What is left for the end of the backward goes in
# the order of the units in torch, the root first; ours keeps the order in which it would have gone (order.py).
LATER = "inputs_need_no_grad"
# Backwards in the order of their forwards.
FIFO = {"two_forwards_two_backwards", "interleaved_micro_batches"}


def fresh(name: str, reshard: str, events: Sequence[Event]) -> RunRecord:
    """The records of a scenario before its first event. Prefetch along the recorded order is off, as torch on a CPU."""
    inner = sorted({event.unit for event in events} - {"root"})
    units = {
        unit: UnitRecord(unit, index, reshard_after_forward=RESHARD[reshard] in (True, 2))
        for index, unit in enumerate(("root", *inner))
    }
    if RESHARD[reshard] is None:
        for unit in inner:
            units[unit].plan.reshard_after_forward = True
    for record in units.values():
        record.plan.keeps_secondary = reshard == "two"
    attribute, lists = LISTS.get(name, ("", {}))
    for unit, blocks in lists.items():
        setattr(units[unit].plan, attribute, tuple(units[f"layers.{i}"] for i in blocks))
    if name in EMPTY:
        units[EMPTY[name]].empty = True
    if name in FROZEN:
        units[FROZEN[name]].plan.frees_late = True
        units[FROZEN[name]].plan.trainable = False
    return RunRecord(list(units.values()), prefetch_depth=0)


# ---- replay ---------------------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """Some events that ours reports as one, and torch's commands during all of them."""

    event: Event
    # Units that torch's final callback handled, with whether they had a gradient.
    final: dict[str, bool]
    commands: tuple[str, ...]


def moments(name: str, reshard: str) -> list[Moment]:
    """The golden trace with the events of each final callback put together."""
    found: list[Moment] = []
    final: dict[str, bool] = {}
    commands: tuple[str, ...] = ()
    for event, executed in by_event(read(name, reshard)):
        commands += tuple(str(command).strip() for command in executed)
        if "final" in event.flags:
            final[event.unit] = "none" not in event.flags
            continue
        assert not final or event.kind == "backward_end"
        found.append(Moment(event, final, commands))
        final, commands = {}, ()
    assert not final
    return found


def decide(run: RunRecord, moment: Moment, uses: Uses, *, counted: bool) -> list[Command]:
    """Our commands for torch's events. `counted`: gradients are reported when they are ready, as our engine does."""
    event = moment.event
    unit = next(unit for unit in run.units if unit.name == event.unit)
    in_backward = "in_backward" in event.flags
    if event.kind == "pre_forward":
        return rules.pre_forward(run, unit, in_backward=in_backward)
    if event.kind == "post_forward":
        commands = rules.post_forward(run, unit, in_backward=in_backward, outputs="outputs" in event.flags)
        if "outputs" in event.flags:
            uses.note(unit)
        return commands
    if event.kind == "pre_backward":
        return rules.pre_backward(run, unit, use=uses.take(unit))
    if event.kind == "grads_ready":
        assert ("nosync" in event.flags) is not unit.plan.sync, "the table of settings differs from what torch was told"
        present = "none" not in event.flags
        if present and counted:
            return rules.grads_ready(run, unit) + rules.inputs_reached(run, unit, present=False)
        return rules.inputs_reached(run, unit, present=present)
    if event.kind == "backward_end":
        return rules.backward_end(run, unit, [moment.final.get(unit.name, False) for unit in run.units])
    return list(getattr(rules, event.kind)(run, unit))


@pytest.mark.parametrize("counted", [False, True], ids=["inputs_reached", "grads_ready"])
def test_rules_decide_what_torch_does(counted: bool) -> None:
    """The same commands in the same order, event by event."""
    for name, reshard in CASES:
        _decide_what_torch_does(name, reshard, counted=counted)


def _decide_what_torch_does(name: str, reshard: str, *, counted: bool) -> None:
    expected = moments(name, reshard)
    run = fresh(name, reshard, [moment.event for moment in expected])
    uses, backwards = Uses(fifo=name in FIFO), 0
    for number, moment in enumerate(expected):
        for field, values in EACH_BACKWARD.get(name, {}).items():
            for record in (run.ending,) if field == "is_last" else [unit.plan for unit in run.units]:
                setattr(record, field, values[min(backwards, len(values) - 1)])
        commands = decide(run, moment, uses, counted=counted)
        found = tuple(str(command) for command in commands if command.kind not in OURS_ALONE)
        if name == LATER and moment.event.kind == "backward_end":
            assert sorted(found) == sorted(moment.commands) and found != moment.commands
        else:
            assert found == moment.commands, f"{name}, {reshard}, event {number}: {moment.event}"
        backwards += moment.event.kind == "backward_end"
    if name in EACH_BACKWARD:
        assert {len(values) for values in EACH_BACKWARD[name].values()} == {backwards}


def test_every_scenario_in_a_table_exists() -> None:
    """A table entry for a scenario that was renamed would change nothing, quietly."""
    assert {*EACH_BACKWARD, *LISTS, *EMPTY, *FROZEN} <= {name for name, _ in CASES}
