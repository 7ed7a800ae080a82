"""The engine, end to end, issues the commands of torch's FSDP2 in torch's order: every golden trace, on a fake group.

Gathering ahead along the recorded order is switched off (`prefetch_depth=0`): torch has no such prefetch in forward,
where on a device it relies on the CPU running ahead. Every command is checked for legality on the way
(`check=True`).

Compared are unshard, wait, reshard, reduce, cancel, reshard_secondary and unshard_secondary, one flat list for a whole
program. The traces are files of version 0.1.0, read through one table of renamed words (tests/golden/words.py). The
other commands of ours have no counterpart in torch and are left out here: `shelve` and `expose` (torch leaves full
parameters on the modules where no backward follows, ours puts the sharded ones there and keeps the memory),
`accumulate` (torch keeps gradients without a word), `finish`. `reset` occurs in none of these programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from fullshard import fully_shard
from fullshard.engine import unit_of
from fullshard.observe import record
from fullshard.policy import use_options
from tests.golden.parse import commands_of
from tests.golden.scenarios import RESHARD, SCENARIOS, world_of
from tests.golden.test_traces import CASES, read
from tests.harness.fake import fake_world

COMPARED = ("unshard", "wait", "reshard", "reduce", "cancel", "reshard_secondary", "unshard_secondary")
OURS_ALONE = ("shelve", "expose", "accumulate", "finish")

# The inputs of this root need no gradient, and its gradients are ready first. torch waits for the end of the backward
# before it frees and reduces the root, then layers.0. Ours frees the root as soon as its gradients are there (design
# decision 9: gradients are counted), and reduces in one order whatever is ready when: the root last.
EARLIER = "inputs_need_no_grad"


def ours(name: str, reshard: str) -> list[str]:
    """The commands of a scenario on the engine of fullshard: rank 0 of a fake world."""
    with fake_world(world_of(reshard)):
        model = SCENARIOS[name].build(fully_shard, RESHARD[reshard])
        if RESHARD[reshard] is None:
            # Said to us, as it is what torch makes of None: by default we free the root after an evaluation (ADR 0007).
            model.set_reshard_after_forward(False, recurse=False)
        with record(model) as trace:
            SCENARIOS[name].run(model)
        unit = unit_of(model)
        assert unit is not None and unit.root is not None
        assert unit.root.options.check and unit.root.options.prefetch_depth == 0
    assert {kind for kind, _ in trace.commands} <= {*COMPARED, *OURS_ALONE}
    return [f"{kind} {unit}" for kind, unit in trace.commands if kind in COMPARED]


def torchs(name: str, reshard: str) -> list[str]:
    """The commands of torch's FSDP2 in the same scenario, from the committed trace."""
    return [str(command).strip() for command in commands_of(read(name, reshard), COMPARED)]


@pytest.fixture(autouse=True)
def checked_and_without_prefetch() -> Iterator[None]:
    with use_options(prefetch_depth=0, check=True):
        yield


@pytest.mark.sample(24)
@pytest.mark.parametrize(("name", "reshard"), [case for case in CASES if case[0] != EARLIER])
def test_the_commands_are_those_of_torch(name: str, reshard: str) -> None:
    """All that is compared, in one list, in the same order."""
    assert ours(name, reshard) == torchs(name, reshard)


@pytest.mark.parametrize("reshard", list(RESHARD))
def test_memory_goes_early_and_messages_go_in_order(reshard: str) -> None:
    """The one intended difference: in each backward ours frees the root earlier and reduces it last."""
    found, expected = ours(EARLIER, reshard), torchs(EARLIER, reshard)
    assert Counter(found) == Counter(expected)
    early, late = (_places(commands, "reshard root") for commands in (found, expected))
    assert all(a <= b for a, b in zip(early, late, strict=True)) and early != late
    assert _without_root(found) == _without_root(expected)
    assert _reduced(found) == ["layers.2", "layers.1", "layers.0", "root"] * 2
    assert _reduced(expected) == ["layers.2", "layers.1", "root", "layers.0"] * 2


def _places(commands: list[str], wanted: str) -> list[int]:
    """Where `wanted` stands among the commands that move the weights of other units."""
    moves = [c for c in commands if not c.startswith("reduce") and (c == wanted or not c.endswith("root"))]
    return [position for position, command in enumerate(moves) if command == wanted]


def _reduced(commands: list[str]) -> list[str]:
    return [command.removeprefix("reduce ") for command in commands if command.startswith("reduce ")]


def _without_root(commands: list[str]) -> list[str]:
    return [command for command in commands if command not in ("reshard root", "reduce root")]
