"""The committed traces are complete and legal; whether they are true, fake/test_golden_torch.py asks."""

import hashlib
from pathlib import Path

import pytest

from tests.golden.parse import (
    COMMANDS,
    EVENTS,
    FLAGS,
    Command,
    Event,
    Trace,
    by_event,
    commands_of,
    parse,
    render,
)
from tests.golden.scenarios import RESHARD, SCENARIOS, cases
from tests.golden.words import RENAMED

TRACES = Path(__file__).parent / "traces"
CASES = [(scenario.name, reshard) for scenario, reshard in cases()]


def read(name: str, reshard: str) -> Trace:
    """The committed trace of a case."""
    return parse((TRACES / f"{name}__reshard_{reshard}.txt").read_text())


def test_there_is_one_file_for_each_case_and_no_other() -> None:
    """Nine subjects under four values of reshard_after_forward are the least that is promised."""
    assert {path.name for path in TRACES.iterdir()} == {f"{name}__reshard_{r}.txt" for name, r in CASES}
    promised = {
        "two_steps",
        "two_forwards_one_backward",
        "checkpoint_inside",
        "checkpoint_inside_reentrant",
        "checkpoint_outside",
        "no_grad_then_train",
        "branching",
        "unused_in_backward",
        "forward_prefetch_lists",
    }
    assert promised <= SCENARIOS.keys() and len(RESHARD) == 4


def test_the_files_are_those_of_version_0_1_0() -> None:
    """Byte for byte: words that changed since are in words.py, and nowhere else."""
    digest = hashlib.sha256()
    for path in sorted(TRACES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    assert digest.hexdigest() == "3f1d6430800851d54be5c33f0083c207c0806d8a7dd9db9026f9b60268c02724"


def test_text_and_value_are_each_others_reverse() -> None:
    """Nothing in a file is lost by parsing it."""
    for name, reshard in CASES:
        text = (TRACES / f"{name}__reshard_{reshard}.txt").read_text()
        comment = text.splitlines()[0].removeprefix("# ")
        assert render(parse(text), comment=comment) == text
        assert comment == f"{name}: {SCENARIOS[name].about}; reshard_after_forward={RESHARD[reshard]}"


LEGAL = {
    "unshard": ("sharded", "pending"),
    "wait": ("pending", "full"),
    "cancel": ("pending", "sharded"),
    "reshard": ("full", "sharded"),
    "reshard_secondary": ("full", "secondary"),
    "unshard_secondary": ("secondary", "pending"),
}


def test_commands_are_legal_in_order() -> None:
    """Unshard what is sharded, wait for or cancel what is pending, reshard what is full; nothing stays pending."""
    for name, reshard in CASES:
        state: dict[str, str] = {}
        for event, commands in by_event(read(name, reshard)):
            here = f"{name}, {reshard}: {event}"
            for command in commands:
                if command.kind == "reduce":
                    assert event.kind == "grads_ready" and event.unit == command.unit, here
                    continue
                needs, becomes = LEGAL[command.kind]
                found = state.get(command.unit, "sharded")
                assert found == needs or (command.kind, found) == ("reshard", "secondary"), f"{here}: {command}"
                state[command.unit] = becomes
            if event.kind == "backward_end" and name != "interleaved_micro_batches":
                assert "pending" not in state.values(), here


def test_every_word_of_the_vocabulary_occurs() -> None:
    """Each event, command and flag is in some trace; one that is in none would be untested."""
    items = [item for name, reshard in CASES for item in read(name, reshard)]
    assert {item.kind for item in items if isinstance(item, Event)} == set(EVENTS)
    assert {item.kind for item in items if isinstance(item, Command)} == set(COMMANDS)
    assert {item.written.split()[0] for item in items if isinstance(item, Command)} == {*RENAMED, "wait", "reduce"}
    assert {flag for item in items if isinstance(item, Event) for flag in item.flags} == set(FLAGS)


def test_none_differs_from_true_in_the_root_alone() -> None:
    """reshard_after_forward=None is True for every unit but the root, which stays full until its backward."""
    for name in SCENARIOS:
        none, true = (
            [item for item in read(name, reshard) if isinstance(item, Event) or item.unit != "root"]
            for reshard in ("none", "true")
        )
        assert none == true, name


def test_reshard_after_forward_never_changes_what_is_reduced() -> None:
    """Reductions, their number and their order, are those of the backward alone."""
    for name in SCENARIOS:
        reduced = [commands_of(read(name, reshard), ("reduce",)) for reshard in RESHARD]
        assert reduced[0] == reduced[1] == reduced[2] == reduced[3], name


@pytest.mark.parametrize(
    "text",
    [
        "gather root\n",
        "  gather root\n",  # a command before any event
        "> pre_forward\n",
        "> pre_forward root sometimes\n",
        "> begin root\n",
        "> reshard root\n  release root\n",
        "> reshard root\n  reshard root\n",  # a word of today, in a file of 0.1.0
        "> reshard root\n   free root\n",
        "> reshard  root\n",
    ],
)
def test_anything_else_is_refused_with_its_line(text: str) -> None:
    """A trace that was edited by hand and broken is not read as something else."""
    with pytest.raises(ValueError, match=f"line {len(text.splitlines())}"):
        parse(text)
