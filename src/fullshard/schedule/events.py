"""Events (reports about units) and commands (actions on units), as values with a text form.

    > pre_forward layers.0 grad        an event: kind, unit, flags
      unshard layers.0                 a resulting command
      wait layers.0

`str` writes this text, `parse_event` and `parse_command` read it. Traces, golden files and the tables in the documents
use it, too. The root is written `root`.

    event            the runtime reports that
    pre_forward      a unit's forward is about to run
    post_forward     it has run
    forward_failed   it ended with an exception
    pre_backward     a gradient reached one of its outputs, or a saved weight is needed
    grads_ready      all gradients of the unit's parameters in this backward are there
    inputs_reached   the gradients of the unit's inputs are complete: the backward of this use is over
    backward_end     the whole backward is over
    backward_failed  it ended with an exception
    finalize         the user called finalize_backward: all backwards of the step are over
    wait_finalize    the user waits for what it sent
    unshard, wait_unshard, reshard    the user called these
    reset            a step did not finish; its leftovers must be discarded

    command             the executor
    unshard             issues the all-gather of a unit's parameters
    wait                waits for it and puts the full parameters on the modules
    reshard             frees the full parameters and puts the sharded ones on the modules
    cancel              waits for an all-gather that nobody needs and discards its result
    shelve              puts the sharded parameters on the modules but keeps the memory of the full ones
    expose              puts kept full parameters on the modules
    reshard_secondary   keeps the secondary shard: this rank's part among the k ranks of its block; frees the rest
    unshard_secondary   issues the all-gather of the secondary shards over the block
    reduce              issues the reduction of the unit's gradients
    accumulate          keeps the unit's gradients, unreduced, for a later backward
    finish              waits for all reductions and hands the gradients to the sharded parameters
    reset               discards gradients and messages of a failed step

`unshard`, `reshard` and `reset` name an event and a command: the user's call, and what the executor does. The marker
`>` tells them apart.
"""

from __future__ import annotations

from typing import NamedTuple

from .record import UnitRecord

EVENTS = (
    "pre_forward",
    "post_forward",
    "forward_failed",
    "pre_backward",
    "grads_ready",
    "inputs_reached",
    "backward_end",
    "backward_failed",
    "finalize",
    "wait_finalize",
    "unshard",
    "wait_unshard",
    "reshard",
    "reset",
)
COMMANDS = (
    "unshard",
    "wait",
    "reshard",
    "cancel",
    "shelve",
    "expose",
    "reshard_secondary",
    "unshard_secondary",
    "reduce",
    "accumulate",
    "finish",
    "reset",
)
# Flags of events; each one matters to some rule (schedule/rules.py).
FLAGS = (
    "grad",
    "in_backward",
    "nested",
    "inputs",
    "outputs",
    "more",
    "none",
    "nosync",
    "stale",
    "create_graph",
    "needed",
    "opaque",
    "spent",
)


# Commands, in words for errors.
_TOLD = {
    "unshard": "the all-gather of {}",
    "wait": "the all-gather of {}",
    "reshard": "freeing {}",
    "cancel": "giving up the all-gather of {}",
    "shelve": "showing the shards of {}",
    "expose": "showing the parameters of {}",
    "reshard_secondary": "keeping a part of {}",
    "unshard_secondary": "the all-gather of the secondary shard of {}",
    "reduce": "the reduction of the gradients of {}",
    "accumulate": "keeping the gradients of {}",
    "finish": "the end of the backward of {}",
    "reset": "giving up the step of {}",
}


class Event(NamedTuple):
    """One event. `unit` is a name; "root" is the root."""

    kind: str
    unit: str
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(("> " + self.kind, self.unit, *self.flags))


class Command(NamedTuple):
    """One action. `unit` is the record, so that the executor needs no lookup. `rule`: the [Rn] of rules.py that asked
    for it, or "called" (by the user)."""

    kind: str
    unit: UnitRecord
    rule: str

    def __str__(self) -> str:
        return f"{self.kind} {self.unit.name}"

    def told(self) -> str:
        """The command in words, for an error: "the all-gather of layers.0"."""
        name = self.unit.name
        if name == "root":
            name = "the root module"
        elif not any(map(str.isalpha, name)):
            name = f"module {name}"  # of an nn.Sequential
        return _TOLD[self.kind].format(name)


def parse_event(text: str) -> Event:
    """The reverse of `str(event)`.

    >>> parse_event("> pre_forward layers.0 grad")
    Event(kind='pre_forward', unit='layers.0', flags=('grad',))

    Raises `ValueError` for another form, an unknown kind or an unknown flag.
    """
    marker, *words = text.split() or [""]
    if marker != ">" or len(words) < 2 or words[0] not in EVENTS or not set(words[2:]) <= set(FLAGS):
        raise ValueError(f"event: expected '> KIND UNIT FLAG...' with a kind of {EVENTS}, found {text!r}")
    return Event(words[0], words[1], tuple(words[2:]))


def parse_command(text: str) -> tuple[str, str]:
    """Kind and unit name of a command's text.

    >>> parse_command("  unshard layers.0")
    ('unshard', 'layers.0')

    Raises `ValueError` for another form or an unknown kind.
    """
    words = text.split()
    if len(words) != 2 or words[0] not in COMMANDS:
        raise ValueError(f"command: expected 'KIND UNIT' with a kind of {COMMANDS}, found {text!r}")
    return words[0], words[1]
