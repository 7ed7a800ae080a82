"""Records the events and commands of a run as text, one per line, as in the golden files and the documentation.

with fullshard.observe.record(model) as trace:
    model(batch).sum().backward()
print("\\n".join(trace.lines))

> pre_forward root
  unshard root
  wait root
...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..engine import Root, root_of
from ..engine.unit import module_units
from ..policy.arguments import expect_module
from ..schedule import Command, Event


class Trace:
    """The recorded events and commands. `lines` is the text; `commands` the (kind, unit) pairs only."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def event(self, event: Event) -> None:
        self.lines.append(str(event))

    def command(self, command: Command) -> None:
        self.lines.append(f"  {command}")

    @property
    def commands(self) -> list[tuple[str, str]]:
        """(kind, unit name) of each command, in order."""
        words = (line.split() for line in self.lines if not line.startswith(">"))
        return [(kind, unit) for kind, unit in words]

    def __str__(self) -> str:
        return "\n".join(self.lines)


@contextmanager
def record(model: nn.Module) -> Iterator[Trace]:
    """Record the units of `model` while the context is open. Forms the root if no forward ran yet.

    Raises `ValueError` if nothing in `model` is sharded.
    """
    expect_module("model", model)
    trace = Trace()
    roots: list[Root] = []
    for unit in module_units(model):
        root = root_of(unit)
        if root not in roots:
            roots.append(root)
    if not roots:
        raise ValueError("model: expected a module with sharded parts, found none; apply fully_shard first")
    for root in roots:
        root.event_listeners.append(trace.event)
        root.executor.listeners.append(trace.command)
    try:
        yield trace
    finally:
        for root in roots:
            root.event_listeners.remove(trace.event)
            root.executor.listeners.remove(trace.command)
