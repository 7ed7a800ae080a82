"""The text of a trace: events, and under each the commands that were executed while it was handled.

    # a comment
    > pre_forward layers.0 grad
      gather layers.0
      wait layers.0

The text has the words of version 0.1.0, the values have those of today: `gather` above is read as `unshard`. words.py
has the table. `parse` and `render` are each other's reverse, comments aside. Vocabulary: README.md beside this file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tests.golden.words import WRITTEN

EVENTS = (
    "pre_forward",
    "post_forward",
    "pre_backward",
    "grads_ready",
    "backward_end",
    "unshard",
    "wait_unshard",
    "reshard",
)
COMMANDS = ("unshard", "wait", "reshard", "reduce", "cancel", "reshard_secondary", "unshard_secondary")
FLAGS = ("grad", "in_backward", "outputs", "none", "nosync", "final")
# The words of a trace file -> the commands.
_WORDS = {WRITTEN.get(kind, kind): kind for kind in COMMANDS}


class Event(NamedTuple):
    """Something that happened to a unit; flags in the order of `FLAGS`."""

    kind: str
    unit: str
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((">", *self[:2], *self.flags))


class Command(NamedTuple):
    """Something that was done to a unit, during the event before it."""

    kind: str
    unit: str

    def __str__(self) -> str:
        return f"  {self.kind} {self.unit}"

    @property
    def written(self) -> str:
        """Its line in a trace file, in the words of 0.1.0."""
        return f"  {WRITTEN.get(self.kind, self.kind)} {self.unit}"


Trace = tuple[Event | Command, ...]


def parse(text: str) -> Trace:
    """The events and commands of a trace file, in order.

    >>> parse("> pre_forward root grad\\n  gather root\\n")
    (Event(kind='pre_forward', unit='root', flags=('grad',)), Command(kind='unshard', unit='root'))

    Raises `ValueError` with the line number for anything that `render` would not have written.
    """
    items: list[Event | Command] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        words = line.split()
        item: Event | Command | None = None
        if line.startswith("> ") and len(words) >= 3 and words[1] in EVENTS and set(words[3:]) <= set(FLAGS):
            item = Event(words[1], words[2], tuple(words[3:]))
        elif line.startswith("  ") and len(words) == 2 and words[0] in _WORDS and items:
            item = Command(_WORDS[words[0]], words[1])
        if item is None or _line(item) != line:
            raise ValueError(
                f"line {number}: expected '> EVENT UNIT FLAG...' or, below one, '  COMMAND UNIT', "
                f"found {line!r}; record the trace again"
            )
        items.append(item)
    return tuple(items)


def render(trace: Iterable[Event | Command], *, comment: str = "") -> str:
    """The text of a trace; `comment` becomes its first line.

    >>> print(render([Event("reshard", "root"), Command("reshard", "root")]), end="")
    > reshard root
      free root
    """
    head = [f"# {comment}"] if comment else []
    return "".join(f"{line}\n" for line in (*head, *map(_line, trace)))


def _line(item: Event | Command) -> str:
    return item.written if isinstance(item, Command) else str(item)


def by_event(trace: Iterable[Event | Command]) -> list[tuple[Event, tuple[Command, ...]]]:
    """Each event with the commands executed while it was handled.

    >>> by_event(parse("> reshard root\\n  free root\\n> unshard root\\n"))[0]
    (Event(kind='reshard', unit='root', flags=()), (Command(kind='reshard', unit='root'),))
    """
    found: list[tuple[Event, list[Command]]] = []
    for item in trace:
        if isinstance(item, Event):
            found.append((item, []))
        else:
            found[-1][1].append(item)
    return [(event, tuple(commands)) for event, commands in found]


def commands_of(trace: Iterable[Event | Command], kinds: tuple[str, ...] = COMMANDS) -> list[Command]:
    """The commands alone, of the given kinds: what two implementations can be compared by.

    >>> commands_of(parse("> reshard root\\n  free root\\n> unshard root\\n  gather root\\n"), ("unshard",))
    [Command(kind='unshard', unit='root')]
    """
    return [item for item in trace if isinstance(item, Command) and item.kind in kinds]
