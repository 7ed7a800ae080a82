"""The seam between a root and the other ranks: what accompanies the root, and what the root reports to it.

The engine knows nothing else of other ranks than the messages that it sends. `Companion` is the protocol, and an object
that does nothing: a root with it sends over the mesh's own groups, compares nothing, and an error is the backend's.
`fully_shard` sets who accompanies a unit's root (`UnitSettings.accompany`); the room `agree` has those that connect,
compare and report failures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from ..comm import Comparison, ReduceChannel

# A unit (unit.py), which knows its root, and the root this file.
Unit: TypeAlias = Any


class PublishedFailures(Protocol):
    """Says what failed among the ranks of one mesh, if anything."""

    @property
    def must_meet(self) -> bool: ...
    @property
    def cause(self) -> object | None:
        """Why messages are refused; None: they are not."""


class WaitingRanks(Protocol):
    """The ranks of one mesh, which wait for one another (`peers.Scope`)."""

    # The running command, or a function that returns it, for errors.
    doing: str | Callable[[], str]

    @property
    def failures(self) -> PublishedFailures: ...
    @property
    def faults(self) -> Sequence[object]:
        """Failures of others; usually empty."""

    @property
    def states(self) -> Mapping[str, object]:
        """The texts of ranks that met after a failure, until a forward looked at them; usually empty."""

    @property
    def groups(self) -> Mapping[str, object]:
        """Connections, by name."""

    def refuse_failure(self) -> None:
        """Raise why messages are refused."""


class Companion:
    """Accompanies one root. Each method may raise on all ranks of a mesh, and otherwise does nothing here."""

    # The meshes of the root. Each knows the running command, and refuses it once a rank failed.
    scopes: Sequence[WaitingRanks] = ()

    def forms(self) -> None:
        """The units of the root are known; nothing was sent yet."""

    def connects(self, units: Sequence[Unit]) -> None:
        """The links of `units` are chosen: of all when the root forms, later of those whose settings change."""

    def meets(self) -> bool:
        """Wait for all ranks, because something failed since the last step. Returns whether they had diverged."""
        return False

    def unproven(self, units: Sequence[Unit], some: bool) -> bool:
        """Whether a rank has memory that may be without values. `some`: whether this one has. Marks these `units`."""
        return some

    def forward_begins(self, unit: Unit, *, nested: bool) -> None:
        """An outermost forward of `unit` begins. `nested`: another one of the unit is running."""

    def forward_ends(self, *, raised: bool = False) -> None:
        """The outermost forward is over; nothing of it was handed over yet."""

    def before(self, unit: Unit, kind: str, flags: tuple[str, ...] = ()) -> None:
        """A message of `unit` is about to be sent. `kind`: "unshard", "unshard_secondary" or "reduce"; `flags` of a
        reduction: "accumulated", "partials", "keep"."""

    def carry(self, unit: Unit, position: int, channel: ReduceChannel, *, keep: bool) -> Comparison | None:
        """A reduction of group `position` of `unit` is about to be sent over `channel`. Returns what it carries."""
        return None

    def backward_ends(self) -> None:
        """All messages of the backward arrived, and nothing was handed over yet."""

    def discards(self) -> None:
        """The engine discards what a failed step sent."""

    def failed(self, error: BaseException | None, where: str) -> None:
        """This rank raised `error` (None: unknown) in `where`."""

    def did(self, what: str, unit: Unit | None = None, position: int = 0, name: str = "") -> None:
        """This rank did what all have to do: "hook" (a user's hook changed parameter `name` of group `position` of
        `unit`, or its gradient), "settings" (of reductions changed), "step" (of an optimizer in backward)."""


NOBODY = Companion()
