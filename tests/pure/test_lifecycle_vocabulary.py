"""Events and commands as text, the legal transitions, and the documents of both. No torch."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.schedule import (
    COMMANDS,
    EVENTS,
    FLAGS,
    Command,
    CommandChecker,
    Event,
    Full,
    LifecycleError,
    UnitRecord,
    events,
    parse_command,
    parse_event,
    record,
    rules,
)

# ---- text ---------------------------------------------------------------------------------------------------

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*", fullmatch=True)
flags = st.lists(st.sampled_from(FLAGS), unique=True).map(tuple)


@given(st.sampled_from(EVENTS), names, flags)
def test_an_event_and_its_text_are_each_others_reverse(kind: str, unit: str, flags: tuple[str, ...]) -> None:
    """Whatever the name of the module; flags keep their order."""
    event = Event(kind, unit, flags)
    assert parse_event(str(event)) == event
    assert str(event).startswith("> ")


@given(st.sampled_from(COMMANDS), names, st.sampled_from(["", "  "]))
def test_a_command_and_its_text_are_each_others_reverse(kind: str, unit: str, indent: str) -> None:
    """With and without the indent of a trace. The record is named, not written."""
    assert parse_command(indent + str(Command(kind, UnitRecord(unit, 0), "R16"))) == (kind, unit)


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_command_is_told_in_words_that_name_the_module(kind: str) -> None:
    """None of them is a word of ours that users do not know."""
    told = {unit: Command(kind, UnitRecord(unit, 0), "R16").told() for unit in ("root", "layers.0", "3")}
    assert told["root"].endswith(" the root module")
    assert told["layers.0"].endswith(" layers.0")
    assert told["3"].endswith(" module 3")
    assert not {"shelve", "expose", "unshard_secondary", "reshard_secondary", "reset"} & set(told["layers.0"].split())


@pytest.mark.parametrize(
    "text",
    ["", ">", "> pre_forward", "pre_forward a", "> cancel a", "> pre_forward a twice", "  unshard a", ">pre_forward a"],
)
def test_what_is_no_event_is_refused(text: str) -> None:
    """With what was found."""
    with pytest.raises(ValueError, match="event: expected") as error:
        parse_event(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("text", ["", "unshard", "unshard a b", "> pre_forward a", "fetch a"])
def test_what_is_no_command_is_refused(text: str) -> None:
    """With what was found."""
    with pytest.raises(ValueError, match="command: expected") as error:
        parse_command(text)
    assert repr(text) in str(error.value)


def test_every_event_has_one_rule() -> None:
    """`rules` holds one public function for each event, and no other."""
    functions = {
        name
        for name, value in vars(rules).items()
        if getattr(value, "__module__", "") == rules.__name__ and name[0] != "_"
    }
    assert functions == set(EVENTS)


def test_the_vocabulary_is_the_documented_one() -> None:
    """The tables in the docstring of events.py name each event and each command once, and nothing else."""
    assert events.__doc__ is not None
    head, _, tail = events.__doc__.partition("    command             the executor\n")
    listed = re.findall(r"^    (\w+(?:, \w+)*)  ", head.partition("the runtime reports that\n")[2], re.MULTILINE)
    assert [name for entry in listed for name in entry.split(", ")] == list(EVENTS)
    assert re.findall(r"^    (\w+)  ", tail, re.MULTILINE) == list(COMMANDS)


# ---- legal transitions ----------------------------------------------------------------------------------------

# Commands that bring a unit from "sharded" to a record.
REACH: dict[Full, list[str]] = {
    Full.SHARDED: [],
    Full.PENDING: ["unshard"],
    Full.FULL: ["unshard", "wait"],
    Full.SHELVED: ["unshard", "wait", "shelve"],
    Full.SECONDARY: ["unshard", "wait", "reshard_secondary"],
}
MOVES = ("unshard", "wait", "reshard", "cancel", "shelve", "expose", "reshard_secondary", "unshard_secondary")


def documented() -> dict[tuple[Full, str], Full]:
    """(from, command) -> to, out of the table in the docstring of record.py."""
    assert record.__doc__ is not None
    rows = re.findall(r"^    ([A-Z]+) +([A-Z]+) +(\w+)", record.__doc__, re.MULTILINE)
    return {(Full[before], command): Full[after] for before, after, command in rows}


def test_the_documented_table_is_complete() -> None:
    """Every command that moves full parameters is in it."""
    assert len(documented()) == 11 and {command for _, command in documented()} == set(MOVES)


@pytest.mark.parametrize(("before", "command"), list(product(Full, MOVES)))
def test_exactly_the_documented_transitions_are_legal(before: Full, command: str) -> None:
    """Each other pair raises, and says what was expected, what was found, and what came before."""
    checker = CommandChecker()
    checker.run([("unshard", "other"), *((kind, "a") for kind in REACH[before])])
    if (before, command) in documented():
        checker.command(command, "a")
        assert checker.full["a"] is documented()[before, command]
        return
    with pytest.raises(LifecycleError) as error:
        checker.command(command, "a")
    text = str(error.value)
    assert text.startswith(f"a: {command} needs ") and f"found {before.name}" in text
    assert text.endswith("last commands: " + (", ".join(REACH[before]) or "none"))
    legal = {full.name for full, kind in documented() if kind == command}
    assert set(text.partition(" needs ")[2].partition(",")[0].split(" or ")) == legal


@pytest.mark.parametrize("command", ["reduce", "accumulate", "reset"])
@pytest.mark.parametrize("before", Full)
def test_gradients_do_not_depend_on_where_the_weights_are(before: Full, command: str) -> None:
    """Nor do they move them."""
    checker = CommandChecker()
    checker.run([*((kind, "a") for kind in REACH[before]), (command, "a")])
    assert checker.full.get("a", Full.SHARDED) is before
    assert checker.log[-1] == (command, "a")


def test_a_backward_ends_with_nothing_in_flight() -> None:
    """Whichever unit it is; full and shelved ones may stay."""
    checker = CommandChecker()
    checker.run([("unshard", "root"), ("wait", "root"), ("finish", "root"), ("unshard", "b"), ("unshard", "c")])
    with pytest.raises(LifecycleError, match="no all-gather in flight, found those of b, c"):
        checker.command("finish", "root")


def test_memory_is_bounded() -> None:
    """Beside what is to stay full. A gather in flight has memory, and so has what is shelved."""
    checker = CommandChecker(max_full=2, stays_full=["root"])
    checker.run([("unshard", "root"), ("unshard", "a"), ("wait", "a"), ("unshard", "b"), ("shelve", "a")])
    with pytest.raises(LifecycleError, match="unshard c: expected at most 2 units with memory, found a, b, c"):
        checker.command("unshard", "c")
    checker = CommandChecker(max_full=1)
    checker.run(
        [("unshard", "a"), ("cancel", "a"), ("unshard", "b"), ("wait", "b"), ("reshard", "b"), ("unshard", "a")]
    )


def test_an_error_shows_the_last_ten_commands_of_its_unit() -> None:
    """And of no other."""
    checker = CommandChecker()
    for _ in range(7):
        checker.run([("unshard", "a"), ("cancel", "a"), ("unshard", "b"), ("cancel", "b")])
    with pytest.raises(LifecycleError) as error:
        checker.command("wait", "a")
    assert str(error.value).endswith("last commands: " + ", ".join(["unshard", "cancel"] * 5))


def test_ranks_can_be_compared_by_their_logs() -> None:
    """Every command is noted, in order, those that move nothing too."""
    commands = [("unshard", "a"), ("wait", "a"), ("reshard", "a"), ("reduce", "a"), ("finish", "root")]
    checker = CommandChecker()
    checker.run(commands)
    assert checker.log == commands


def test_records_print_as_what_they_are() -> None:
    """In an error, a debugger, an assertion."""
    unit = UnitRecord("layers.0", 1)
    unit.full = Full.PENDING
    assert repr(unit) == "<unit layers.0 PENDING IDLE>"
