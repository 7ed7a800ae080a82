"""The generated programs of test_lifecycle_worlds.py are those that torch's FSDP2 really ran. No torch.

A simulator of autograd that is wrong would make every test on top of it worthless. So the programs of golden scenarios
are generated, and the commands they lead to are compared with the recorded ones.
"""

from __future__ import annotations

import pytest

from tests.golden.parse import commands_of
from tests.golden.test_traces import read
from tests.pure.test_lifecycle_worlds import (
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

BLOCKS = ("layers.0", "layers.1", "layers.2")
NESTED = tuple(Use(f"layers.{i}", (Use(f"layers.{i}.inner"),)) for i in range(2))


def _blocks(trait: Trait, count: int = 3) -> Traits:
    return {f"layers.{i}": trait for i in range(count)}


def _two_forwards(traits: Traits) -> Program:
    first, second = model(*BLOCKS), model(*BLOCKS)
    reports = [*forward(first, traits), *forward(second, traits), *backward([first, second], traits)]
    return [*reports, Report("backward_end")]


def _accumulation(*names: str) -> Program:
    off = [report for name in names for report in setting(name, False, "root", *BLOCKS)]
    on = [report for name in names for report in setting(name, True, "root", *BLOCKS)]
    return [*off, *step(*BLOCKS), *on, *step(*BLOCKS)] * 2


def _interleaved() -> Program:
    first, second, third = model(*BLOCKS), model(*BLOCKS), model(*BLOCKS)
    end = Report("backward_end")
    return [
        *forward(first, {}),
        *forward(second, {}),
        *setting("is_last", False),
        *backward([first], {}),
        end,
        *forward(third, {}),
        *backward([second], {}),
        end,
        *setting("is_last", True),
        *backward([third], {}),
        end,
    ]


FROZEN = {"layers.1": Trait("none")}
REACHED = frozenset({"root", "layers.0", "layers.2"})

SAME: dict[str, tuple[tuple[str, ...], Traits, Program]] = {
    "two_steps": (BLOCKS, {}, step(*BLOCKS) * 2),
    "two_forwards_one_backward": (BLOCKS, {}, _two_forwards({}) * 2),
    "checkpoint_outside": (
        BLOCKS,
        _blocks(Trait(recompute="cut")),
        step(*BLOCKS, traits=_blocks(Trait(recompute="cut"))) * 2,
    ),
    "checkpoint_two_forwards": (
        BLOCKS,
        _blocks(Trait(recompute="cut")),
        _two_forwards(_blocks(Trait(recompute="cut"))) * 2,
    ),
    "checkpoint_outside_reentrant": (
        BLOCKS,
        _blocks(Trait(recompute="reentrant")),
        step(*BLOCKS, traits=_blocks(Trait(recompute="reentrant"))) * 2,
    ),
    "no_grad_then_train": (BLOCKS, {}, evaluation(*BLOCKS) + step(*BLOCKS) * 2 + evaluation(*BLOCKS) * 2),
    "branching": (BLOCKS, {}, step(*BLOCKS) + step(BLOCKS[0], BLOCKS[2]) + step(*BLOCKS)),
    "unused_in_backward": (BLOCKS, {}, step(*BLOCKS, reached=REACHED) * 2),
    "block_used_twice": (BLOCKS, {}, step("layers.0", "layers.1", "layers.0", "layers.2") * 2),
    "frozen_unit": (BLOCKS, FROZEN, step(*BLOCKS, traits=FROZEN) * 2),
    "nested_units": (("layers.0", "layers.0.inner", "layers.1", "layers.1.inner"), {}, step(*NESTED) * 2),
    "accumulation": (BLOCKS, {}, _accumulation("sync")),
    "accumulation_keeping_full": (BLOCKS, {}, _accumulation("sync", "reshard_after_backward")),
    "interleaved_micro_batches": (BLOCKS, {}, _interleaved()),
}


@pytest.mark.parametrize(("reshard", "value"), [("true", True), ("false", False), ("none", None), ("two", 2)])
@pytest.mark.parametrize("name", list(SAME))
def test_the_programs_are_those_of_the_golden_traces(name: str, reshard: str, value: bool | int | None) -> None:
    """Commands of a generated program are those that torch's FSDP2 executed in the scenario of that name."""
    names, traits, program = SAME[name]
    world = World(*names, reshard=value, traits=traits, fifo=name == "interleaved_micro_batches")
    assert world.feed(program) == [f"{kind} {unit}" for kind, unit in commands_of(read(name, reshard))]
