"""Events (reports about units) and commands (actions on units), as values with a text form.

    > pre_forward layers.0 grad        an event: kind, unit, flags
      gather layers.0                  a resulting command
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
    unshard, wait_unshard, reshard    the user called these
    abandon          a step did not finish; its leftovers must be discarded

    command   the executor
    gather    issues the all-gather of a unit's parameters
    wait      waits for it and puts the full parameters on the modules
    free      gives the memory of the full parameters back and puts the sharded ones on the modules
    drop      waits for an unused gather and discards its result
    shelve    puts the sharded parameters on the modules but keeps the memory of the full ones
    expose    puts kept full parameters on the modules
    narrow    keeps this rank's part of the full parameters among the k ranks of its block, and frees the rest
    widen     issues the all-gather of the kept parts, over the block
    reduce    issues the reduction of the unit's gradients
    hold      keeps the unit's gradients, unreduced, for a later backward
    finish    waits for all reductions and hands the gradients to the sharded parameters
    discard   discards gradients and messages of a failed step
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
    "unshard",
    "wait_unshard",
    "reshard",
    "abandon",
)
COMMANDS = (
    "gather",
    "wait",
    "free",
    "drop",
    "shelve",
    "expose",
    "narrow",
    "widen",
    "reduce",
    "hold",
    "finish",
    "discard",
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
    "gather": "the gather of {}",
    "wait": "the gather of {}",
    "free": "freeing {}",
    "drop": "giving up the gather of {}",
    "shelve": "showing the shards of {}",
    "expose": "showing the parameters of {}",
    "narrow": "keeping a part of {}",
    "widen": "the gather of what is kept of {}",
    "reduce": "the reduction of the gradients of {}",
    "hold": "keeping the gradients of {}",
    "finish": "the end of the backward of {}",
    "discard": "giving up the step of {}",
}


class Event(NamedTuple):
    """One event. `unit` is a name; "root" is the root."""

    kind: str
    unit: str
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(("> " + self.kind, self.unit, *self.flags))


class Command(NamedTuple):
    """One action. `unit` is the record, so that the executor needs no lookup."""

    kind: str
    unit: UnitRecord

    def __str__(self) -> str:
        return f"{self.kind} {self.unit.name}"

    def told(self) -> str:
        """The command in words, for an error: "the gather of layers.0"."""
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

    >>> parse_command("  gather layers.0")
    ('gather', 'layers.0')

    Raises `ValueError` for another form or an unknown kind.
    """
    words = text.split()
    if len(words) != 2 or words[0] not in COMMANDS:
        raise ValueError(f"command: expected 'KIND UNIT' with a kind of {COMMANDS}, found {text!r}")
    return words[0], words[1]
